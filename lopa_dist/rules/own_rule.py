"""A rule of the user's own (`decode.rule`), and the checks of what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lopa_dist.checks import UserError
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, Window
from lopa_dist.decode.winner import Winner
from lopa_dist.own_code import load
from lopa_dist.rules.rule import WINDOWS, Rule, in_words

Verify = Callable[[State, Records], Winner]
Spawn = Callable[[State, Winner, Window | None], None]


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
    verify, spawn = checked_verify(rule.verify, text), rule.spawn
    if not rule.rows.in_place:
        verify, spawn = checked_tokens(verify, text), checked_spawn(spawn, text)
    return replace(rule, verify=verify, spawn=spawn, words=words)


def own_words(name: str, text: str, config: DecodeConfig) -> str:
    """Return a description of the user's own rule, without branches and drafts, which the rule may ignore."""
    return f"rule {name!r} of {text}, context {config.context} in blocks of {config.block_size}"


def checked_verify(verify: Verify, text: str) -> Verify:
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
        tokens = list(getattr(winner.position, "shape", ()))
        tensors = [
            ("branch", torch.int64, [state.slots], ".long() converts it"),
            ("position", torch.int64, tokens, ".long() converts it"),
            ("token", torch.int64, tokens, ".long() converts it"),
        ]
        if winner.accepted is not None:
            tensors.append(("accepted", torch.int64, [state.slots], ".long() converts it"))
        if winner.probability is not None:
            tensors.append(("probability", torch.int32, tokens, ".view(torch.int32) returns the bits of fp32"))
        for name, dtype, shape, how in tensors:
            value = getattr(winner, name)
            if not isinstance(value, Tensor):
                raise UserError(
                    f"{wrong} a {name} that is a {type(value).__name__}: must be a tensor of {name_of(dtype)}"
                )
            right = list(value.shape) == shape
            if value.dtype != dtype or not right:
                article = "an" if name[0] == "a" else "a"
                found = f"{article} {name} of shape {list(value.shape)} and dtype {name_of(value.dtype)}"
                remedy = f"; {how}" if right else ""
                raise UserError(f"{wrong} {found}: must be {name_of(dtype)} of shape {shape}{remedy}")
        if len(tokens) != 2 or tokens[0] != state.slots:
            raise UserError(f"{wrong} a position of shape {tokens}: it must be [{state.slots}, tokens], -1 for nothing")
        if winner.accepted is not None and winner.probability is None:
            raise UserError(f"{wrong} accepted without probability: give the tokens' probabilities, too (bits of fp32)")
        of_winner = [len(records.packed), state.slots, records.packed.shape[-1]]
        is_records = isinstance(winner.records, Records)
        if not is_records or list(winner.records.packed.shape) != of_winner:
            which = f"of shape {list(winner.records.token.shape)}" if is_records else "that are no Records"
            raise UserError(
                f"{wrong} records {which}: must be those of the branch that wins, {of_winner[1:]}, such as "
                "Records(records.packed[:, :, 0])"
            )
        return winner

    return checking


def checked_tokens(verify: Verify, text: str) -> Verify:
    """Return `verify`, wrapped so that sequences that have ended get no tokens.

    On a CPU, where that waits for nothing, tokens and positions that do not exist raise an error.
    """

    def checking(state: State, records: Records) -> Winner:
        winner, running = verify(state, records), state.done == 0
        winner = winner._replace(position=torch.where(running[:, None], winner.position, -1))
        if winner.position.device.type == "cpu":
            reason = wrong_tokens(state, winner.position[running], winner.token[running], running)
            if not reason and bool(((winner.branch < 0) | (winner.branch >= state.config.max_branches))[running].any()):
                reason = f"a branch that is not from 0 to {state.config.max_branches - 1}"
            if reason:
                raise UserError(f"decode.rule={text}: verify returned {reason}")
        return winner

    return checking


def checked_spawn(spawn: Spawn, text: str) -> Spawn:
    """Return `spawn`, wrapped so that branches that cannot run raise an error, which is looked for on a CPU only."""

    def checking(state: State, winner: Winner, window: Window | None) -> None:
        try:
            spawn(state, winner, window)
        except ValueError as error:  # as above
            raise RuntimeError(f"decode.rule={text}: spawn failed") from error
        if state.branches.device.type != "cpu":
            return
        running, most = state.done == 0, state.config.max_branches
        branches = state.branches[running]
        reason = ""
        if bool(((branches < 1) | (branches > most)).any()):
            reason = f"state.branches must be from 1 (the anchor) to {most} in sequences that run"
        else:
            position, token = state.edits[:, running]
            runs = torch.arange(most) < branches[:, None]
            position = torch.where(runs[..., None], position, -1).flatten(1)
            wrong = wrong_tokens(state, position, token.flatten(1), running)
            reason = f"state.edits have {wrong}" if wrong else ""
        if reason:
            raise UserError(f"decode.rule={text}: after spawn, {reason}")

    return checking


def wrong_tokens(state: State, position: Tensor, token: Tensor, running: Tensor) -> str:
    """Return in words which positions or tokens cannot be written; empty if all can.

    Args:
        state: says where each sequence's window begins and ends.
        position: ``[R, F]`` of sequences that run; -1 for nothing.
        token: ``[R, F]``.
        running: ``[S]`` bool, which sequences run.
    """
    begin, end = state.complete[running][:, None], state.end[running][:, None]
    outside = (position >= 0) & ((position < begin) | (position >= end)) | (position < -1)
    if bool(outside.any()):
        return (
            f"position {int(position[outside][0])}, which is not in the window (from state.complete up to state.end; "
            "-1 for nothing)"
        )
    size, none = state.vocabulary.size, position < 0
    unknown = ~none & ((token < 0) | (token >= (size or 1 << 62)))
    return f"token {int(token[unknown][0])}, which the model of {size} tokens lacks" if bool(unknown.any()) else ""


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name."""
    return str(dtype).removeprefix("torch.")
