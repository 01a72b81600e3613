"""A checkpoint with a damaged file, or with odd values in one, is loaded or refused in a line; nothing else happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.config import ModelOptions
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.models.files import EMBEDDED

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
ODD = st.sampled_from([None, True, -1, 0, 3, 1e30, "", "x", [], {}, [1], {"a": 1}, 10**30, 0.5])


def load(folder: Path) -> None:
    EngineBuilder(ModelOptions(path=str(folder), pattern="d2f"), torch.device("cpu")).load(warn=False)


def changed(value: Any, data: st.DataObject) -> Any:
    """A JSON value with one of its parts replaced or left out."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 3)) == 0:
        return data.draw(ODD)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = data.draw(st.sampled_from(keys))
    made = value.copy()
    if data.draw(st.integers(0, 4)) == 0:
        del made[key]
    else:
        made[key] = changed(made[key], data)
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(FILES), of_bytes=st.booleans(), data=st.data())
def test_it_is_loaded_or_refused_in_a_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, of_bytes: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(EMBEDDED, folder)
    file = folder / name
    if of_bytes or name.endswith(".safetensors"):
        raw = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, min(len(raw), 2000) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    else:
        file.write_text(json.dumps(changed(json.loads(file.read_text()), data)))
    reason = ""
    try:
        load(folder)
    except ValueError as error:
        reason = str(error)
    finally:
        shutil.rmtree(folder)
    assert "\n" not in reason.strip()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "its tokenizer cannot be read .*fetch the files again"),
        ("config.json", {"intermediate_size": []}, r"intermediate_size=\[\]: must be a positive integer"),
        ("config.json", {"rope_theta": "x"}, "rope_theta"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "a value of the wrong kind"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "model")
    file = tmp_path / "model" / name
    file.write_text(content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model")
