"""Bad values and misspelt keys are met with the key and the choices."""

from __future__ import annotations

import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lopa_dist import cli
from lopa_dist.config import TASKS, Config


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(cli.CONF), version_base="1.3"):
        config = OmegaConf.to_object(compose("config", list(overrides)))
    assert isinstance(config, Config)
    return config


def test_defaults_are_the_embedded_model_on_its_problems() -> None:
    config = composed()
    assert config.model.path == "embedded"
    assert (config.task.name, config.task.limit) == ("arithmetic", 200)
    assert config.decode.block_size == 16


@pytest.mark.parametrize("group", ["model", "task", "decode", "parallel", "engine", "logging", "experiment"])
def test_every_choice_of_every_group_composes(group: str) -> None:
    needed = {"local": ["model.path=x"], "batch": ["task.input=x"]}
    choices = [f.stem for f in (cli.CONF / group).glob("*.yaml")]
    assert choices
    if group == "task":
        assert set(choices) == set(TASKS)
    for choice in choices:
        composed(f"{group}={choice}", *needed.get(choice, []))


def test_paper_settings() -> None:
    """S1 and S12 of the paper: BP counts the anchor as a branch, so 4 ranks are k = 3."""
    first, last = composed("experiment=s1").decode, composed("experiment=s12").decode
    assert (first.branches, first.tau_conf, first.tau_act, first.tau_add) == (3, 0.95, 0.95, 0.1)
    assert (last.branches, last.tau_conf, last.block_size, last.max_new_tokens) == (7, 0.7, 32, 512)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("decode.score=best", ["decode.score", "mean", "sliding_window"]),
        ("decode.branches=-1", ["decode.branches", "at least 0"]),
        ("decode.tau_conf=1.5", ["decode.tau_conf", "between 0 and 1"]),
        ("decode.top_p=0", ["decode.top_p"]),
        ("decode.max_active_blocks=0", ["decode.max_active_blocks", "null"]),
        ("parallel.branch=zero", ["parallel.branch", "auto"]),
        ("parallel.timeout_s=0", ["parallel.timeout_s"]),
        ("engine.attention=flash", ["engine.attention", "torch", "plain"]),
        ("model.dtype=fp8", ["model.dtype", "bf16"]),
        ("task.limit=0", ["task.limit"]),
        ("task.limit=null", ["task.limit"]),
        ("logging.wandb.mode=off", ["logging.wandb.mode", "offline"]),
    ],
)
def test_bad_values(override: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is what is tested
        composed(override)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=gsm8k", "task.fewshot=-1"], ["task.fewshot", "at least 0"]),
        (["task=humaneval", "task.fewshot=2"], ["task.fewshot", "no effect", "gsm8k"]),
        (["task=gsm8k", "task.allow_code_execution=true"], ["task.allow_code_execution", "humaneval"]),
        (["task=gsm8k", "task.column=x"], ["task.column", "batch"]),
        (["task=mbpp", "task.code_timeout_s=0"], ["task.code_timeout_s", "above 0"]),
        (["task=gsm8k", "task.input=-"], ["task.input", "only task=batch"]),
        (["task.input=x.jsonl"], ["task.input", "add task=batch"]),
        (["task=batch"], ["task.input", "needs a file"]),
    ],
)
def test_options_of_other_tasks_are_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is what is tested
        composed(*overrides)
    for word in words:
        assert word in str(error.value)


def test_dataset_sources_need_no_quoting() -> None:
    assert composed("task=batch", "task.input=hf://openai/gsm8k:main:test").task.input == "hf://openai/gsm8k:main:test"
    config = composed("task=mbpp", "task.allow_code_execution=false").task
    assert (config.name, config.limit, config.allow_code_execution) == ("mbpp", None, False)


def test_block_causal_cannot_be_joint() -> None:
    with pytest.raises(ValueError, match=r"needs decode\.window_attention=full"):
        composed("decode.prompt_attention=joint", "decode.window_attention=block_causal")


@pytest.mark.parametrize(
    ("override", "hint"),
    [("decode.brances=3", "decode.branches"), ("decode.tauconf=1", "decode.tau_conf"), ("tsk=batch", "task")],
)
def test_misspelt_keys(override: str, hint: str) -> None:
    with pytest.raises(cli.UserError, match=hint):
        cli.check_keys([override])


def test_right_keys_pass() -> None:
    cli.check_keys(
        [
            "decode.branches=3",
            "model=local",
            "hydra.run.dir=x",
            "+experiment=s1",
            "logging.wandb.mode=offline",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.branchs=3"], "did you mean decode.branches"),
        (["decode.branches=three"], "decode.branches: Value 'three'"),
        (["model=none_such"], "Could not find 'model/none_such'"),
        (["report"], "usage"),
        (["report", "nowhere"], r"no report\.json"),
        (["lm-eval"], r"needs lm_eval: pip install 'lopa_dist\[eval\]'"),
    ],
)
def test_command_line_mistakes_are_one_message(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("lm_eval.")] + ["lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it was not installed
    monkeypatch.delitem(sys.modules, "lopa_dist.jobs.lm_eval_adapter", raising=False)
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments])
    with pytest.raises(SystemExit, match=message):
        cli.main()
