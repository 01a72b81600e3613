"""Bad values and misspelt keys are met with the key and the choices."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lopa_dist import cli
from lopa_dist.composing import by_hydra, composition, short
from lopa_dist.composing import composed as config_of
from lopa_dist.config import Config, TaskConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.overrides import as_hydra_reads, quoted
from lopa_dist.tasks.registry import TASKS


def composed(*overrides: str) -> Config:
    return config_of(list(overrides))


TYPED = [
    "decode=lopa", "decode=vanilla", "model=causal", "model=lists", "task=batch", "task=own", "decode=no", "model=[1]",
    "decode.drafts=4", "decode.drafts=auto", "decode.drafts=x", "decode.temperature=0.5", "decode.tau_conf=2",
    "task.stop=a", "task.limit=3", "task.prompt='a {b}, c=d'", "task.options={shots: 2}", "+task.options.shots=3",
    "model.template={a: 1}", "model.template.a=2", "~decode.drafts", "++decode.drafts=3", "decode.drafts=1,2",
    "task.input=${task.output}", "task.output=x.jsonl", "hydra.run.dir=x", "hydra/launcher=basic", "decode.dtaus=1",
    "parallel.threads=null", "model.path=a/b", "=", "decode",
]  # fmt: skip


@settings(max_examples=20)
@given(st.lists(st.sampled_from(TYPED), max_size=4))
def test_what_is_composed_from_cached_presets_is_what_hydra_composes(overrides: list[str]) -> None:
    def composed_by(compose: Callable[[list[str]], Any]) -> str:
        try:
            return repr(OmegaConf.to_object(compose(overrides)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    assert composed_by(composition) == composed_by(lambda given: by_hydra.__wrapped__(tuple(given)))


def test_a_preset_is_composed_once_for_all_settings() -> None:
    composed("decode=lopa")
    misses = by_hydra.cache_info().misses
    assert composed("decode.branches=3", "decode=lopa").decode.branches == 3
    assert composed("decode=lopa").decode.branches != 3, "what is cached stays as it is"
    assert by_hydra.cache_info().misses == misses


@pytest.mark.parametrize("text", ["Classify: {text}", 'it\'s, "{text}"', "{a}\n[{b}]"])
def test_a_prompt_of_columns_needs_no_second_quotes(text: str) -> None:
    given = ["task=batch", "task.input=x.csv"]
    assert composed(*as_hydra_reads([*given, f"task.prompt={text}"])).task.prompt == text
    assert composed(*as_hydra_reads([*given, f"task.prompt={quoted(text)}"])).task.prompt == text
    with pytest.raises(ValueError, match=r"task\.column=q with task\.prompt"):
        composed(*as_hydra_reads([*given, f"task.prompt={text}", "task.column=q"]))


@pytest.mark.parametrize("given", [["model.path=/x"], ["task.limit=3", "model.path=/x", "seed=1"]])
def test_a_path_alone_is_a_model_of_its_own(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the embedded model's pattern with other weights."""
    monkeypatch.setattr(sys, "argv", ["lopa-dist", *given, "--cfg", "job"])
    cli.main()
    shown = capsys.readouterr().out
    assert "pattern: auto" in shown
    assert "drafts: 10" in shown


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"drafts": 0, "branches": 2}, "decode.drafts of 1 or more"),
        ({"verify": "confidence", "drafts": 2}, "decode.verify=agreement"),
        (
            {"verify": "agreement", "drafts": 2, "extra_fill": 1},
            "decode.extra_fill=1 is not possible with decode.verify=agreement",
        ),
        ({"verify": "agreement", "drafts": -1}, "decode.drafts=-1"),
        ({"verify": "both"}, "confidence, agreement"),
        ({"block_size": 16.0}, "decode.block_size=16.0: must be an integer of at least 1"),
        ({"top_k": True}, "decode.top_k=True: must be an integer of at least 0"),
        ({"tau_entropy": -0.5}, "decode.tau_entropy=-0.5: must be a number of nats"),
        ({"tau_entropy": 0.5, "confidence": "margin"}, "needs decode.confidence=neg_entropy"),
        (
            {"tau_entropy": 0.5, "fill": "a.py:f"},
            "decode.tau_entropy=0.5: decode.fill=a.py:f decides which tokens are filled; leave tau_entropy at null",
        ),
    ],
)
def test_verification_that_makes_no_sense_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        DecodeConfig(**given)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["decode.sub_block_size=3"], ["decode.sub_block_size=3", "divide decode.block_size=16"]),
        (["decode.sub_block_size=0"], ["decode.sub_block_size=0", "at least 1"]),
        (["decode.context=both"], ["decode.context", "d2f", "dual", "auto"]),
    ],
)
def test_contexts_and_parts_of_blocks_that_there_are_not(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(Exception, match=re.escape(words[0])) as caught:
        composed(*overrides)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("decode.confidence=best", ["decode.confidence", "margin", "neg_entropy"]),
        ("decode.branches=-1", ["decode.branches", "at least 0"]),
        ("decode.tau_conf=1.5", ["decode.tau_conf", "between 0 and 1"]),
        ("decode.top_p=0", ["decode.top_p"]),
        ("decode.max_active_blocks=0", ["decode.max_active_blocks", "null"]),
        ("decode.max_active_blocks=some", ["decode.max_active_blocks", "integer", "auto"]),
        ("decode.block_size=0", ["decode.block_size", "at least 1"]),
        ("decode.block_size=small", ["decode.block_size", "integer", "auto"]),
        ("decode.block_size=--5", ["decode.block_size", "integer", "auto"]),
        ("model.pattern=d3f", ["model.pattern", "auto", "vanilla", "d2f", "block_diffusion"]),
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
        (["task=gsm8k", "task.column=x"], ["task.column", "batch", "leave it out"]),
        (["task=gsm8k", "task.split=train"], ["task.split=train", "task=gsm8k", "only with arithmetic, lists"]),
        (["task=mbpp", "task.problem_seed=2"], ["task.problem_seed=2", "only with arithmetic, lists"]),
        (
            ["task=math", "task.code_timeout_s=3"],
            ["task.code_timeout_s=3.0", "only with humaneval, humaneval_plus, mbpp"],
        ),
        (
            ["task.fewshot_as_multiturn=false"],
            ["task.fewshot_as_multiturn=False", "gsm8k, math, mbpp, mbpp_plus, harness"],
        ),
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


@pytest.mark.parametrize("name", TASKS)
def test_every_option_of_a_task_is_a_key_and_a_parameter(name: str) -> None:
    keys = {f.name for f in fields(TaskConfig)}
    assert keys >= {*TASKS[name].options}
    made = [parameter for base in TASKS[name].__mro__[:-1] for parameter in signature(base).parameters]
    assert {*made} >= {"limit", *TASKS[name].options}


def test_dataset_sources_need_no_quoting() -> None:
    assert composed("task=batch", "task.input=hf://openai/gsm8k:main:test").task.input == "hf://openai/gsm8k:main:test"
    config = composed("task=mbpp", "task.allow_code_execution=false").task
    assert (config.name, config.limit, config.allow_code_execution) == ("mbpp", None, False)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("decode.brances=3", r"did you mean decode\.branches"),
        ("decode.tauconf=1", r"did you mean decode\.tau_conf\?"),
        ("tsk=batch", r"did you mean task\?"),
        ("engine.temperature=1", r"did you mean decode\.temperature\?"),
        ("wandb=true", r"did you mean logging\.wandb\?"),
        ("decode.cache=dual", r"CHANGELOG\.md has those that are gone"),  # nothing like decode.branches
        ("experiment=null", r"null is not the name of a preset; leave out experiment for the usual one"),
        ("model=7", r"7 is not the name of a preset"),
        ("model=-1e5", r"-100000.0 is not the name of a preset"),
        ("model=7,embedded", r"7 is not the name of a preset"),
        ("experiment=table5_gsm8k,null", r"null is not the name of a preset"),
        ("decode.tau=1", r"did you mean decode\.tau_\w+, decode\.tau_\w+, decode\.tau_\w+\?"),
        ("decode.branch=1", r"did you mean decode\.branches\?"),
        ("wandb.mode=x", r"did you mean logging\.wandb\.mode\?"),
        ("task.inputs=x", r"did you mean task\.input\?"),
        ("model.name=x", r"Known: model\.path"),
        ("=x", r"no such key"),
        ("engine=default", r"engine=default: engine has no presets, but the settings engine\.max_sequences, "),
        ("logging.wandb=true", r"wandb has no presets, but the settings logging\.wandb\.mode"),
    ],
)
def test_misspelt_keys(override: str, hint: str) -> None:
    with pytest.raises(cli.UserError, match=hint):
        cli.check_keys([override])


@pytest.mark.parametrize("override", ["modle=x", "+decode.drafs=3", "tsk=batch"])
def test_a_suggestion_is_made_once(override: str) -> None:
    with pytest.raises(cli.UserError) as error:
        cli.check_keys([override])
    near = str(error.value).split("did you mean ")[1].split("?")[0].split(", ")
    assert len(set(near)) == len(near)


def test_all_keys_are_listed_only_where_none_is_near() -> None:
    with pytest.raises(cli.UserError) as near:
        cli.check_keys(["decode.tauconf=1"])
    assert "decode.branches" not in str(near.value)
    with pytest.raises(cli.UserError, match=r"Known: decode\.branches, "):
        cli.check_keys(["decode.xyz=1"])


def test_right_keys_pass() -> None:
    cli.check_keys(
        [
            "decode.branches=3",
            "model=local",
            "hydra.run.dir=x",
            "+experiment=table5_math",
            "~experiment=null",
            "decode=[lopa,low_entropy]",
            "decode='7'",
            "engine= {max_sequences: 3}",
            "logging.wandb.mode=offline",
        ]
    )


def test_fp8_is_not_reproducible() -> None:
    with pytest.raises(ValueError, match=r"engine\.reproducible=true with model\.quantization=fp8.*use int8"):
        composed("engine.reproducible=true", "model.quantization=fp8")
    assert composed("engine.reproducible=true", "model.quantization=int8").engine.reproducible


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=300))
def test_names_of_folders_are_short_and_differ(name: str) -> None:
    assert len(short(name).encode()) <= 200
    assert not {"/", "\\"} & {*short(name)}
    plain = name.replace("/", "_").replace("\\", "")
    assert (short(name) == plain) == (len(plain.encode()) <= 200)
    assert short(name) != short(name + "x")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("key", ["job.grace_s", "parallel.timeout_s", "task.code_timeout_s", "decode.temperature"])
def test_times_and_temperatures_are_numbers(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}=.*must be"):
        composed(f"{key}={value}")


def test_samples_are_limited_before_any_line_is_read() -> None:
    with pytest.raises(ValueError, match=r"task\.samples=129: at most 128 answers per prompt"):
        TaskConfig(name="batch", input="nothing.jsonl", samples=129)


def test_integers_of_numpy_are_integers() -> None:
    """Written in JSON, too."""
    config = DecodeConfig(verify="confidence", drafts=0, max_new_tokens=np.int64(5))  # type: ignore[arg-type]
    assert json.dumps(config.max_new_tokens) == "5"
