"""`lopa-dist explain`: values, where they came from, and words for every setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lopa_dist import cli
from lopa_dist.checks import UserError
from lopa_dist.jobs.commands.explain import explain
from lopa_dist.jobs.setup.settings import settings_of
from lopa_dist.models.files import EMBEDDED
from lopa_dist.setting_keys import CONF, keys_of


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    yield
    torch.set_num_threads(1)


def lines_of(*arguments: str) -> dict[str, list[str]]:
    """What is said below each setting."""
    found: dict[str, list[str]] = {}
    for line in explain([*arguments, "parallel.threads=1"]).splitlines():
        if line.startswith(" "):
            found[list(found)[-1]].append(line.strip())
        elif line:
            found[line] = []
    return found


def test_a_job_that_needs_an_input_is_explained_without_one() -> None:
    found = lines_of("task=batch", "task.limit", "task.input")
    assert found["task.limit=null"][-1] == "from: conf/task/batch.yaml"
    assert found["task.input=FILE"][-1] == "from: you, when you start the job"


def test_every_setting_comes_with_its_meaning() -> None:
    found = lines_of()
    known = [key for key, *_ in keys_of()]
    sections = {key for key in known if any(other.startswith(f"{key}.") for other in known)}
    assert {line.split("=")[0] for line in found} == set(known) - sections
    assert all(meaning and "TODO" not in meaning for meaning, *_ in found.values())


@pytest.mark.parametrize(
    ("arguments", "value", "origin"),
    [
        (["decode.tau_add"], "0.1", "default"),
        (["decode.block_size"], "16", "conf/decode/embedded.yaml"),
        (["decode.drafts", "decode=embedded_control"], "0", "conf/decode/embedded_plain.yaml"),
        (["decode.extra_fill", "decode=embedded_control"], "1", "conf/decode/embedded_control.yaml"),
        (["decode.block_size", "decode.block_size=8"], "8", "the command line"),
        (["model.path", "model=llada_base"], "GSAI-ML/LLaDA-8B-Base", "conf/model/llada_base.yaml"),
        (["decode.tau_add", "experiment=table5_mbpp"], "0.3", "conf/experiment/table5_mbpp.yaml"),
        (["logging.wandb.tags", "logging.wandb.tags=[a,b]"], "[a, b]", "the command line"),
        (["task.limit", "task=gsm8k"], "null", "conf/task/gsm8k.yaml"),
    ],
)  # fmt: skip
def test_where_a_value_came_from(arguments: list[str], value: str, origin: str) -> None:
    [(setting, found)] = lines_of(*arguments).items()
    assert setting == f"{arguments[0]}={value}"
    assert f"from: {origin}" in found


@pytest.mark.parametrize(
    ("arguments", "value", "reason"),
    [
        (["decode.context", "model=d2f_dream_base"], "d2f", "auto, which follows model.pattern=d2f"),
        (["decode.context", f"model.path={EMBEDDED}"], "dual", "the pattern of its family Dream, vanilla"),
        (["decode.block_size", f"model.path={EMBEDDED}", "decode.block_size=auto"], "32", "the command line: auto"),
        (["decode.context", "model=llada_base"], "auto", "dual (vanilla), d2f (d2f), blocks (block_diffusion)"),
        (["model.pattern", f"model.path={EMBEDDED}"], "vanilla", "the model's family, Dream"),
        (["model.dtype"], "fp32", "the device, cpu"),
    ],
)
def test_what_auto_comes_to(arguments: list[str], value: str, reason: str) -> None:
    [(setting, found)] = lines_of(*arguments).items()
    assert setting == f"{arguments[0]}={value}"
    [origin] = [line for line in found if line.startswith("from: ")]
    assert reason in origin


def test_a_section_gives_all_its_settings_and_a_key_its_details() -> None:
    found = lines_of("logging")
    assert "logging.wandb.mode=auto" in found
    assert all(setting.startswith("logging.") for setting in found)
    [(_, context)] = lines_of("decode.context").items()
    assert "takes: auto, d2f, d2f_causal, lopa_released, blocks, vanilla, dual, causal" in context
    assert any(line.startswith("- dual: ") for line in context)
    assert not any(line.startswith("`verify`") for line in context)


def test_choices_are_in_the_table_of_kinds() -> None:
    found = {setting.key: setting.allowed for setting in settings_of()}
    assert found["task.allow_code_execution"] == "true, false, unconfined, null"
    assert found["engine.max_rows"] == "an integer or null"
    assert found["parallel.data"] == "an integer or auto"
    assert found["model.lora"] == "a text or null"


def test_every_preset_says_what_it_is() -> None:
    for group in ("model", "decode", "task", "launcher", "experiment"):
        for file in (CONF / group).glob("*.yaml"):
            comments = [line for line in file.read_text().splitlines() if line.startswith("# ")]
            assert any("@package" not in line for line in comments), file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.contxt"], "decode.contxt: no such key; did you mean decode.context"),
        (["zzz"], "zzz: no such key. Sections: model, task, decode"),
        (["decode.contxt=dual"], "did you mean decode.context"),
    ],
)
def test_misspelt_keys(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        explain(arguments)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "explain", "decode.tau_conf", "decode.tau_conf=0.8"])
    cli.main()
    assert capsys.readouterr().out.startswith("decode.tau_conf=0.8\n    a token is filled, without verification, when")
    monkeypatch.setattr("sys.argv", ["lopa-dist", "explain", "decode.tau_conf=x"])
    with pytest.raises(SystemExit, match="tau_conf"):
        cli.main()


def test_settings_of_hydra_that_our_commands_name() -> None:
    assert explain(["launcher"]).startswith("launcher\n    how a sweep's jobs start")
    text = explain(["hydra.run.dir", "seed"])
    assert text.startswith("hydra.run.dir\n    the run folder")
    assert "\nseed=" in text
