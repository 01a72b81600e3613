"""Presets in folders of the user's own, for jobs, sweeps, dry runs and `explain`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist import cli, sweep
from lopa_dist.checks import UserError
from lopa_dist.jobs.commands.explain import explain
from lopa_dist.jobs.show.report import typed_settings, typed_words
from lopa_dist.own_presets import as_overrides, joined, search_path, undecodable
from lopa_dist.sweep import check_points

MINE = """# @package _global_
defaults:
  - override /decode: mine
  - override /model: causal
task:
  limit: 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("experiment", "decode"):
        (tmp_path / name).mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(MINE)
    (tmp_path / "decode" / "mine.yaml").write_text("defaults: [causal]\ndrafts: 3\n")
    return tmp_path


def test_flags_and_their_values_are_one_word() -> None:
    assert joined(["-m", "--config-dir", "a b", "-cn", "x", "-cp=y", "task.limit=2", "--cfg=job", "--info"]) == [
        "-m", "--config-dir=a b", "--config-name=x", "--config-path=y", "task.limit=2", "--cfg=job", "--info",
    ]  # fmt: skip
    with pytest.raises(UserError, match="--config-dir: needs a value"):
        joined(["task.limit=2", "--config-dir"])


def test_folders_of_a_flag_and_of_a_setting_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--config-dir=mine", "hydra.searchpath=[file:///other,pkg://some.package]", "task.limit=2"]
    (tmp_path / "mine").mkdir()
    places = [f"file://{tmp_path}/mine", "file:///other", "pkg://some.package"]
    assert search_path(given) == places
    assert search_path(as_overrides(given)) == places
    assert as_overrides(["task.limit=2"]) == ["task.limit=2"]


@pytest.mark.parametrize("way", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_sweeps_dry_runs_and_explain_know_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    where = way.format(folder)
    check_points(["-m", where, "experiment=mine", "decode.drafts=2,4"])
    with pytest.raises(UserError, match=r"started:\n  experiment=theirs: no such preset"):
        check_points(["-m", where, "experiment=mine,theirs"])
    if not where.startswith("--"):  # launch/*.sh take no flags of Hydra's
        sweep.main(1, [where, "experiment=mine"])
        with pytest.raises(SystemExit, match="experiment=theirs: no such preset"):
            sweep.main(1, [where, "experiment=theirs"])
    told = explain(as_overrides(["decode.drafts", "task.limit", "seed", where, "experiment=mine"]))
    assert "decode.drafts=3\n" in told
    assert f"from: {folder}/decode/mine.yaml" in told
    assert f"from: {folder}/experiment/mine.yaml" in told
    monkeypatch.setattr("sys.argv", ["lopa-dist", "explain", "decode.drafts", *where.split("=", 1), "experiment=mine"])
    if where.startswith("--"):
        cli.main()
        assert "decode.drafts=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("decode:\n\tdrafts: 2\n", r"a preset cannot be read: .*experiment/mine\.yaml\", line 4"),
        ("decode: [\n", r"a preset cannot be read: .*experiment/mine\.yaml"),
        ("decode:\n  draftz: 2\n", r"In 'experiment/mine': decode\.draftz: no such key; did you mean decode\.drafts\?"),
        ("zzz: 2\n", r"In 'experiment/mine': zzz: no such key$"),
        ("task: 3\n", r"In 'experiment/mine': Merge error: int is not a subclass of TaskConfig\. value: 3$"),
        ("defaults: [{decode: lopa}]\n", r"In 'experiment/mine': Could not find 'experiment/decode/lopa'$"),
        ("seed: x\n", r"In 'experiment/mine': seed: Value 'x' of type 'str' could not be converted to Integer"),
        ("task.limit: 1\n", r"In 'experiment/mine': task\.limit: write it as two lines, `task:` and `  limit: \.\.\.`"),
        ("# \udce9\n", r"experiment/mine\.yaml: is no UTF-8 .*; save it as UTF-8"),
    ],
    ids=["tab", "open", "misspelt", "unknown", "section", "defaults", "kind", "dotted", "latin-1"],
)
def test_what_is_wrong_in_a_file_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    file = folder / "experiment" / "mine.yaml"
    file.write_bytes(f"# @package _global_\n\n{content}".encode(errors="surrogateescape"))
    monkeypatch.setattr("sys.argv", ["lopa-dist", "--config-dir", str(folder), "experiment=mine", "--cfg", "job"])
    with pytest.raises(SystemExit, match=said):
        cli.main()
    with pytest.raises(SystemExit, match=said):
        sweep.main(1, [f"hydra.searchpath=[file://{folder}]", "experiment=mine"])
    with pytest.raises(UserError, match=said):
        check_points(["-m", f"--config-dir={folder}", "experiment=mine", "seed=1"])


def test_what_goes_on_names_the_folder_of_its_presets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = ["experiment=mine", "parallel.threads=1", "logging.wandb.mode=disabled", "logging.progress=never"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", "--config-dir", str(folder), *given])
    cli.main()
    [run] = (folder / "outputs").glob("*/*")
    assert typed_words(run) == [f"hydra.searchpath=[file://{folder}]", *given]
    assert "hydra.searchpath" not in typed_settings(run)
    for flag in ("--config-dir=nowhere", "hydra.searchpath=["):
        monkeypatch.setattr("sys.argv", ["lopa-dist", flag, "experiment=mine"])
        with pytest.raises(SystemExit, match=r"=nowhere: no such folder|hydra\.searchpath=\["):
            cli.main()


def test_a_file_without_its_package_is_told_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "experiment" / "mine.yaml").write_text("decode:\n  drafts: 2\n")
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"--config-dir={folder}", "experiment=mine", "--cfg", "job"])
    with pytest.raises(SystemExit, match="let the file begin with the line `# @package _global_`"):
        cli.main()


def test_a_saved_configuration_is_not_mistaken_for_the_package_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.hydra/config.yaml` of a run has the name of the package's own configuration, which comes first."""
    (folder / "config.yaml").write_text("task: {limit: 3}\n")
    (folder / "overrides.yaml").write_text("[]")  # as in `.hydra`
    for named in (["--config-name", "config"], ["--config-name=config.yaml"], []):
        monkeypatch.setattr("sys.argv", ["lopa-dist", "--config-dir", str(folder), *named])
        with pytest.raises(SystemExit, match=r"the package has a file of this name, .* `defaults: \[config, _self_\]`"):
            cli.main()


def test_files_that_are_no_utf_8_are_found(folder: Path) -> None:
    assert undecodable([f"--config-dir={folder}"]) is None
    (folder / "decode" / "mine.yaml").write_bytes(b"# \xe9")
    assert undecodable([f"--config-dir={folder}"]) == folder / "decode" / "mine.yaml"
