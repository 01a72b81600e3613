"""Whether a checkpoint can be had is told before a job begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from lopa_dist.models.files import CheckpointError, find, local, why_not_there
from lopa_dist.sweep import main


def test_a_model_that_cannot_be_had_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline nodes meet it after minutes in the queue: a dry run refuses what the job would."""

    def info(self: object, name: str, timeout: float) -> None:
        if name != "owner/public":
            raise ConnectionError(f"no way to {name}")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", info)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert why_not_there("owner/public") == ""
    assert why_not_there("embedded") == ""
    assert why_not_there(str(tmp_path)) == ""
    assert why_not_there(str(tmp_path / "none")).endswith("none: no such folder; name one, or a hub id")
    said = why_not_there("owner/secret")
    assert "cannot be had from the hub (ConnectionError: no way to owner/secret); where there is a network, run" in said
    with pytest.raises(SystemExit, match=r"refused: the model Dream-org/.* no way to Dream-org/.*`hf download Dream"):
        main(1, ["model=dream_instruct"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is not in the cache, and HF_HUB_OFFLINE is set; where" in why_not_there("owner/public")

    def nothing(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("set HF_HUB_OFFLINE=0")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    with pytest.raises(CheckpointError, match=r"^model\.path=owner/public: .*not in the cache.*`hf download owner/p"):
        find("owner/public")


def test_a_home_of_nobody_is_a_hub_id_that_does_not_exist() -> None:
    assert local("~nobody-of-this-name") is None
