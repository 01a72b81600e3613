"""The one way to an engine: files first, weights when they are wanted, once."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup import build
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.models.files import EMBEDDED, CheckpointError, find
from lopa_dist.parallel.communicator import Relay, Solo
from lopa_dist.parallel.mesh import Mesh
from tests.models.test_adapter import adapter_for, write_adapter

CPU = torch.device("cpu")


def test_files_are_read_at_once_and_weights_when_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    load = build.load_model
    monkeypatch.setattr(build, "load_model", lambda *of: (calls.append(of), load(*of))[1])
    builder = EngineBuilder(ModelOptions(pattern="d2f"), CPU)
    assert builder.folder == EMBEDDED
    assert (builder.shape.family, builder.dtype, builder.pattern.context) == ("Dream", "fp32", "d2f")
    assert calls == []
    prompt = builder.tokenizer("Tom has 3 apples .").input_ids
    texts = []
    for branches in (0, 2):
        engine = builder.engine(
            DecodeConfig(verify="confidence", drafts=0, branches=branches, block_size=16, max_new_tokens=16),
            EngineConfig(1),
        )
        [generation] = engine.generate([Request(0, prompt, 16, 0)])
        texts.append(generation.tokens)
        assert engine.model is builder.model
    assert all(texts)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("decode", "branch", "rank", "warned"),
    [
        (DecodeConfig(branches=0), 2, 0, True),
        (DecodeConfig(branches=2), 4, 0, True),
        (DecodeConfig(branches=0), 2, 1, False),  # one rank says it for all
        (DecodeConfig(branches=0), 1, 0, False),
        (DecodeConfig(branches=1), 2, 0, False),
    ],
)
def test_branch_ranks_without_a_branch_are_told_of(
    caplog: pytest.LogCaptureFixture, decode: DecodeConfig, branch: int, rank: int, warned: bool
) -> None:
    group = SimpleNamespace(
        mesh=Mesh(1, branch), world=SimpleNamespace(rank=rank), comm=Solo(), tensor=Solo(),
        stop=SimpleNamespace(level=None), failures=SimpleNamespace(watched=None),
    )  # fmt: skip
    EngineBuilder(ModelOptions(pattern="d2f"), CPU).engine(decode, EngineConfig(1), group)
    said = [r.getMessage() for r in caplog.records if "branch ranks" in r.getMessage()]
    assert len(said) == warned
    if warned:
        assert f"{branch - decode.max_branches} of the {branch} branch ranks of a replica do nothing" in said[0]
        assert f"or decode.branches={branch - 1}" in said[0]


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        EngineBuilder(ModelOptions(path=str(tmp_path)), CPU)


def test_a_relay_is_whatever_stands_behind_it() -> None:
    first, second = Solo(), Solo()
    relay = Relay(first)
    relay.connect(second)
    assert relay.traffic is second.traffic
    assert (relay.rank, relay.size) == (0, 1)
    x = torch.arange(3)
    assert torch.equal(relay.all_gather(x), x[None])
    assert torch.equal(relay.broadcast(x, 0), x)


@pytest.mark.parametrize("has", [False, True], ids=["none", "own"])
def test_the_chat_template_of_an_adapter_is_not_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has: bool
) -> None:
    """Trainers save it beside the adapter. It is used if the checkpoint has none, and said to be another otherwise."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(find("causal"), base)
    template = "{% for m in messages %}<|user|> {{ m.content }} <|mask|>{% endfor %}"
    if not has:
        (base / "chat_template.jinja").unlink()
    tensors = adapter_for(load_file(base / "model.safetensors"), ["q_proj"])
    write_adapter(adapter, tensors, target_modules=["q_proj"], base_model_name_or_path=str(base))
    (adapter / "chat_template.jinja").write_text(template)
    builder = EngineBuilder(ModelOptions(path=str(base), lora=str(adapter)), CPU)
    with caplog.at_level(logging.INFO, "lopa_dist"):
        builder.load()
    told = " ".join(caplog.messages)
    if has:
        assert builder.tokenizer.chat_template != template
        assert "has another chat template than the checkpoint, whose own is used" in told
    else:
        assert builder.tokenizer.chat_template == template
        assert "prompts go through the chat template of model.lora" in told
