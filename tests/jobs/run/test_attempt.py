"""What an attempt at a job has to know of the earlier ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lopa_dist.config import Config, ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.run.attempt import pack_flags, unpack_flags, work
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.models.files import EMBEDDED


@given(st.lists(st.integers(0, 1)))
def test_flags_are_the_same_on_all_ranks(flags: list[int]) -> None:
    assert unpack_flags(pack_flags(bytearray(flags))) == bytearray(flags)


def test_flags_of_a_large_job_fit_into_the_store() -> None:
    assert len(pack_flags(bytearray([1] * 900_000 + [0] * 100_000))) < 10_000


def stated(model: ModelOptions, **decode: Any) -> dict[str, Any]:
    config = Config(model=model, decode=DecodeConfig(**decode))
    return work(config, EngineBuilder(model, torch.device("cpu")))


def test_ranks_agree_on_what_is_in_a_checkpoint_and_not_on_where_it_is(tmp_path: Path) -> None:
    """A copy on a node's own disk is the same model; a stale one is not, and neither are other options."""
    first = stated(ModelOptions(path="embedded", pattern="d2f"))
    shutil.copytree(EMBEDDED, tmp_path / "copy")
    copy = ModelOptions(path=str(tmp_path / "copy"), pattern="d2f")
    assert stated(copy) == first
    assert stated(copy, tau_conf=0.3)["decode.tau_conf"] == 0.3 != first["decode.tau_conf"]
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    weights["model.norm.weight"] *= 0.3
    save_file(weights, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    assert [key for key, value in stated(copy).items() if value != first[key]] == ["model.revision"]
