"""Bad values and misspelt keys are met with the key and the choices."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from submitit.core.utils import FailedJobError

from lopa_dist import cli
from lopa_dist.checks import UserError
from lopa_dist.config import Config, TaskConfig, by_hydra, composition, short
from lopa_dist.config import composed as config_of
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.folder.results import write_errors
from lopa_dist.jobs.run.job import Job
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.families import PATTERNS
from lopa_dist.models.files import SHIPPED
from lopa_dist.overrides import as_hydra_reads, in_quotes, quoted
from lopa_dist.parallel.stop import SIGNALS
from lopa_dist.sweep import SweepFolder
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


def test_defaults_are_the_embedded_model_on_its_problems() -> None:
    config = composed()
    assert config.model.path == "embedded"
    assert (config.task.name, config.task.limit) == ("arithmetic", 200)
    assert config.decode.block_size == 16


def test_other_models_bring_verified_lookahead_and_lopa_stays_as_published() -> None:
    decode = composed("model=dream_instruct").decode
    assert (decode.verify, decode.drafts, decode.branches) == ("agreement", 10, 0)
    assert (decode.max_new_tokens, decode.block_size) == (512, "auto")
    decode = composed("model=dream_instruct", "decode=lopa").decode
    assert (decode.verify, decode.drafts, decode.branches) == ("confidence", 0, 7)
    assert composed("experiment=table5_gsm8k", "model=d2f_dream_base").decode.verify == "confidence"
    assert composed("model=dream_instruct", "decode=vanilla").decode.branches == 0
    assert composed("model=dream_instruct", "decode.branches=2").decode.branches == 2


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


@pytest.mark.parametrize("group", ["model", "task", "decode", "launcher", "experiment"])
def test_every_choice_of_every_group_composes(group: str) -> None:
    needed = {"local": ["model.path=x"], "batch": ["task.input=x"], "harness": ["task.harness=x"]}
    needed["own"] = [f"task.name={Path(__file__).parent.parent / 'examples' / 'task.py'}:Capitals"]
    choices = [f.stem for f in (cli.CONF / group).glob("*.yaml")]
    assert choices
    if group == "task":
        assert set(choices) == {*TASKS, "own"}
    for choice in choices:
        composed(f"{group}={choice}", *needed.get(choice, []))


def paper_settings() -> list[list[str]]:
    """What docs/inputs.md says to write for S1, S2, ... of the paper."""
    page = (cli.CONF.parent / "docs" / "inputs.md").read_text()
    [thresholds] = re.findall(r"TAU takes the values (.*) in turn", page)
    rows = re.findall(r"^\| S\d+ to S\d+ \|.*\| `(.*)` \|$", page, re.MULTILINE)
    return [row.replace("TAU", tau).split() for row in rows for tau in thresholds.split(", ")]


@pytest.mark.parametrize(("model", "tokens"), [("embedded", 64), ("causal", 64), ("lists", 144)])
def test_the_models_of_the_package_keep_their_answers_length_with_any_way_of_decoding(model: str, tokens: int) -> None:
    """512 tokens after a prompt would not fit into their 512 positions: every request would be refused."""
    for preset in (file.stem for file in (cli.CONF / "decode").glob("*.yaml")):
        assert composed(f"model={model}", f"decode={preset}").decode.max_new_tokens == tokens
    assert composed(f"model={model}", "decode=lopa", "decode.max_new_tokens=80").decode.max_new_tokens == 80


def test_paper_settings() -> None:
    """The paper counts the anchor as a branch: its 4 are k = 3. S13 to S18 are S1 to S6 in another context."""
    settings = paper_settings()
    thresholds = [0.95, 0.9, 0.85, 0.8, 0.75, 0.7]
    assert len(settings) == 18
    for n, line in enumerate(settings):
        found = resolve_decode(composed("model=d2f_dream_base", *line).decode, PATTERNS["d2f"])
        assert (found.branches, found.drafts, found.verify) == (7 if 6 <= n < 12 else 3, 0, "confidence")
        assert found.tau_conf == found.tau_act == thresholds[n % 6]
        assert (found.tau_add, found.block_size, found.max_new_tokens) == (0.1, 32, 512)
        assert found.context == ("d2f" if n < 12 else "d2f_causal")
        assert found.max_active_blocks is None


@pytest.mark.parametrize(
    ("name", "numbers"),
    [  # k, block, tau_add, tau_act, tau_conf
        ("gsm8k", (14, 32, 0.1, 0.95, 0.9)),
        ("math", (7, 16, 0.1, 0.95, 0.9)),
        ("humaneval", (7, 32, 0.3, 0.95, 0.95)),
        ("mbpp", (7, 32, 0.3, 0.95, 0.95)),
        ("humaneval_plus", (6, 32, 0.3, 0.95, 0.95)),
        ("mbpp_plus", (14, 32, 0.3, 0.95, 0.9)),
    ],
)
def test_table_5(name: str, numbers: tuple[float, ...]) -> None:
    config = composed(f"experiment=table5_{name}")
    at = config.decode
    assert (at.branches, at.block_size, at.tau_add, at.tau_act, at.tau_conf) == numbers
    assert config.task.name == name
    assert composed(f"experiment=table5_{name}", "task=arithmetic").task.name == "arithmetic"
    plus = name.endswith("_plus")
    assert at.confidence == ("probability" if plus else "neg_entropy")
    assert (config.model.path == "apple/DiffuCoder-7B-Instruct") == plus
    assert composed(f"experiment=table5_{name}", "model=d2f_dream_base").model.path == "Dream-org/Dream-v0-Base-7B"


def test_every_model_is_a_hub_id_and_adapters_come_with_their_pattern() -> None:
    for file in (cli.CONF / "model").glob("*.yaml"):
        if file.stem in (*SHIPPED, "local"):
            continue
        model = composed(f"model={file.stem}").model
        assert re.fullmatch(r"[\w-]+/[\w.-]+", model.path)
        merged = model.lora is not None and model.lora_rows == "all"
        assert merged == (model.pattern == "d2f") == file.stem.startswith("d2f_")
        assert model.chat_template == ("never" if file.stem.endswith("_base") else "auto")


def test_auto_follows_the_model() -> None:
    """LoPA's options that depend on the model, on three kinds of models; what the user says stays."""
    auto = composed("decode=lopa").decode
    assert (auto.context, auto.block_size, auto.max_active_blocks) == ("auto",) * 3
    vanilla, d2f = (resolve_decode(auto, PATTERNS[name]) for name in ("vanilla", "d2f"))
    assert (vanilla.context, vanilla.max_active_blocks) == ("dual", None)
    assert (d2f.context, d2f.max_active_blocks) == ("d2f", None)
    blocks = resolve_decode(auto, replace(PATTERNS["block_diffusion"], block_size=4))
    assert type(blocks) is DecodeConfig
    assert (blocks.context, blocks.block_size, blocks.max_active_blocks) == ("blocks", 4, 1)
    chosen = composed("decode=lopa", "decode.context=vanilla", "decode.block_size=8").decode
    blocks = resolve_decode(chosen, PATTERNS["block_diffusion"])
    assert (blocks.context, blocks.block_size, blocks.max_active_blocks) == ("vanilla", 8, None)
    with pytest.raises(ValueError, match=r"decode\.context=vanilla: the model is causal; set it to auto"):
        resolve_decode(chosen, PATTERNS["causal"])


def test_presets_of_the_baselines_follow_the_model() -> None:
    """Fast-dLLM on models without blocks, block diffusion on those with them; vanilla is never anything else."""
    threshold = composed("decode=threshold").decode
    found = resolve_decode(threshold, PATTERNS["vanilla"])
    assert (found.context, found.scope.cache, found.block_size) == ("dual", "dual", 32)
    assert (found.max_active_blocks, found.branches, found.tau_conf, found.confidence) == (1, 0, 0.9, "probability")
    found = resolve_decode(threshold, replace(PATTERNS["block_diffusion"], sub_block_size=8))
    assert (found.scope.cache, found.scope.prompt_attention) == ("block", "blocks")
    assert (found.scope.window_attention, found.sub_block_size, found.scope.boundary) == ("block_causal", 8, "fill")
    asked = composed("decode=threshold", "decode.context=dual").decode
    assert resolve_decode(asked, replace(PATTERNS["block_diffusion"], sub_block_size=8)).sub_block_size is None
    most, entropy = composed("decode=vanilla").decode, composed("decode=vanilla_entropy").decode
    assert (most.confidence, entropy) == ("probability", replace(most, confidence="neg_entropy"))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.branchs=3"], "did you mean decode.branches"),
        (["decode.branches=three"], "decode.branches: Value 'three' of type 'str' could not be converted"),
        (
            ["model=dream_instruc"],
            r"^lopa-dist: model=dream_instruc: no such preset; did you mean dream_instruct\?",
        ),
        (["experiment=table5_gsm"], r"experiment=table5_gsm: no such preset; did you mean table5_gsm8k\?"),
        (["launcher=slrum"], r"launcher=slrum: no such preset; did you mean slurm\?"),
        (["decode.alpha=1"], r"decode\.alpha: no such key \(CHANGELOG\.md has those that are gone\)"),
        (["model=none_such"], r"^lopa-dist: model=none_such: no such preset\. There are a2d_qwen3_0_6b, "),
        (["trce", "r", "1"], "trce: no such command; did you mean trace"),
        (["doctor", "-m", "decode.drafts=2,3"], r"doctor is a command: it must be the first word, without -m"),
        (["decode=../model/embedded"], r"decode=\.\./model/embedded: a preset is named without its folder"),
        (["report", ""], r"argument FOLDER: it is empty; the current folder is \."),
        (["--task", "batch"], r"--task: no such flag; settings are KEY=VALUE"),
        (["task=batch", "task.input"], r"task\.input: settings are KEY=VALUE"),
        (["model=Qwen/Qwen3-8B"], r"model=Qwen/Qwen3-8B: not a preset; .* model\.path=Qwen/Qwen3-8B"),
        (["frobnicate"], r"no such command\. Commands: report, table, status"),
        (["report"], "usage"),
        (["report", "nowhere"], r"no report\.json"),
        (["task=batch", "--dry-run"], r"--dry-run is for launch/\*\.sh; `lopa-dist doctor KEY=VALUE \.\.\.` checks"),
        (["task.stop=x"], r"task\.stop: no such key; stop strings are a line's own"),
    ],
)
def test_command_line_mistakes_are_one_message(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments])
    with pytest.raises(SystemExit, match=message):
        cli.main()


def test_a_sweep_inside_torchrun_is_refused_before_it_makes_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", "decode.drafts=2,3"])
    with pytest.raises(SystemExit, match=r"a sweep cannot run inside torchrun: start it from one process"):
        cli.main()
    assert not list(tmp_path.iterdir())


def test_an_interrupted_job_says_how_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the settings and the folder: without the settings, the folder has results of other ones."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lopa_dist.jobs.run.job.run", interrupted)
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path}", "task.limit=1"])
    with pytest.raises(SystemExit, match=r"^130$"):
        cli.main()
    assert (
        f"lopa-dist: interrupted; go on with the same command and hydra.run.dir={tmp_path}\n" in capsys.readouterr().err
    )


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `lopa-dist models | head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "models"])
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit, match=r"^1$"):
            cli.main()
    assert capsys.readouterr().err == ""


def test_fp8_is_not_reproducible() -> None:
    with pytest.raises(ValueError, match=r"engine\.reproducible=true with model\.quantization=fp8.*use int8"):
        composed("engine.reproducible=true", "model.quantization=fp8")
    assert composed("engine.reproducible=true", "model.quantization=int8").engine.reproducible


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"lopa-dist {command} " in shown


LONG = [
    f"decode.{setting}"
    for setting in (
        "branches=0", "block_size=16", "max_new_tokens=16", "max_active_blocks=1", "tau_conf=0.9",
        "temperature=0.0", "context=d2f", "top_p=1.0", "top_k=0", "sub_block_size=null", "tau_look=0.0",
        "verify=agreement",
    )
]  # fmt: skip


def test_a_signal_while_a_job_of_a_sweep_writes_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After that job, which is whole. Its name, of all overrides, is longer than a folder's may be."""
    write = Job.write_page

    def signalled(self: Job, report: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(self, report)

    monkeypatch.setattr(Job, "write_page", signalled)
    quiet = ["logging.wandb.mode=disabled", "parallel.threads=1", "task.limit=1"]
    sweep = ["-m", f"hydra.sweep.dir={tmp_path}", *quiet, *LONG, "decode.drafts=4,8"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", *sweep])
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(SystemExit, match=r"^75$"):
            cli.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    [report] = tmp_path.glob("*/report.json")
    assert len(",".join([*LONG, "decode.drafts=4", "task.limit=1"])) > 255 >= len(report.parent.name)
    assert (
        "stopped by SIGTERM when this job was done; go on with the sweep and hydra.sweep.dir=" in capfd.readouterr().err
    )


def test_a_sweep_ends_with_the_command_that_compares_its_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "my sweep"
    said = f"Compare the runs: lopa-dist report '{folder}'"

    def job(raw: Any) -> None:
        if raw.task.problem_seed == 2:
            raise UserError("this one fails")
        folder = Path(HydraConfig.get().runtime.output_dir, "a value with a slash")
        folder.mkdir()
        (folder / "report.json").touch()

    monkeypatch.setattr(cli, "job", job)
    monkeypatch.setattr(SweepFolder, "folder", None)
    monkeypatch.setattr(
        "sys.argv", ["lopa-dist", "-m", f"hydra.sweep.dir={quoted(str(folder))}", "task.problem_seed=0,1"]
    )
    cli.main()
    assert capsys.readouterr().out.splitlines()[-1] == said
    monkeypatch.setattr("sys.argv", [*sys.argv[:-1], "task.problem_seed=2,3"])
    with pytest.raises(SystemExit, match=r"^lopa-dist: task\.problem_seed=2: this one fails$"):
        cli.main()
    assert capsys.readouterr().out.splitlines()[-1] == said
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", f"hydra.sweep.dir={tmp_path / 'none'}", "task.problem_seed=2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Compare" not in capsys.readouterr().out, "there is nothing to compare"


@pytest.mark.parametrize("arguments", [["model.path=embeded"], ["explain", "model.path=embeded"]])
def test_a_near_miss_of_a_checkpoint_in_the_package_is_not_looked_for_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    own = [] if "explain" in arguments else [f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments, *own])
    with pytest.raises(SystemExit, match=r"^lopa-dist: model\.path=embeded: .*did you mean embedded\?$"):
        cli.main()


def test_a_job_of_a_sweep_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    sweep = ["-m", f"hydra.sweep.dir={tmp_path}", "task=batch", f"task.input={tmp_path}/none.jsonl", "seed=0,1"]
    sweep += ["logging.wandb.mode=disabled"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", *sweep])
    with pytest.raises(SystemExit, match=r"^lopa-dist: seed=0,.*nothing to run: .*none\.jsonl has no lines$"):
        cli.main()


def test_every_job_of_a_sweep_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def job(raw: Any) -> None:
        raise RuntimeError(f"broken at {raw.seed}")

    monkeypatch.setattr(cli, "job", job)
    monkeypatch.setattr(
        "sys.argv", ["lopa-dist", "-m", f"hydra.sweep.dir={tmp_path}", "decode.temperature=1", "seed=0,1"]
    )
    with pytest.raises((SystemExit, RuntimeError)):
        cli.main()
    told = "".join(capfd.readouterr())
    assert "broken at 0" in told
    assert "broken at 1" in told


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=300))
def test_names_of_folders_are_short_and_differ(name: str) -> None:
    assert len(short(name).encode()) <= 200
    assert not {"/", "\\"} & {*short(name)}
    plain = name.replace("/", "_").replace("\\", "")
    assert (short(name) == plain) == (len(plain.encode()) <= 200)
    assert short(name) != short(name + "x")


def test_hydra_adds_no_words_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path}", "task=batch", "task.input=nowhere"])
    with pytest.raises(SystemExit, match=r"^lopa-dist: task\.input=nowhere: no such file$"):
        cli.main()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["file/run", "file", "folder"])
def test_a_run_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "cli.log").mkdir(parents=True)  # where the log should be
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path / name}"])
    with pytest.raises(
        SystemExit, match=rf"the run folder cannot be written \(.*{name}.*\); give another hydra\.run\.dir"
    ):
        cli.main()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """As soon as the first request is finished: the journal is written, but the disk does not take it."""

    def fsync(descriptor: int) -> None:
        if "/journal/0" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("lopa_dist.jobs.folder.journal.os.fsync", fsync)
    settings = ["task.limit=1", "logging.wandb.mode=disabled", "parallel.threads=1"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", f"hydra.run.dir={tmp_path}", *settings])
    message = f"{os.strerror(number)} in {tmp_path}/journal: make room there, then start it again with hydra.run.dir="
    with pytest.raises(SystemExit, match=f"^lopa-dist: {message}{tmp_path}; finished requests are kept$"):
        cli.main()


def test_a_share_of_an_input_that_is_smaller_than_its_array_is_done(caplog: pytest.LogCaptureFixture) -> None:
    task = {"input": "x", "shard": 2, "shards": 3}
    report = {"requests": 0, "errors": 0, "tpf": 0.0, "tokens_per_s": {"job": 0.0}, "task": task}
    with caplog.at_level("INFO", "lopa_dist"):
        assert cli.summary(report, Path("run")) == 0
    assert caplog.messages[-1] == "the input has nothing for task.shard=2 of 3: it is done"


def write_results(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Write results as a job does, with their errors apart."""
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_errors(folder, sum(line["finish_reason"] == "error" for line in lines))


def test_the_first_error_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    every = {"custom_id": "a", "index": 0, "finish_reason": "error"}
    lines = [every | {"finish_reason": "stop"}, *(every | {"error": f"line {i}: bad"} for i in (2, 3))]
    write_results(tmp_path, lines)
    report = {"requests": 3, "errors": 2, "tpf": 1.0, "tokens_per_s": {"job": 0.0}}
    with caplog.at_level("INFO", "lopa_dist"):
        assert cli.summary(report, tmp_path) == 1.0
    assert "2 with errors (see errors.jsonl)" in caplog.messages[0]
    assert caplog.messages[0].endswith(f"; results.jsonl is in {tmp_path}"), "the page could not be written"
    assert caplog.messages[1] == "the first error: line 2: bad"
    lines.append(every | {"finish_reason": "stop", "unjudged": "KeyError: 'answer'"})
    write_results(tmp_path, lines)
    with caplog.at_level("INFO", "lopa_dist"):
        cli.summary(report | {"requests": 4, "unjudged": 1}, tmp_path)
    assert caplog.messages[-1] == "the first that was not judged: KeyError: 'answer'"
    with pytest.raises(UserError, match="no answer could be judged; the first: KeyError: 'answer'"):
        cli.summary(report | {"unjudged": 1}, tmp_path)
    lines[1:1] = [every | {"finish_reason": "invalid", "error": "the text is no JSON: it was cut"}]
    write_results(tmp_path, lines)
    caplog.clear()
    with caplog.at_level("INFO", "lopa_dist"):
        cli.summary(report | {"requests": 4, "tries": {"invalid": 1}}, tmp_path)
    assert caplog.messages[1:] == [
        "the first error: line 2: bad", "the first answer without its format: the text is no JSON: it was cut"
    ]  # fmt: skip
    with pytest.raises(UserError, match="no answer has its format; the first: the text is no JSON: it was cut"):
        cli.summary(report | {"tries": {"invalid": 1}}, tmp_path)
    write_results(tmp_path, [every | {"error": "x" * kind} for kind in range(1, 9)])
    with caplog.at_level("INFO", "lopa_dist"):
        cli.summary(report | {"requests": 9, "errors": 8}, tmp_path)
    assert caplog.messages[-1] == "errors of 3 more kinds are in errors.jsonl"
    lines += [every | {"error": f"line 4 (b.csv, line {i}): {what} is null"} for i, what in enumerate("aab")]
    write_results(tmp_path, lines)
    caplog.clear()
    with caplog.at_level("INFO", "lopa_dist"):
        cli.summary(report, tmp_path)
    assert caplog.messages[1:] == [
        "2 errors such as: line 4 (b.csv, line 0): a is null",
        "2 errors such as: line 2: bad",
        "1 error such as: line 4 (b.csv, line 2): b is null",
    ]
    exact = {"accuracy": 0.0, "accuracy_interval": [0.0, 0.5], "judged": 3, "task": {"score": "exact"}}
    with caplog.at_level("INFO", "lopa_dist"):
        cli.summary(report | exact, tmp_path)
    assert caplog.messages[-1].startswith("no whole answer equals its reference; task.score=FILE.py:FUNCTION")
    with pytest.raises(cli.UserError, match=r"^no request could run; the first error: line 2: bad$"):
        cli.summary(report | {"requests": 2}, tmp_path)


def test_a_sweep_that_slurm_refuses_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise FailedJobError("sbatch: error: invalid partition specified: gpu\n")

    monkeypatch.setattr(cli, "app", refused)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", "decode.drafts=4,8"])
    with pytest.raises(SystemExit, match=r"^lopa-dist: .*could not be submitted.*invalid partition specified: gpu$"):
        cli.main()


@pytest.mark.parametrize(
    "value",
    [
        "a/b.jsonl",
        "a b(1).jsonl",
        "x=1,y=2/c",
        "multirun/decode.branches=1,seed=2",
        "o'brien/a",
        "a\\",
        "a\\'b c",
        "'",
        "ü/x",
    ],
)
def test_settings_are_shown_as_one_can_type_them(value: str) -> None:
    [typed] = shlex.split(cli.typed("hydra.run.dir", value))
    assert OverridesParser.create().parse_override(typed).value() == value


@given(st.text("ab'\\ \"=,()", min_size=1, max_size=8))
def test_any_text_is_quoted_for_hydra_and_for_a_shell(text: str) -> None:
    [typed] = shlex.split(cli.typed("model.path", text))
    assert OverridesParser.create().parse_override(typed).value() == text
    assert OverridesParser.create().parse_override(f"k={quoted(text)}").value() == text
    assert OverridesParser.create().parse_override(f"k={in_quotes(text)}").value() == text


@pytest.mark.parametrize("text", ["1.50", "1e-4", "1_000", "true", "null", "nan", "0x1f", "\\"])
def test_a_text_that_looks_like_a_number_stays_one_in_quotes(text: str) -> None:
    value = OverridesParser.create().parse_override(f"k={in_quotes(text)}").value()
    assert str(value) == text


def test_a_value_that_hydra_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "task=batch", "task.input=a b(1).jsonl"])
    with pytest.raises(
        SystemExit, match=r"^lopa-dist: task\.input=a b\(1\)\.jsonl: cannot be read; .*\"task\.input='a b"
    ):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["report"],
            r"required: FOLDER; usage: lopa-dist report \[-h\] \[--baseline RUN\] \[--latex \| --markdown\] FOLDER \[",
        ),
        (["report", "a", "--all"], "unrecognized arguments: --all; usage: lopa-dist report"),
        (["trace", "run"], "required: ID; usage: lopa-dist trace"),
        (["trace", "run", "1", "--htm", "x"], "unrecognized arguments: --htm x; usage: lopa-dist trace"),
        (["trace", "run", "1", "--html"], "--html: expected one argument; usage: lopa-dist trace"),
    ],
)
def test_arguments_that_a_command_does_not_take(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", *arguments])
    with pytest.raises(SystemExit, match=message):
        cli.main()


@pytest.mark.parametrize("command", ["report", "merge", "trace", "explain", "doctor"])
def test_every_command_tells_its_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", command, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    assert f"usage: lopa-dist {command} " in capsys.readouterr().out


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("key", ["job.grace_s", "parallel.timeout_s", "task.code_timeout_s", "decode.temperature"])
def test_times_and_temperatures_are_numbers(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}=.*must be"):
        composed(f"{key}={value}")


def test_one_default_everywhere() -> None:
    """What `DecodeConfig()` decodes is what models bring along, and with its sizes the embedded model's preset."""
    default, model, embedded = DecodeConfig(), composed("model=dream_instruct").decode, composed().decode
    sizes = {"block_size", "max_new_tokens", "sub_block_size", "max_active_blocks"}
    for entry in fields(DecodeConfig):
        ours, theirs = getattr(default, entry.name), getattr(model, entry.name)
        assert theirs in (ours, "auto"), entry.name
        assert entry.name in sizes or getattr(embedded, entry.name) == ours, entry.name


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    """As `| head` has."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "lopa_dist", "--help"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_a_closed_stream_ends_no_command(closed: str) -> None:
    """As of cron jobs and daemons."""
    ran = subprocess.run(
        ["bash", "-c", f'"$0" -m lopa_dist explain decode.drafts {closed}', sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0
    assert ("decode.drafts" in ran.stdout) == (closed == "2>&-")


def test_samples_are_limited_before_any_line_is_read() -> None:
    with pytest.raises(ValueError, match=r"task\.samples=129: at most 128 answers per prompt"):
        TaskConfig(name="batch", input="nothing.jsonl", samples=129)


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_run_folder_elsewhere_is_refused(key: str) -> None:
    """Hydra would make a folder called s3: here."""
    with pytest.raises(UserError, match=rf"{re.escape(key)}=s3://b/c: a run folder is on a disk"):
        cli.checked([f"{key}=s3://b/c"])
