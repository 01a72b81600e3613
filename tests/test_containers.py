"""The recipes of images, and how the launch scripts run in one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import OUTSIDE, ROOT

CONTAINERS = ROOT / "docs" / "containers"
DOCKERFILE, RECIPE = CONTAINERS / "Dockerfile", CONTAINERS / "lopa_dist.def"
BIN = CONTAINERS / "bin"


def copied(recipe: Path) -> set[str]:
    """What a recipe takes from the repository."""
    text = recipe.read_text()
    if recipe == RECIPE:
        return {line.split()[0] for line in text.split("%files")[1].split("%post")[0].splitlines() if line.strip()}
    return {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}


@pytest.mark.parametrize("recipe", [DOCKERFILE, RECIPE], ids=lambda recipe: recipe.name)
def test_a_recipe_has_what_the_package_is_made_of(recipe: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 or newer")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied(recipe) == needed | {*wheel["packages"], *wheel["force-include"]}
    [torch] = re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert f"torch=={torch}" in recipe.read_text()


def stand_in(folder: Path) -> dict[str, str]:
    """An environment whose `apptainer` runs programs of this one, and writes down what it was asked for."""
    apptainer = folder / "apptainer"
    apptainer.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        'while [ "$1" != image.sif ]; do shift; done\nshift\nprogram=$1\nshift\n'
        f'exec {Path(sys.executable).parent}/"$program" "$@"\n'
    )
    apptainer.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return OUTSIDE | {"PATH": path, "IMAGE": "image.sif", "BIN": str(BIN), "PYTHONPATH": str(ROOT)}


@pytest.mark.system
def test_the_launch_scripts_run_in_an_image(tmp_path: Path) -> None:
    """With two ranks, which torchrun starts in the image."""
    given = ["task=arithmetic", "task.limit=4", f"hydra.run.dir={tmp_path}/a run"]
    done = subprocess.run(
        ["bash", "launch/job.sh", *given],
        env=stand_in(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "a run" / "results.jsonl").read_text().splitlines()) == 4
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("exec --nv image.sif python -m lopa_dist.parallel.torchrun ")
    assert "a run" in asked


def test_without_an_image_the_message_says_how_one_is_made(tmp_path: Path) -> None:
    environment = {**stand_in(tmp_path), "IMAGE": ""}
    done = subprocess.run([BIN / "python"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "apptainer build lopa_dist.sif docs/containers/lopa_dist.def" in done.stderr


@pytest.mark.system
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="needs apptainer and the network: it builds an image")
def test_the_recipe_is_built_and_runs(tmp_path: Path) -> None:
    image = tmp_path / "lopa_dist.sif"
    subprocess.run(["apptainer", "build", image, RECIPE], cwd=ROOT, check=True, timeout=1800)
    run = tmp_path / "run"
    subprocess.run(
        [BIN / "lopa-dist", "task.limit=4", f"hydra.run.dir={run}"],
        env=OUTSIDE | {"IMAGE": str(image), "OPTIONS": f"--bind {tmp_path}"}, cwd=tmp_path, check=True, timeout=300,
    )  # fmt: skip
    assert len((run / "results.jsonl").read_text().splitlines()) == 4
