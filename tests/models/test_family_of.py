"""Families that share a model_type are told apart, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import CheckpointError
from tests.models import small_checkpoints
from tests.models.one_checkpoint import edit_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("model_type", ["mistral", None])
def test_an_unknown_model_type_names_the_known_ones(model_type: str | None, folder: Path) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(CheckpointError, match=rf"{model_type!r} is not known; known: .*Dream"):
        load_model(folder, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"block_size": 7}, "a", r"block_size=7 in a: SDAR's blocks are of 4, 8.*use_regular_causal"),
        ({"block_size": 4}, "I-DLM-8B", r"block_size=4 in I-DLM-8B: .*Set use_regular_causal in config\.json"),
        ({"block_size": ...}, "i-dlm-8b", "block_size=4 in i-dlm-8b"),
        ({"block_size": 4}, "models--yifanyu--I-DLM-8B/snapshots/3f", "block_size=4 in yifanyu/I-DLM-8B"),
    ],
)
def test_neither_sdar_nor_i_dlm_is_taken_for_the_other(
    change: dict[str, Any], name: str, message: str, tmp_path: Path
) -> None:
    folder = small_checkpoints.write(tmp_path / name, small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


@pytest.mark.parametrize("block", [4, 8, 16, 32, 64, ..., 3])
def test_sdar_is_sdar(block: Any, tmp_path: Path) -> None:
    """Also where a parent folder is called otherwise, and with any blocks where config.json says that it is."""
    folder = small_checkpoints.write(tmp_path / "i-dlm" / "SDAR-4B", small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, block_size=block, use_regular_causal=False if block == 3 else ...)
    assert (read_config(folder).family, read_config(folder).block_size) == ("sdar", 4 if block is ... else block)


@pytest.mark.parametrize(
    "change", [{"block_size": block} for block in (1, 2, 3)] + [{"block_size": 4, "use_regular_causal": True}]
)
def test_i_dlm_is_i_dlm(change: dict[str, int], tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path, small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, **change)
    assert (read_config(folder).family, read_config(folder).shift) == ("I-DLM", True)


@pytest.mark.parametrize(
    ("name", "said", "block"),
    [
        ("SDAR-4B-Chat-b32", ..., 32),
        ("SDAR-4B-Chat-b32", 32, 32),
        ("SDAR-8B-Chat-b16-sft", ..., 16),
        ("SDAR-4B-Chat", 8, 8),
        ("TraDo-4B-Instruct", ..., 4),
    ],
)
def test_blocks_of_sdar_checkpoints(name: str, said: Any, block: int, tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path / name, small_checkpoints.KINDS["sdar"], {})
    edit_config(folder, block_size=said)
    assert (read_config(folder).family, read_config(folder).block_size) == ("sdar", block)
    if "b32" in name:
        edit_config(folder, block_size=4)
        with pytest.raises(CheckpointError, match="block_size=4, but the name SDAR-4B-Chat-b32 says 32"):
            read_config(folder)


@pytest.mark.parametrize(
    ("name", "said", "family"),
    [
        ("Qwen3-0.6B-diffusion-mdlm-v0.1", ..., "a2d-qwen3"),
        ("Qwen3-0.6B-diffusion-bd3lm-v0.1", ..., "a2d-qwen3-bd3lm"),
        ("mine", 0, "a2d-qwen3"),
        ("mine", 16, "a2d-qwen3-bd3lm"),
    ],
)
def test_a2d_models_are_told_apart(name: str, said: Any, family: str, tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path / name, small_checkpoints.SAME_KINDS["a2d_qwen3"], {})
    edit_config(folder, block_size=said)
    config = read_config(folder)
    assert (config.family, config.block_size) == (family, 16 if said == 16 else 32)
    edit_config(folder, block_size=...)
    if name == "mine":
        with pytest.raises(CheckpointError, match=r"'a2d-qwen3': neither config\.json nor the name 'mine' says"):
            read_config(folder)


def test_a_familys_own_name_is_a_model_type(tmp_path: Path) -> None:
    folder = small_checkpoints.write(tmp_path, small_checkpoints.SAME_KINDS["a2d_qwen3"], {})
    edit_config(folder, model_type="a2d-qwen3-bd3lm", block_size=16)
    assert (read_config(folder).family, read_config(folder).block_size) == ("a2d-qwen3-bd3lm", 16)
