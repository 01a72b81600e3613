"""Loading of Hugging Face checkpoints: safetensors only, no pickles, no remote code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from lopa_dist.kernels.rope import rotated_first
from lopa_dist.models import tensor_parallel
from lopa_dist.models.adapter import Adapter
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import checkpoint_name
from lopa_dist.models.files import CheckpointError, opened, weight_files
from lopa_dist.models.mask_rows import MaskRowAdapter, MaskRows
from lopa_dist.models.quantize import (
    allocate_experts,
    check,
    for_few_rows,
    quantize,
    quantized_parameters,
    stored_parts,
)
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo

DRAFTER = "linear_spec_lora"  # folder of the adapter in Nemotron-Labs-Diffusion's checkpoints
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    adapter: Adapter | None = None,
    tensor: Communicator | None = None,
    quantization: str = "none",
) -> Transformer:
    """Return a checkpoint's model, with the adapter merged into its weights.

    An adapter that acts on rows of masks only is not merged but attached. The model is built on the meta device; its
    tensors are then loaded one after the other.

    Names and shapes are compared before any weight is read. The weights are copies: if they stayed mapped to their
    file, a trainer that overwrites it would change them while the model runs. With a `tensor` group, a rank reads and
    keeps only its part of the weights. Adapted weights are read and merged in full first, so that every rank has the
    same bits.

    Raises:
        ValueError: the model's sizes cannot be split over the tensor group, or the device does not support this
            quantization.
        CheckpointError: a tensor is missing, unknown or of the wrong shape, or the adapter does not fit.
    """
    of_masks = adapter is not None and adapter.rows == "masks"
    of_adapter = adapter.folder if adapter is not None else None
    config = read_config(folder, of_adapter if of_masks else None, None if of_masks else of_adapter)
    with torch.device("meta"):
        model = Transformer(config)
    wanted, stored = places(model), stored_tensors(weight_files(folder))
    if config.tied:
        wanted.pop("lm_head.weight")
        check_tied(folder, config, stored)
    ours = our_names(config, wanted)
    shapes = {theirs: joint_shape([wanted[name] for name in names]) for theirs, names in ours.items()}
    compare(folder, {name: shape for name, (_, shape) in stored.items()}, shapes)
    if adapter is not None:
        adapter.check(shapes)
        projections = [theirs for theirs in ours if ".layers." in theirs and not wanted[ours[theirs][0]].part]
        check_adapter(adapter, config, projections)

    comm = tensor or Solo()
    tensor_parallel.split(model, comm)
    check(model, quantization, device)
    later: set[str] = set()
    if quantization != "none":
        allocate_experts(model, quantization)
        later = quantized_parameters(model)
    weights = rank_weights(stored, ours, wanted, config, adapter, comm, device, later)
    assign(model, weights, wanted, dtype, quantization, later)
    if config.tied:
        tie(model, comm)
    if adapter is not None and of_masks:
        attach(model, adapter, ours, comm)
    model.requires_grad_(False).eval()
    if quantization != "none":
        quantize(model, quantization, device, dtype)
    return model


def rank_weights(
    stored: dict[str, tuple[Path, list[int]]],
    ours: dict[str, list[str]],
    wanted: dict[str, Place],
    config: ModelConfig,
    adapter: Adapter | None,
    comm: Communicator,
    device: torch.device,
    later: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of every weight on the device, by our name, in the checkpoint's precision.

    Args:
        stored: from `stored_tensors`.
        ours: from `our_names`.
        wanted: from `places`.
        config: the model's.
        adapter: merged into the weights that it changes.
        comm: the group that the model is split over.
        device: where the weights go.
        later: names of weights that stay on the host, usually mapped to their file, until they are quantised.
    """
    host = torch.device("cpu")
    for name, (file, _) in stored.items():
        with opened(file) as tensors:  # once per tensor: a file that stays open keeps all that was read mapped
            joint = tensors.get_tensor(name)
            if adapter is not None:
                adapter.check_base(name, joint)
            merged = adapter is not None and adapter.changes(name)
            if adapter is not None and merged:
                joint = adapter.merge(name, joint.to(device))
            parts = joint.split([wanted[own].shape[0] for own in ours[name]])
            for own, weight in zip(ours[name], parts, strict=True):
                weight = reordered(config, own, weight)
                weight = weight[tensor_parallel.rows(own, len(weight), comm)].to(host if own in later else device)
                if weight.untyped_storage().nbytes() > weight.nbytes and (merged or len(parts) > 1):
                    weight = weight.clone()  # a view would keep the joint tensor in memory
                yield own, weight


def assign(
    model: Transformer,
    weights: Iterable[tuple[str, torch.Tensor]],
    wanted: dict[str, Place],
    dtype: torch.dtype,
    quantization: str,
    later: Collection[str] = (),
) -> None:
    """Make `weights`, in `dtype`, the parameters of a model on the meta device, quantising experts' weights at once.

    Those of `later` keep their dtype until they are quantised.
    """
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    loaded: dict[str, torch.Tensor] = {}
    for own, weight in weights:
        place = wanted[own]
        if place.part:
            for parameter, part in stored_parts(place.parameter, weight.to(dtype), quantization):
                if parameter not in loaded:
                    loaded[parameter] = torch.empty(sizes[parameter], dtype=part.dtype, device=part.device)
                loaded[parameter][place.part] = part
        else:
            if own not in later:
                kept = torch.float32 if own.endswith("expert_bias") else dtype
                weight = weight.to(kept, copy=weight.device.type == "cpu")
            loaded[place.parameter] = weight
    model.load_state_dict(loaded, strict=False, assign=True)


def check_tied(folder: Path, config: ModelConfig, stored: dict[str, tuple[Path, list[int]]]) -> None:
    """Remove the head from a tied checkpoint's tensors, since some checkpoints also store this copy of the embedding.

    Raises:
        CheckpointError: it is not a copy, so that one of the two would be dropped silently.
    """
    head, embedding = (checkpoint_name(config.family, f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    if head not in stored:
        return
    file, _ = stored.pop(head)
    if embedding not in stored:
        return
    with opened(file) as of_head, opened(stored[embedding][0]) as of_embedding:
        if not torch.equal(of_head.get_tensor(head), of_embedding.get_tensor(embedding)):
            raise CheckpointError(
                f"{folder}: its config.json ties the head to the embeddings, but {head} is not {embedding}. Set "
                "tie_word_embeddings (llada: weight_tying) to false if the head is right, or take it out of the file"
            )


def tie(model: Transformer, comm: Communicator) -> None:
    """Make the embedding, or this rank's part of it, the head's weight."""
    embedding = model.model.embed_tokens.weight
    own_rows = tensor_parallel.rows("lm_head.weight", len(embedding), comm)
    model.lm_head.weight = embedding if comm.size == 1 else nn.Parameter(embedding[own_rows], requires_grad=False)


def attach(model: Transformer, adapter: Adapter, ours: dict[str, list[str]], comm: Communicator) -> None:
    """Attach an adapter for rows of masks only to the projections that it changes; `ours` is from `our_names`."""
    weight = model.model.embed_tokens.weight
    if adapter.mask is not None and adapter.mask.shape != weight.shape[1:]:
        own, width = list(adapter.mask.shape), list(weight.shape[1:])
        raise CheckpointError(f"{adapter.folder}: its mask's embedding has shape {own}, the base model's {width}")
    pairs = {ours[name][0]: adapter.pair(name, weight.device, weight.dtype) for name in adapter.pairs}
    attaching(model, pairs, comm, adapter.mask)()


def attaching(
    model: Transformer,
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]],
    comm: Communicator,
    mask: torch.Tensor | None = None,
) -> Callable[[], None]:
    """Return a function that makes rows of masks run with A and B beside the projections' weights.

    A and B replace any earlier pairs. Everything that needs memory is done before the function is returned, and the
    model does not change until it is called. So all ranks can first agree that they will call it.

    Args:
        model: this rank's part of it.
        pairs: A and B of each weight by our names, not split over ranks, in the weights' dtype; B includes the scale.
        comm: the group that the model is split over.
        mask: an embedding ``[d]`` for masks; None: they keep theirs.
    """
    masks, made = model.mask_rows or MaskRows(), []
    for name, (a, whole) in pairs.items():
        b = whole[tensor_parallel.rows(name, len(whole), comm)].clone()
        projection = model.get_submodule(name.removesuffix(".weight"))
        pair = for_few_rows(a), for_few_rows(b)
        made.append((MaskRowAdapter(masks, [(len(b), pair)]), projection))
    embedding = None if mask is None else with_mask_row(model)

    def attach() -> None:
        for adapter, projection in made:
            adapter.attach(projection)
        model.mask_rows, model.adapters = masks, model.adapters + 1
        if mask is not None and embedding is not None:
            embedding[model.config.mask_id] = mask
            if len(embedding) > len(model.model.embed_tokens.weight):
                model.config = replace(model.config, learned_mask=True)
            model.model.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)

    return attach


def with_mask_row(model: Transformer) -> torch.Tensor:
    """Return a model's embeddings, with a new row if it has no mask token; the mask's row may be written to.

    The head stays as it is, even if it is tied, so the model's own inputs and outputs do not change.
    """
    config, weight = model.config, model.model.embed_tokens.weight.data
    if len(weight) == config.mask_id:
        return torch.cat([weight, weight[:1]])
    return weight.clone() if config.tied else weight  # the head's, too


def check_adapter(adapter: Adapter, config: ModelConfig, projections: list[str]) -> None:
    """Raise a CheckpointError if the model cannot have the adapter; one for masks may change only `projections`."""
    if adapter.rows == "all" and config.block_drafts and adapter.folder.name == DRAFTER:
        raise CheckpointError(f"{adapter.folder}: it is only for rows that draft; set model.lora_rows=masks")
    if config.tied and adapter.saved:
        raise CheckpointError(f"{adapter.folder}: modules_to_save needs a model with an untied head")
    if adapter.rows == "masks" and (others := [*(adapter.pairs.keys() - projections), *adapter.saved]):
        raise CheckpointError(
            f"{adapter.folder}: with model.lora_rows=masks it cannot change {', '.join(sorted(others))}"
        )


QK = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")


class Place(NamedTuple):
    """Where a tensor of a checkpoint belongs: to a parameter, or to a part of one."""

    parameter: str
    shape: list[int]
    part: tuple[int, ...] = ()  # index of the part


def places(model: Transformer) -> dict[str, Place]:
    """Return the place of every tensor of a model, by transformers' names; experts' projections are parts of stacks."""
    by_name: dict[str, Place] = {}
    for name, parameter in model.state_dict().items():
        base, _, last = name.rpartition(".")
        shape = list(parameter.shape)
        if last == "gate_up":
            for expert in range(shape[0]):
                for half, projection in enumerate(("gate_proj", "up_proj")):
                    by_name[f"{base}.experts.{expert}.{projection}.weight"] = Place(name, shape[2:], (expert, half))
        elif last == "down":
            for expert in range(shape[0]):
                by_name[f"{base}.experts.{expert}.down_proj.weight"] = Place(name, shape[1:], (expert,))
        else:
            by_name[name] = Place(name, shape)
    return by_name


def our_names(config: ModelConfig, wanted: Iterable[str]) -> dict[str, list[str]]:
    """Return our names of weights by the checkpoint's, which may stack several weights in one tensor."""
    ours: dict[str, list[str]] = {}
    for name in wanted:
        ours.setdefault(checkpoint_name(config.family, name), []).append(name)
    return ours


def joint_shape(places: list[Place]) -> list[int]:
    """Return the shape of weights that are stacked along their first dimension."""
    return [sum(place.shape[0] for place in places), *places[0].shape[1:]]


def reordered(config: ModelConfig, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with the rows of q's and k's heads in the order in which whole heads are rotated.

    Other weights, and those of models that rotate whole heads, are returned as they are.
    """
    if config.rotated is None or not name.endswith(QK):
        return weight
    order = rotated_first(config.head_dim, config.rotated)
    return weight.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)


FLOATS = "F64", "F32", "F16", "BF16"
COMPUTED = ".rotary_emb.inv_freq"  # constants that old checkpoints store, and that follow from config.json


def stored_tensors(files: list[Path]) -> dict[str, tuple[Path, list[int]]]:
    """Return the file and shape of every weight in these files, reading only their headers.

    Raises:
        CheckpointError: one is not of floating-point numbers.
    """
    stored: dict[str, tuple[Path, list[int]]] = {}
    for file in files:
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                if name.endswith(COMPUTED):
                    continue
                tensor = tensors.get_slice(name)
                if tensor.get_dtype() not in FLOATS:
                    raise CheckpointError(
                        f"{file}: {name} is of type {tensor.get_dtype()}: checkpoints that others have quantised are "
                        "not supported; use the original checkpoint, which model.quantization can quantise"
                    )
                stored[name] = file, list(tensor.get_shape())
    return stored


def compare(folder: Path, stored: dict[str, list[int]], wanted: dict[str, list[int]]) -> None:
    """Raise a CheckpointError unless names and shapes are equal; it lists the first eight differences of a kind."""
    missing = wanted.keys() - stored.keys()
    unknown = stored.keys() - wanted.keys()
    misshaped = [f"{n} {s} instead of {wanted[n]}" for n, s in stored.items() if n in wanted and s != wanted[n]]
    for problem, names in (("missing", missing), ("not known", unknown), ("of the wrong shape", misshaped)):
        if names:
            raise CheckpointError(
                f"{folder}: {len(names)} tensors {problem}: {', '.join(sorted(names)[:8])}; fetch the checkpoint "
                "again, or correct config.json: its model_type and sizes say which tensors are expected"
            )
