"""What Hydra notes of a sweep says which of its points have no run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lopa_dist.jobs.commands.status import sweep_in_words
from lopa_dist.jobs.folder.sweep_points import without_run
from lopa_dist.setting_keys import CONF

TYPED = ["launcher=local", "decode.drafts=4,8", "task.limit=400", "logging.wandb.mode=disabled"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of two points, neither of which has begun, in a folder whose name has a space."""
    folder = tmp_path / "a b"
    folder.mkdir()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = OmegaConf.masked_copy(compose("config", return_hydra_config=True), "hydra")
    OmegaConf.set_readonly(hydra, False)
    hydra.hydra.overrides.task = TYPED
    OmegaConf.save(hydra, folder / "multirun.yaml")
    return folder


def test_points_have_the_folders_that_hydra_gives_them(sweep: Path) -> None:
    names = ["decode.drafts=4,task.limit=400", "decode.drafts=8,task.limit=400"]
    assert without_run(sweep) == names
    for name in names:  # Hydra makes the folders before their jobs begin, and a job may fail before it does
        (sweep / name / ".hydra").mkdir(parents=True)
    assert without_run(sweep) == names
    (sweep / names[0] / "job.lock").touch()
    assert without_run(sweep) == names[1:]
    told = sweep_in_words(sweep)
    assert told.startswith(
        f"1 point of the sweep in {sweep} has no run yet (not begun, or failed before): {names[1]}\n"
    )
    assert told.endswith(f"""with FOLDER='{sweep}' (launch/sweep.sh) or "hydra.sweep.dir='{sweep}'\"""")
    (sweep / names[1] / "journal").mkdir()
    assert sweep_in_words(sweep) == ""


def test_points_whose_folders_have_other_names_are_not_missed(sweep: Path) -> None:
    noted = OmegaConf.load(sweep / "multirun.yaml")
    noted.hydra.sweep.subdir = "${hydra.job.num}"
    OmegaConf.save(noted, sweep / "multirun.yaml")
    assert without_run(sweep) == []


def test_what_is_no_sweep_of_hydra_s_own_has_no_points(sweep: Path, tmp_path: Path) -> None:
    assert without_run(tmp_path) == []
    text = (sweep / "multirun.yaml").read_text()
    for other in (text.replace("BasicSweeper", "OptunaSweeper"), "hydra: [", "hydra: {}", ""):
        (sweep / "multirun.yaml").write_text(other)
        assert without_run(sweep) == []
