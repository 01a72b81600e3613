"""The decoding knobs users choose (config group `decode`), checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lopa_dist.checks import Reader, check_options, number, option, require_count
from lopa_dist.decode.context import CONTEXTS, Context

IntOrAuto: TypeAlias = Any  # not `int | str`: every use of the number would first have to rule out text

MOST_DRAFTS = 16  # the most drafts of a causal model's chain, with drafts=auto
FILLING = Reader(lambda config: not config.causal, "models that fill masks")
LOOKING = Reader(lambda config: not config.causal and (config.branches or config.drafts), "lookahead in masked models")
DRAFTING = Reader(lambda config: config.causal and config.drafts, "causal models with decode.drafts above 0")
LOOKAHEAD = frozenset({"branches", "drafts", "draft_from"})  # the settings of lookahead on causal models


def record_size(second_choices: bool) -> int:
    """Return how many numbers a record has: 3, or 5 with `second_choices`.

    These are the token, its probability and its confidence, then the second choice's token and probability. A second
    choice is the token that would be chosen if the first were excluded.
    """
    return 5 if second_choices else 3


def text_settings(decode: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings of a `DecodeConfig`, given as a dict, that texts depend on.

    On causal models, texts depend on no setting of lookahead, unless a rule of the user's own decides what stays.
    """
    scope = CONTEXTS.get(decode.get("context", ""))
    idle = LOOKAHEAD if scope and scope.causal and not decode.get("rule") else {"draft_from"}
    return {key: value for key, value in decode.items() if key not in idle}


@dataclass
class DecodeConfig:
    """How masks are filled. The defaults are verified lookahead; published ways of decoding are presets.

    `context` says what rows see and what is cached, as a row of the table in `decode/context.py`:

    - d2f: full windows of one or more blocks, after a prompt and complete blocks that are cached for good.
    - lopa_released: d2f as in LoPA's released program. The prompt sees the first block, and the cached row before
      the window predicts the window's first position once and for all.
    - d2f_causal: d2f, but a row of the window sees nothing after its own block.
    - blocks: block diffusion, in blocks counted from the prompt's first token (SDAR, Fast-dLLM v2).
    - vanilla: every row sees all others, and nothing is cached (Dream, LLaDA).
    - dual: the same, with Fast-dLLM's dual cache: K/V outside the window come from the forward after the last block
      was completed.
    - causal: a row sees nothing after itself, so verification is exact (I-DLM).

    `verify` says which branch wins, and so which lookahead tokens stay:

    - confidence: the branch in which the model is surest of the remaining positions (LoPA, as its paper describes it).
    - agreement: the most confident masked positions are drafts, in that order, and the anchor verifies the first
      `drafts` of them: a draft is accepted if the model, in the context of all drafts before it, predicts the same
      token. If one fails, the model's own token takes its place. A lookahead branch holds second choices of drafts
      and verifies the drafts after them (`rules.verified`). Only the tokens that `tau_conf` fills are unverified.

    Raises:
        ValueError: a value outside its range or choices; the message names the key and what is allowed.
    """

    branches: int = option(0, "lookahead branches beside the anchor, k in the paper; 0: only the anchor", least=0)
    verify: str = option(
        "agreement",
        "which branch wins, and so which lookahead tokens stay",
        ("confidence", "agreement"),
        reader=FILLING,
    )
    drafts: IntOrAuto = option(  # noqa: RUF009
        10,
        "draft tokens that each branch verifies, 0 with verify=confidence; for causal models auto picks the fastest "
        "number",
    )
    draft_from: str = option(
        "auto",
        "where causal models' drafts come from: masks, the text that the job has written, or (auto) both",
        ("auto", "masks", "text"),
        reader=DRAFTING,
    )
    block_size: int = option(32, "tokens per block", least=1, reader=FILLING)
    max_new_tokens: int = option(
        512,
        "maximum number of tokens per answer; a masked model sees as many masks, so its texts depend on it",
        least=1,
    )
    max_active_blocks: int | None = option(
        None,
        "maximum number of blocks filled at the same time; 1 is block diffusion, null lets only tau_add decide",
        least=1,
        reader=FILLING,
    )
    tau_add: float = option(
        0.1, "share of the last block that must be filled before a block is appended", reader=FILLING
    )
    tau_act: float = option(
        0.95, "share of a block that must be filled before the next one is fully active", reader=FILLING
    )
    tau_conf: float = option(
        0.9,
        "a token is filled, without verification, when its probability is above this; a fully active block without "
        "such a token has its best position filled",
        reader=FILLING,
    )
    tau_entropy: float | None = option(
        None,
        "instead of tau_conf: a token is filled if its entropy, in nats, is at most this; null: tau_conf decides",
        reader=FILLING,
    )
    tau_edit: float | None = option(
        None,
        "models that edit (LLaDA2.1): a filled token is replaced if another token's probability is above this; null: "
        "never",
        reader=FILLING,
    )
    fill: str | None = option(
        None,
        "your own rule instead of tau_conf, as FILE.py:FUNCTION (docs/inputs.md#a-rule-of-your-own)",
        reader=FILLING,
    )
    rule: str | None = option(
        None, "your own decoding rule, as FILE.py:RULE or MODULE:RULE (docs/inputs.md#a-rule-of-your-own)"
    )
    confidence: str = option(
        "neg_entropy",
        "what ranks positions and scores branches",
        ("probability", "margin", "neg_entropy"),
        reader=FILLING,
    )
    tau_look: float = option(0.0, "lowest allowed probability of a lookahead token", reader=LOOKING)
    extra_fill: int = option(
        0,
        "how many more of the most confident positions each step fills, without verification",
        least=0,
        reader=FILLING,
    )
    context: str = option("d2f", "what rows see, and what is cached", tuple(CONTEXTS))
    sub_block_size: int | None = option(
        None,
        "size in tokens of a block's parts: only the first part with masks is filled; null: the whole block",
        least=1,
        reader=FILLING,
    )
    stop_at_eos: bool = option(True, "end a sequence at its first end-of-text token; false fills the whole answer")
    temperature: float = option(0.0, "sampling temperature; 0 takes the most probable token")
    top_p: float = option(
        1.0, "with temperature > 0, sample among the most probable tokens that together have this probability; 1: all"
    )
    top_k: int = option(
        0,
        "with temperature > 0, sample among the k most probable tokens; 0: all. With top_p, the k come first",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options("decode", self)
        self.drafts = number(self.drafts)
        if self.drafts == "auto" and not self.causal:
            raise ValueError(
                "decode.drafts=auto: is for causal models, whose texts do not depend on the number of drafts; write a "
                "number, such as 10"
            )
        require_count("decode.drafts", self.drafts, 0, auto=self.causal)
        for key in ("tau_add", "tau_act", "tau_conf", "tau_edit", "tau_look", "top_p"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                or_null = ", or null" if key == "tau_edit" else ""
                raise ValueError(f"decode.{key}={value}: must be between 0 and 1{or_null}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"decode.temperature={self.temperature}: must be 0 (greedy) or a number above it")
        if self.top_p == 0:
            raise ValueError("decode.top_p=0: must be above 0; 1 switches it off")
        if self.fill is not None and ":" not in self.fill:
            raise ValueError(f"decode.fill={self.fill}: write FILE.py:FUNCTION, or leave it out")
        if self.rule is not None and ":" not in self.rule:
            raise ValueError(f"decode.rule={self.rule}: write FILE.py:RULE, or leave it out")
        if self.tau_entropy is not None:
            self._check_entropy(self.tau_entropy)
        self._check_verification()
        if self.sub_block_size is not None and self.block_size % self.sub_block_size:
            raise ValueError(
                f"decode.sub_block_size={self.sub_block_size}: must divide decode.block_size={self.block_size}, "
                "or be null"
            )

    def _check_entropy(self, most: float) -> None:
        if not 0 <= most < math.inf:
            raise ValueError(f"decode.tau_entropy={most}: must be a number of nats, 0 or more, or null")
        if self.fill is not None:
            raise ValueError(
                f"decode.tau_entropy={most}: decode.fill={self.fill} decides which tokens are filled; leave "
                "tau_entropy at null"
            )
        if self.confidence != "neg_entropy":
            raise ValueError(
                f"decode.tau_entropy={most} with decode.confidence={self.confidence}: needs "
                "decode.confidence=neg_entropy, which must also rank positions"
            )

    def _check_verification(self) -> None:
        if not self.verifies:
            if self.drafts:
                raise ValueError(
                    f"decode.drafts={self.drafts} needs decode.verify=agreement: {self.verify} chooses among whole "
                    "branches; set decode.drafts=0"
                )
            return
        who = "a causal model" if self.causal else "decode.verify=agreement"
        if self.branches and not self.drafts:
            raise ValueError(
                f"decode.branches={self.branches} with {who} needs decode.drafts of 1 or more, which its branches "
                "verify; decode.branches=0 decode.drafts=0 turns lookahead off"
            )
        if self.extra_fill:
            raise ValueError(
                f"decode.extra_fill={self.extra_fill} is not possible with {who}: it fills tokens that nothing verifies"
            )

    @property
    def scope(self) -> Context:
        """What rows see, and what is cached."""
        return CONTEXTS[self.context]

    @property
    def causal(self) -> bool:
        """See `Context`."""
        return self.scope.causal

    @property
    def verifies(self) -> bool:
        """Whether lookahead tokens are verified as drafts before they stay."""
        return self.causal or self.verify == "agreement"

    @property
    def max_branches(self) -> int:
        """The most branches of a sequence, the anchor included: k + 1."""
        return self.branches + 1

    @property
    def own_parts(self) -> dict[str, str]:
        """The settings that name code of the user's own."""
        parts = {"decode.fill": self.fill, "decode.rule": self.rule}
        return {key: value for key, value in parts.items() if value is not None}

    @property
    def max_drafts(self) -> int:
        """The most drafts that a branch verifies: m."""
        return MOST_DRAFTS if isinstance(self.drafts, str) else self.drafts

    @property
    def drafts_text(self) -> bool:
        """Whether causal models draft from text."""
        return self.causal and self.max_drafts > 0 and self.draft_from != "masks"

    @property
    def drafts_masks(self) -> bool:
        """Whether what masks predict may be drafted, if the model has masks."""
        return self.draft_from != "text"

    @property
    def second_choices(self) -> bool:
        """Whether branches hold second choices of drafts (`rules.paths`), so that records need them."""
        return self.verifies and self.branches > 0

    @property
    def record_size(self) -> int:
        """How many numbers a record has (`Records`)."""
        return record_size(self.second_choices)

    @property
    def max_edits(self) -> int:
        """The most tokens in which a branch differs from the anchor: 1, or with a tree of drafts its longest path."""
        return max(self.max_drafts, self.branches) if self.second_choices and not self.causal else 1
