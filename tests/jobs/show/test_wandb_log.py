"""What goes to W&B, as the settings or W&B's own environment variables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.wandb_log import chosen_mode
from lopa_dist.parallel.launcher import World
from tests.jobs import wandb_file
from tests.jobs.run.test_job import config

KEY = {"WANDB_API_KEY": "0" * 40}


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        (KEY, "online"),
        (KEY | {"WANDB_MODE": "disabled"}, "disabled"),
        (KEY | {"WANDB_MODE": "offline"}, "offline"),
        (KEY | {"WANDB_MODE": "dryrun"}, "offline"),
        (KEY | {"WANDB_DISABLED": "true"}, "disabled"),
        (KEY | {"WANDB_DISABLED": "false"}, "online"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_what_a_user_asks_wandb_for_comes_before_a_key(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mode: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert chosen_mode(config(TaskConfig(limit=1), "auto"))[0] == mode
    assert chosen_mode(config(TaskConfig(limit=1), "offline")) == ("offline", "logging.wandb.mode=offline")


def test_a_mode_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might be meant to send nothing."""
    monkeypatch.setenv("WANDB_MODE", "offlin")
    with pytest.raises(ValueError, match=r"WANDB_MODE=offlin: must be one of online, run, shared, offline, dryrun"):
        chosen_mode(config(TaskConfig(limit=1), "auto"))


def test_nothing_is_sent_where_wandb_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (KEY | {"WANDB_MODE": "disabled"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("W&B was asked"))
    run(config(TaskConfig(limit=1), "auto"), tmp_path, World("python"))
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(("given", "called"), [(None, "lopa_dist"), ("theirs", "theirs")])
def test_the_project_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, called: str
) -> None:
    found = []

    def init(**options: Any) -> Any:
        found.append(options["project"])
        raise wandb.errors.CommError("enough")

    monkeypatch.setattr(wandb, "init", init)
    if given:
        monkeypatch.setenv("WANDB_PROJECT", given)
    with pytest.raises(ValueError, match="could not begin a run"):
        run(config(TaskConfig(limit=1), "offline"), tmp_path, World("python"))
    assert found == [called]


def test_a_run_of_the_user_s_own_in_this_process_stays_its_own(tmp_path: Path) -> None:
    """Own code may begin one while it is imported; the job's figures went there, and the job finished it."""
    own = wandb.init(dir=tmp_path, mode="offline", settings=wandb.Settings(console="off", silent=True))
    run(config(TaskConfig(limit=1), "offline"), tmp_path / "run", World("python"))
    assert wandb.run is own
    own.log({"mine": 3})
    own.finish()
    theirs, [ours] = wandb_file.read(tmp_path), tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    assert theirs["history"][-1]["mine"] == 3
    assert "tpf" not in theirs["summary"]
    assert wandb_file.records(ours)
    assert wandb_file.read(tmp_path / "run")["summary"]["tpf"] > 0
