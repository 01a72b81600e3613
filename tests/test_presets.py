"""The presets in `conf/` compose, and say what papers and models say."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lopa_dist import cli
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.families import PATTERNS
from lopa_dist.models.files import SHIPPED
from lopa_dist.tasks.registry import TASKS
from tests.test_config import composed


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


@pytest.mark.parametrize(("model", "tokens"), [("embedded", 64), ("causal", 64), ("lists", 144)])
def test_the_models_of_the_package_keep_their_answers_length_with_any_way_of_decoding(model: str, tokens: int) -> None:
    """512 tokens after a prompt would not fit into their 512 positions: every request would be refused."""
    for preset in (file.stem for file in (cli.CONF / "decode").glob("*.yaml")):
        assert composed(f"model={model}", f"decode={preset}").decode.max_new_tokens == tokens
    assert composed(f"model={model}", "decode=lopa", "decode.max_new_tokens=80").decode.max_new_tokens == 80


def paper_settings() -> list[list[str]]:
    """What docs/inputs.md says to write for S1, S2, ... of the paper."""
    page = (cli.CONF.parent / "docs" / "inputs.md").read_text()
    [thresholds] = re.findall(r"TAU takes the values (.*) in turn", page)
    rows = re.findall(r"^\| S\d+ to S\d+ \|.*\| `(.*)` \|$", page, re.MULTILINE)
    return [row.replace("TAU", tau).split() for row in rows for tau in thresholds.split(", ")]


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


def test_one_default_everywhere() -> None:
    """What `DecodeConfig()` decodes is what models bring along, and with its sizes the embedded model's preset."""
    default, model, embedded = DecodeConfig(), composed("model=dream_instruct").decode, composed().decode
    sizes = {"block_size", "max_new_tokens", "sub_block_size", "max_active_blocks"}
    for entry in fields(DecodeConfig):
        ours, theirs = getattr(default, entry.name), getattr(model, entry.name)
        assert theirs in (ours, "auto"), entry.name
        assert entry.name in sizes or getattr(embedded, entry.name) == ours, entry.name
