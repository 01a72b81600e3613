"""Checks of the model: its files, its tokenizer, and the memory that it needs."""

from __future__ import annotations

import math

import torch

from lopa_dist.engine import memory
from lopa_dist.engine.request import Request
from lopa_dist.engine.runners import wants_graphs
from lopa_dist.jobs.commands.doctor.finding import GIB, Finding, Machine, broken, fine, slow
from lopa_dist.jobs.run.prompts import check_template
from lopa_dist.jobs.setup.resolve import choose_dtype, resolve
from lopa_dist.models.checkpoint import DTYPES
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import find, in_cache, local, why_not_there
from lopa_dist.models.quantize import linears, mixtures
from lopa_dist.models.tensor_parallel import split
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.node_memory import allotted_memory, memory_left

PROMPT = 1024  # tokens of a prompt when planning memory: the doctor reads no input


def model(machine: Machine) -> Finding:
    """Return whether the checkpoint is here and can be run."""
    path, shape = machine.config.model.path, machine.shape
    if shape is None:
        if reason := why_not_there(path):
            why, _, remedy = reason.partition("; ")
            return broken(why, remedy)
        return fine(f"{path} is not here yet; a job downloads it, so a node without network needs it beforehand")
    resolve(machine.config, shape, machine.device)  # refuses settings that do not suit the model
    return fine(f"{path}: {shape.family}, {parameters(shape) / 1e6:,.0f} million weights")


def parameters(shape: ModelConfig) -> int:
    """Return how many weights a model has, from its configuration alone."""
    return weight_bytes(shape, "none", 1)


def weight_bytes(shape: ModelConfig, kind: str, element: int, tensor: int = 1) -> int:
    """Return the bytes of a model's weights on one rank, from its configuration alone.

    Args:
        shape: the configuration.
        kind: `model.quantization`.
        element: bytes per number that is not quantised.
        tensor: how many ranks the model is split over.
    """
    with torch.device("meta"):
        model = Transformer(shape)
    first = Solo()
    first.size = tensor
    split(model, first)
    eight: set[int] = set()
    if kind != "none":
        eight = {id(linear.weight) for _, _, linear in linears(model)}
        eight |= {id(weight) for mlp in mixtures(model) for weight in (mlp.gate_up, mlp.down)}
    return sum(weight.numel() * (1 if id(weight) in eight else element) for weight in model.parameters())


def memory_needed(machine: Machine) -> Finding:
    """Return whether the free memory holds the weights, and K/V and rows of as many sequences as should run at once."""
    if machine.shape is None:
        return fine("not planned: it follows from the model's configuration, which is not here yet")
    config, device = resolve(machine.config, machine.shape, machine.device), machine.device
    # auto depends on the job's ranks; a rank needs the most memory where it has all branches and all weights
    branch, tensor = (1 if axis == "auto" else int(axis) for axis in (config.parallel.branch, config.parallel.tensor))
    on_gpu = memory.free_bytes(device)
    free = memory_left(detect().local_size) if on_gpu is None else on_gpu
    element = DTYPES[choose_dtype(config.model, device)].itemsize
    weights = weight_bytes(machine.shape, config.model.quantization, element, tensor)
    what = f"{free / GIB:.1f} GiB free, {weights / GIB:.1f} for weights"
    if free <= weights:
        where = "a larger --mem" if math.isfinite(allotted_memory()) else "a machine with more memory"
        larger = where if on_gpu is None else "a GPU with more memory"
        return broken(what, f"{larger}, model.quantization, model.dtype=bf16 or parallel.tensor")
    asked, new = config.engine.max_sequences, config.decode.max_new_tokens
    requests = memory.space_needed([Request(0, [0] * PROMPT, new, 0)] * asked, config.decode.scope.caches_kv)
    static = wants_graphs(config.engine.graphs, config.engine.attention == "meta", device, tensor)
    try:
        plan = memory.plan_for(
            machine.shape, config.decode, config.engine, requests, asked, element, free - weights, branch, tensor,
            static,
        )  # fmt: skip
    except memory.TooLarge:
        what += f", too little is left for one sequence of {PROMPT + new} tokens"
        return broken(what, "reduce decode.max_new_tokens, or set model.quantization")
    what += f", {plan.bytes / GIB:.1f} for {plan.sequences} sequences of {PROMPT + new} tokens"
    if plan.sequences < asked:
        return slow(f"{what}, not engine.max_sequences={asked}")
    return fine(what)


def tokenizer(machine: Machine) -> Finding:
    """Return whether a message gets through the chat template, and how many tokens the tokenizer has."""
    path, mode = machine.config.model.path, machine.config.model.chat_template
    folder = find(path) if local(path) is not None else in_cache(path, "tokenizer_config.json")
    if folder is None:
        return fine("comes with the model")
    lora = machine.config.model.merged_lora
    merged = lora and (local(lora, "model.lora") or in_cache(lora, "tokenizer_config.json"))
    words = load_tokenizer(folder, merged or None)
    known = read_config(folder).vocab_size
    tokens = f"{len(words)} tokens"
    if beyond := sorted((number, text) for text, number in words.get_vocab().items() if number >= known):
        some = ", ".join(repr(text) for _, text in beyond[-3:])
        tokens += f" (prompts with {some} are refused: the model has {known})"
    if not words.chat_template:
        if mode == "always":
            return broken("model.chat_template=always, but the tokenizer has none", "model.chat_template=never")
        return fine(f"{tokens}, no chat template: prompts go in as they are")
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    given = machine.config.model.template
    try:
        check_template(given, str(words.chat_template))
    except ValueError as error:
        return broken(str(error), "other values in model.template")
    text = str(words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given))
    if messages[0]["content"] not in text:
        return broken("the chat template leaves the question out", "model.chat_template=never, or another tokenizer")
    if mode != "never" and max(words.encode(text, add_special_tokens=False)) >= known:
        return broken("the chat template has tokens that the model lacks", "the tokenizer that the model came with")
    wraps = "not used (model.chat_template=never)" if mode == "never" else "wraps prompts"
    return fine(f"{tokens}, the chat template {wraps}")
