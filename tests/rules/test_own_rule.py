"""Rules of the user's own: they decode as ours do, and what they get wrong is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.checks import UserError
from lopa_dist.config import Config, check_files
from lopa_dist.decode import DecodeConfig
from lopa_dist.models.transformer import Transformer
from lopa_dist.rules import rule_for
from tests.engine.test_loop import BASE, random_requests, texts

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'lopa_rule.py'}:LOPA"

OWN = """
from dataclasses import replace
from lopa_dist.rules import Rule
from lopa_dist.rules.causal import CAUSAL

function = lambda state, records: None
plain = Rule("plain again")
chain = replace(CAUSAL, name="causal again")
"""

PLAIN = replace(BASE, verify="confidence", drafts=0, branches=0)


def with_rule(folder: Path, code: str, rule: str = "Rule('own', verify)", **options: Any) -> DecodeConfig:
    """Plain decoding with a rule of one's own, whose functions `code` defines."""
    imports = "import torch\nfrom lopa_dist.decode.winner import anchor_alone\nfrom lopa_dist.rules import Rule\n"
    (folder / "own.py").write_text(f"{imports}{code}RULE = {rule}\n")
    return replace(PLAIN, rule=f"{folder}/own.py:RULE", **options)


def verify(code: str) -> str:
    """A function `verify` that ends with `code`, after the anchor has won."""
    return f"def verify(state, records):\n    winner = anchor_alone(state, records)\n{code}"


@pytest.mark.parametrize("branches", [1, 3])
def test_lopa_as_a_rule_of_one_s_own(small_model: Transformer, branches: int) -> None:
    """It decodes as the built-in rule does."""
    lopa = replace(BASE, verify="confidence", drafts=0, branches=branches)
    requests = random_requests(3, 5, BASE.max_new_tokens)
    own = replace(lopa, rule=EXAMPLE)
    assert rule_for(own).name == "my own LoPA"
    assert texts(small_model, own, requests) == texts(small_model, lopa, requests)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", {}, r"nothing would verify the drafts .* decode\.drafts=10\); add decode=lopa or"),
        ("function", {}, r"decode\.rule=.*:function: is a function; make it a lopa_dist\.rules\.Rule"),
        ("nothing", {}, r"decode\.rule=.*: there is no 'nothing' in .*own\.py"),
        ("plain", {"context": "d2f", "drafts": 4}, r"nothing would verify the drafts"),
        ("plain", {"context": "causal"}, r"its rows are those of masked models, but decode\.context=causal"),
        ("chain", {"context": "d2f"}, r"its rows are those of causal models, but decode\.context=d2f"),
    ],
)
def test_what_cannot_decode_is_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ValueError, match=message):
        rule_for(DecodeConfig(rule=f"{tmp_path}/own.py:{name}", **options))
    if not options:  # before anything is read
        with pytest.raises(ValueError, match=message):
            check_files(Config(decode=replace(Config().decode, rule=f"{tmp_path}/own.py:{name}")))


def test_a_context_that_the_model_decides_is_not_asked_yet(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    asked = replace(Config().decode, rule=f"{tmp_path}/own.py:plain", context="auto")
    check_files(Config(decode=asked))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tuple(winner)", r"own\.py:RULE: verify returned a tuple: return a lopa_dist\.decode\.Winner"),
        ("winner._replace(token=winner.token.int())", r"a token of shape \[4, 1\] and dtype int32: must be int64"),
        ("winner._replace(position=winner.position[:, 0], token=winner.token[:, 0])", r"position of shape \[4\]: it"),
        ("winner._replace(accepted=winner.branch)", "accepted without probability"),
        (
            "winner._replace(accepted=winner.position)",
            r"an accepted of shape \[4, 1\] and dtype int64: must be int64 of",
        ),
        ("winner._replace(position=None)", "a position that is a NoneType: must be a tensor of int64"),
        ("winner._replace(branch=winner.branch + 1)", "a branch that is not from 0 to 0"),
        ("winner._replace(position=state.end[:, None].clone())", r"position \d+, which is not in the window"),
        (
            "winner._replace(position=state.complete[:, None].clone(), token=winner.token * 0 + 10**6)",
            r"token 1000000, which the model of \d+ tokens lacks",
        ),
        ("winner._replace(accepted=winner.branch, probability=winner.position.float())", "float32: must be int32"),
        ("winner._replace(records=records)", r"records of shape .*: must be those of the branch that wins"),
    ],
)
def test_a_winner_that_cannot_be_read_is_told(
    small_model: Transformer, tmp_path: Path, change: str, message: str
) -> None:
    config = with_rule(tmp_path, verify(f"    return {change}\n"))
    assert rule_for(config).words(config).startswith("rule 'own' of ")
    with pytest.raises(UserError, match=message):
        texts(small_model, config, random_requests(2, 5, BASE.max_new_tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("state.branches.zero_()", r"own\.py:RULE: after spawn, state\.branches must be from 1 \(the anchor\) to 2"),
        (
            "state.edits[0, :, 1] = 10**6",
            r"after spawn, state\.edits have position 1000000, which is not in the window",
        ),
        (
            "state.edits[0, :, 1, 0], state.edits[1, :, 1] = state.complete, -3",
            r"after spawn, state\.edits have token -3",
        ),
    ],
)
def test_branches_that_cannot_run_are_told(small_model: Transformer, tmp_path: Path, change: str, message: str) -> None:
    spawn = f"def spawn(state, winner, window):\n    state.branches.copy_(2 * (state.done == 0))\n    {change}\n"
    config = with_rule(tmp_path, spawn, "Rule('own', anchor_alone, spawn)", branches=1)
    with pytest.raises(UserError, match=message):
        texts(small_model, config, random_requests(2, 5, BASE.max_new_tokens))


def test_a_winner_may_bring_no_tokens(small_model: Transformer, tmp_path: Path) -> None:
    nothing = verify("    return winner._replace(position=winner.position[:, :0], token=winner.token[:, :0])\n")
    requests = random_requests(2, 5, BASE.max_new_tokens)
    assert texts(small_model, with_rule(tmp_path, nothing), requests) == texts(small_model, PLAIN, requests)


def test_a_rule_that_never_fills_ends(small_model: Transformer, tmp_path: Path) -> None:
    """It brings a token that stands there already, and so keeps the step from filling another one."""
    again = verify(
        "    none, position = torch.zeros(state.slots, dtype=torch.long), state.complete[:, None] + 1\n"
        "    token = torch.full_like(position, 7)\n"
        "    return winner._replace(position=position, token=token, accepted=none, probability=token.int())\n"
    )
    config = with_rule(tmp_path, again, tau_conf=1.0)
    with pytest.raises(UserError, match=r"an answer of at most \d+ tokens does not end: it has taken \d+ forwards"):
        texts(small_model, config, random_requests(2, 5, BASE.max_new_tokens))


def test_a_rule_that_writes_into_what_it_is_given_changes_nothing_else(
    small_model: Transformer, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def plain(probability, confidence, masked):\n    return masked & (probability > 0.2)\n"
        "def in_place(probability, confidence, masked):\n"
        "    masked &= probability > 0.2\n"
        "    confidence.fill_(0)\n    probability.fill_(0)\n"
        "    return masked\n"
    )
    requests = random_requests(2, 5, BASE.max_new_tokens)
    one, other = (
        texts(small_model, replace(BASE, verify="confidence", drafts=0, fill=f"{tmp_path}/own.py:{name}"), requests)
        for name in ("plain", "in_place")
    )
    assert one == other
