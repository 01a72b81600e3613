"""The model is there or can be fetched, goes with the settings, and fits in the memory."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lopa_dist.composing import composed
from lopa_dist.engine import memory
from lopa_dist.engine.memory import Plan
from lopa_dist.engine.request import Request
from lopa_dist.jobs.commands.doctor import checkpoint
from lopa_dist.jobs.commands.doctor.doctor import examine
from lopa_dist.jobs.commands.doctor.finding import Finding, Machine, State
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.resolve import resolve
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel import node_memory
from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.launcher import World
from tests.jobs.commands.doctor.machines import CPU_ONLY, machine, shown


def test_a_model_that_is_not_there_is_said_once() -> None:
    would_run, screen = shown("model=local", "model.path=./nothing")
    assert not would_run
    assert screen.count("no such folder") == 1
    assert re.search(r"^memory +broken +as ", screen, re.MULTILINE)


def test_a_model_that_is_still_to_come_is_fine_with_a_network_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    assert checkpoint.model(machine("model=dream_instruct")).state == State.FINE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "run `hf download Dream-org/" in checkpoint.model(machine("model=dream_instruct")).text


@pytest.mark.parametrize(("template", "state"), [("never", State.FINE), ("always", State.BROKEN)])
def test_tokens_that_the_model_lacks(tmp_path: Path, template: str, state: State) -> None:
    """Such as those of a chat, added to a tokenizer beside a checkpoint that was not made larger."""
    shutil.copytree(EMBEDDED, tmp_path / "model")
    words = AutoTokenizer.from_pretrained(EMBEDDED)
    words.add_special_tokens({"additional_special_tokens": [f"<far{i}>" for i in range(8)]})
    words.chat_template = "{% for message in messages %}<far7>{{ message['content'] }}{% endfor %}"
    words.save_pretrained(tmp_path / "model")
    found = checkpoint.tokenizer(
        machine("model=local", f"model.path={tmp_path}/model", f"model.chat_template={template}")
    )
    assert found.state == state
    assert ("'<far7>' are refused" if state == State.FINE else "template has tokens") in found.text


def test_settings_that_do_not_go_together_are_broken() -> None:
    config = composed(["decode.context=causal", *CPU_ONLY])
    [found] = [finding for name, finding in examine(Machine(config)) if name == "model"]
    assert found == Finding(State.BROKEN, "decode.context=causal: the model is not causal; set it to auto")


def test_memory_is_held_against_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(node_memory, "resident_memory", lambda: 0)
    for free, state in ((40 * gib, State.FINE), (800 << 20, State.SLOW), (1 << 20, State.BROKEN)):
        monkeypatch.setattr(node_memory, "available_memory", lambda free=free: free)
        assert checkpoint.memory_needed(machine("engine.max_sequences=128")).state == state, free
    monkeypatch.setattr(node_memory, "available_memory", lambda: 600 << 20)
    assert "too little is left for one sequence" in checkpoint.memory_needed(machine()).text


def test_what_slurm_gives_is_all_that_there_is_for_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each needs memory for Python and its libraries, too."""
    monkeypatch.setattr(node_memory, "available_memory", lambda: 40 << 30)
    monkeypatch.setattr(node_memory, "resident_memory", lambda: 600 << 20)
    assert checkpoint.memory_needed(machine()).state == State.FINE
    for given, free in (
        ({"SLURM_MEM_PER_NODE": "500"}, "0.0 GiB free"),
        ({"SLURM_MEM_PER_NODE": "3000"}, "2.3 GiB free"),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "3"}, "2.3 GiB free"),
        ({"SLURM_MEM_PER_NODE": "0"}, "40.0 GiB free"),  # as --mem=0 asks for: all of the node's
    ):
        with monkeypatch.context() as context:
            for name, value in given.items():
                context.setenv(name, value)
            found = checkpoint.memory_needed(machine())
            assert found.text.startswith(free), found
            assert (found.state == State.BROKEN) == ("a larger --mem" in found.text) == (free == "0.0 GiB free")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "3000")
    monkeypatch.setattr(checkpoint, "detect", lambda: World("srun", 0, 4, 0, 4))
    assert checkpoint.memory_needed(machine()).text.startswith("0.1 GiB free")


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=embedded"],
        ["model=embedded", "decode.branches=7", "decode.context=dual", "engine.max_rows=3000"],
        ["model=embedded", "decode.branches=3", "decode.context=vanilla"],
        ["model=embedded", "engine.attention=meta", "engine.graphs=always", "decode.max_active_blocks=1"],
        ["model=embedded", "engine.kv_tokens=9000", "engine.prefix_cache=none", "model.quantization=int8"],
        ["model=causal", "decode.branches=4", "engine.prefill_chunk=100"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_the_memory_plan_is_the_engine_s(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests with prompts as long as the doctor assumes, on a device with so much free memory."""
    plans: list[Plan] = []
    plan = memory.plan

    def seen(*given: object) -> Plan:
        plans.append(plan(*given))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(memory, "plan", seen)
    looked_at = machine(*overrides, "parallel.threads=1")
    assert looked_at.shape is not None
    config = resolve(looked_at.config, looked_at.shape, torch.device("cpu"))
    model = EngineBuilder(config.model, torch.device("cpu"))
    engine = model.engine(config.decode, config.engine)
    weights = checkpoint.weight_bytes(looked_at.shape, config.model.quantization, 4)
    for free in (2 << 30, 1 << 30, 760 << 20):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free + weights)
        checkpoint.memory_needed(looked_at)
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        new, count = config.decode.max_new_tokens, config.engine.max_sequences
        requests = [Request(i, [0] * checkpoint.PROMPT, new, i) for i in range(count)]
        engine.plan(memory.space_needed(requests, config.decode.scope.caches_kv), count)
        assert plans[-2] == plans[-1], free
    assert len(plans) == 6


def test_tensor_ranks_share_weights_and_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one GPU is too small for may fit on two."""
    shape = read_config(EMBEDDED)
    second = Solo()
    second.rank, second.size = 1, 2
    builder = EngineBuilder(composed([]).model, torch.device("cpu"))
    held = sum(weight.numel() for weight in builder.load(tensor=second).parameters())
    assert checkpoint.weight_bytes(shape, "none", 4, 2) == 4 * held < checkpoint.weight_bytes(shape, "none", 4)
    big = replace(shape, layers=400, hidden_size=1024, intermediate_size=4096)
    found = {}
    for ranks in (1, 2):
        looked_at = machine(f"parallel.tensor={ranks}", "model.dtype=bf16")
        looked_at.__dict__["shape"] = big
        monkeypatch.setattr(node_memory, "available_memory", lambda: 10 << 30)
        monkeypatch.setattr(node_memory, "resident_memory", lambda: 0)
        found[ranks] = checkpoint.memory_needed(looked_at)
    assert (found[1].state, found[2].state) == (State.BROKEN, State.FINE), found
