"""Which rule decodes: the one that the `decode` config asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from lopa_dist.checks import UserError
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State
from lopa_dist.decode.winner import Winner
from lopa_dist.own_code import load
from lopa_dist.rules.causal import CAUSAL
from lopa_dist.rules.lopa import LOPA
from lopa_dist.rules.plain import PLAIN
from lopa_dist.rules.rule import WINDOWS, Rule, in_words
from lopa_dist.rules.verified import VERIFIED

RULES = (CAUSAL, VERIFIED, LOPA, PLAIN)
"""All rules; the first that serves a configuration decodes."""


def rule_for(config: DecodeConfig) -> Rule:
    """Return the rule of decoding that `config` asks for, or the user's own (`decode.rule`).

    Raises:
        ValueError: the user's own rule is not a `Rule`, or cannot decode in this context.
    """
    if config.rule is None:
        return next(rule for rule in RULES if rule.serves(config))
    rule = own_rule(config)
    if rule.rows.in_place != config.causal:
        raise ValueError(
            f"decode.rule={config.rule}: its rows are those of {'causal' if rule.rows.in_place else 'masked'} models, "
            f"but decode.context={config.context}; give the rule rows=, such as those of lopa_dist.rules.causal.CAUSAL"
        )
    return rule


def own_rule(config: DecodeConfig) -> Rule:
    """Return the rule that ``decode.rule`` names.

    Raises:
        ValueError: it does not exist, is not a `Rule`, or cannot use drafts, which `config` asks for.
    """
    text = str(config.rule)
    rule = load(text, "decode.rule")
    if not isinstance(rule, Rule):
        raise ValueError(
            f"decode.rule={text}: is a {type(rule).__name__}; make it a lopa_dist.rules.Rule, with its verify and spawn"
        )
    decided = config.context != "auto"  # by the model, which is read later
    if rule.rows is WINDOWS and config.verify == "agreement" and decided and not config.causal:
        raise ValueError(
            f"decode.rule={text}: its rows are windows alone, so nothing would verify the drafts that the settings ask "
            f"for (decode.verify=agreement, decode.drafts={config.drafts}); add decode=lopa or decode=embedded_plain, "
            "which have none, or give the rule rows="
        )
    words = partial(own_words, rule.name, text) if rule.words is in_words else rule.words
    return replace(rule, verify=checked(rule.verify, text), words=words)


def own_words(name: str, text: str, config: DecodeConfig) -> str:
    """Return a description of the user's own rule, without branches and drafts, which the rule may ignore."""
    return f"rule {name!r} of {text}, context {config.context} in blocks of {config.block_size}"


def checked(verify: Callable[[State, Records], Winner], text: str) -> Callable[[State, Records], Winner]:
    """Return `verify`, wrapped so that a winner that the rest of the step could not use raises an error with a remedy.

    Only types and shapes are checked, so nothing waits for the device.
    """

    def checking(state: State, records: Records) -> Winner:
        try:
            winner = verify(state, records)
        except UserError:
            raise
        except ValueError as error:  # else an error in the user's code would be shown without its place
            raise RuntimeError(f"decode.rule={text}: verify failed") from error
        wrong = f"decode.rule={text}: verify returned"
        if not isinstance(winner, Winner):
            raise UserError(f"{wrong} a {type(winner).__name__}: return a lopa_dist.decode.Winner")
        tokens = list(winner.position.shape)
        tensors = [
            ("branch", torch.int64, [state.slots], ".long() converts it"),
            ("position", torch.int64, tokens, ".long() converts it"),
            ("token", torch.int64, tokens, ".long() converts it"),
        ]
        if winner.probability is not None:
            tensors.append(("probability", torch.int32, tokens, ".view(torch.int32) returns the bits of fp32"))
        for name, dtype, shape, how in tensors:
            value = getattr(winner, name)
            right = list(value.shape) == shape
            if value.dtype != dtype or not right:
                found = f"a {name} of shape {list(value.shape)} and dtype {name_of(value.dtype)}"
                remedy = f"; {how}" if right else ""
                raise UserError(f"{wrong} {found}: must be {name_of(dtype)} of shape {shape}{remedy}")
        if len(tokens) != 2 or tokens[0] != state.slots:
            raise UserError(f"{wrong} a position of shape {tokens}: it must be [{state.slots}, tokens], -1 for nothing")
        if winner.accepted is not None and winner.probability is None:
            raise UserError(f"{wrong} accepted without probability: give the tokens' probabilities, too (bits of fp32)")
        if list(winner.records.packed.shape) != [len(records.packed), state.slots, records.packed.shape[-1]]:
            raise UserError(
                f"{wrong} records of shape {list(winner.records.token.shape)}: must be those of the branch that wins, "
                f"[{state.slots}, {records.packed.shape[-1]}], such as Records(records.packed[:, :, 0])"
            )
        return winner

    return checking


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name."""
    return str(dtype).removeprefix("torch.")
