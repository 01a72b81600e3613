"""The decoding knobs users choose (config group `decode`), checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lopa_dist.checks import require

CHOICES = {
    "verify": ("confidence", "agreement", "plain_subset", "plain_exact"),
    "fill": ("threshold", "factor", "frechet"),
    "confidence": ("probability", "margin", "neg_entropy"),
    "lookahead": ("single", "nested"),
    "score": ("mean", "lowest_fraction", "sliding_window", "gain"),
    "force": ("block", "window", "leftmost"),
    "window_attention": ("full", "block_causal"),
    "prompt_attention": ("self", "joint", "blocks"),
    "boundary": ("fresh", "stale", "fill"),
    "cache": ("block", "none", "prefix", "dual"),
    "canvas": ("growing", "whole"),
}


@dataclass
class DecodeConfig:
    """How the masks are filled. Defaults are LoPA's published thresholds for GSM8K on D2F-Dream, with k = 7.

    `cache` says whose K/V a step takes from an earlier one. "Before" and "behind" are as seen from the window, which
    begins at the first block that has masks and ends with the last one that may be filled:

    - none: nobody's; the whole sequence goes through the model in every step.
    - block: those of everything before, each kept for good from the forward after its block was complete (D2F).
    - prefix: the same, but that forward computes the prompt and all blocks anew (Fast-dLLM's prefix cache: everything
      before a block is cached in the block's first forward, which sees the whole sequence).
    - dual: and keeps those of the masks behind, too, until the next such forward (Fast-dLLM's dual cache). It needs
      `canvas` whole; without it nothing is behind.

    `boundary` is for models with the logit shift, whose first window position is predicted by the row before it, which
    is cached: that row is computed anew in every step (fresh), its record is kept from the forward that filled the
    cache (stale), or that forward fills this one position and no other (fill: Fast-dLLM on Dream, and its v2).

    `verify` says which branch wins, and so which lookahead tokens stay:

    - confidence: the branch whose remaining positions the model is surest of (LoPA as published).
    - agreement: the most confident masked positions are drafts, in that order. Branch b has the first ``b * drafts`` of
      them filled and verifies the next ones: a draft is accepted if the model, in the context of all drafts before it,
      predicts the draft's own token. The longest accepted prefix stays, and so does what the model predicts instead of
      the first draft that was not accepted. Only what `fill` adds to it is unverified.
    - plain_subset, plain_exact: of nested branches, those that steps of plain decoding would have made; a part of what
      such a step fills, or all of it (FreeDave, arXiv 2510.00294).

    `fill` says how many tokens are filled without verification, the most probable ones first:

    - threshold: all with a probability above `tau_conf`.
    - factor: n, while ``(n + 1) (1 - p_n) < fill_level`` for the n-th probability (Fast-dLLM, arXiv 2505.22618).
    - frechet: n, the most for which the least probability that all n are right, ``max(0, p_1 + ... + p_n - n + 1)``,
      exceeds ``1 - p_n`` by more than `fill_level` (arXiv 2606.02955).

    Raises:
        ValueError: a value outside its range or choices; the message names the key and what is allowed.
    """

    branches: int = 7  # k lookahead branches beside the anchor; 0 is plain D2F / confidence decoding
    verify: str = "confidence"  # which branch wins (see above)
    drafts: int = 0  # m draft tokens that each branch verifies, with verify=agreement
    block_size: int = 32  # tokens
    max_new_tokens: int = 512
    max_active_blocks: int | None = None  # 1 is block diffusion; null lets tau_add alone decide
    tau_add: float = 0.1  # share of the last block that must be filled before a block is appended
    tau_act: float = 0.95  # share of a block that must be filled before the next one is fully active
    tau_conf: float = 0.9  # a token is filled when its probability is above this
    fill: str = "threshold"  # how many tokens are filled unverified (see above)
    fill_level: float = 0.25  # of factor and frechet
    confidence: str = "neg_entropy"  # ranks positions and scores branches; the fill threshold is probability
    lookahead: str = "single"  # branch j fills the j-th best remaining position, or (nested) the j best
    tau_look: float = 0.0  # least probability of a lookahead token
    alpha: float = 0.0  # weight of the lookahead token's own confidence in the branch score
    score: str = "mean"  # of the confidences of the positions that a branch leaves masked
    score_fraction: float = 0.5  # lowest_fraction: share of the lowest confidences that count
    score_window: int = 8  # sliding_window: positions in a run; the weakest run counts
    force: str = "block"  # what is filled when nothing passes the threshold
    extra_fill: int = 0  # most confident positions filled besides, each step, without verification
    window_attention: str = "full"
    prompt_attention: str = "self"  # blocks: block-causal from its first token on; its tail begins the first block
    boundary: str = "fresh"  # the row before the window: recomputed every step, its record kept, or filled at once
    cache: str = "block"  # see above
    canvas: str = "growing"  # whole: the masks of all blocks are seen from the start, filled or not
    sub_block_size: int | None = None  # within a block, fill only the first part of so many tokens that has masks
    stop_at_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            require(f"decode.{key}", getattr(self, key), choices)
        at_least = {
            "branches": 0,
            "drafts": 0,
            "extra_fill": 0,
            "block_size": 1,
            "max_new_tokens": 1,
            "score_window": 1,
            "top_k": 0,
        }
        if self.sub_block_size is not None:
            at_least["sub_block_size"] = 1
        for key, least in at_least.items():
            if getattr(self, key) < least:
                raise ValueError(f"decode.{key}={getattr(self, key)}: must be at least {least}")
        if self.max_active_blocks is not None and self.max_active_blocks < 1:
            raise ValueError(f"decode.max_active_blocks={self.max_active_blocks}: must be at least 1, or null")
        for key in ("tau_add", "tau_act", "tau_conf", "tau_look", "alpha", "score_fraction", "top_p"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"decode.{key}={getattr(self, key)}: must be between 0 and 1")
        if not 0 <= self.fill_level < math.inf:
            raise ValueError(f"decode.fill_level={self.fill_level}: must be 0 or a number above it")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"decode.temperature={self.temperature}: must be 0 (greedy) or a number above it")
        if self.top_p == 0:
            raise ValueError("decode.top_p=0: must be above 0; 1 switches it off")
        if self.window_attention == "block_causal" and self.prompt_attention == "joint":
            raise ValueError(
                "decode.prompt_attention=joint needs decode.window_attention=full: with block_causal a prompt row "
                "cannot see the first mask block"
            )
        self._check_verification()
        self._check_cache_and_canvas()
        if self.sub_block_size is not None and self.block_size % self.sub_block_size:
            raise ValueError(
                f"decode.sub_block_size={self.sub_block_size}: must divide decode.block_size={self.block_size}, "
                "or be null"
            )

    def _check_verification(self) -> None:
        if self.verify != "agreement" and self.drafts:
            raise ValueError(
                f"decode.drafts={self.drafts} needs decode.verify=agreement: {self.verify} chooses among whole branches"
            )
        if self.verify.startswith("plain") and self.lookahead != "nested":
            raise ValueError(
                f"decode.verify={self.verify} needs decode.lookahead=nested: each branch continues another"
            )
        if self.verify == "agreement":
            if not self.drafts:
                raise ValueError(
                    "decode.verify=agreement needs decode.drafts of 1 or more: how many tokens each branch verifies"
                )
            if self.extra_fill:
                raise ValueError(
                    f"decode.extra_fill={self.extra_fill} cannot go with decode.verify=agreement: it fills tokens that "
                    "nothing verifies"
                )

    def _check_cache_and_canvas(self) -> None:
        if self.window_attention == "block_causal":
            if self.cache in ("prefix", "dual"):
                raise ValueError(
                    f"decode.cache={self.cache} needs decode.window_attention=full: with block_causal, finished blocks "
                    "never change and decode.cache=block is exact"
                )
            if self.canvas == "whole":
                raise ValueError(
                    "decode.canvas=whole needs decode.window_attention=full: with block_causal no row sees the masks "
                    "behind its block"
                )
        if self.cache == "dual" and self.canvas != "whole":
            raise ValueError(
                "decode.cache=dual needs decode.canvas=whole: on a growing canvas nothing is behind the window; "
                "use decode.cache=prefix"
            )

    @property
    def max_branches(self) -> int:
        """Branches of a sequence, the anchor included: k + 1."""
        return self.branches + 1

    @property
    def max_chain(self) -> int:
        """Drafts of a sequence at most, of all its branches: (k + 1) * m."""
        return self.max_branches * self.drafts

    @property
    def extra_drafts(self) -> int:
        """Drafts of a branch that need rows of their own at most: all but the first, two rows each."""
        return max(0, self.drafts - 1)

    @property
    def max_edits(self) -> int:
        """Tokens in which a branch differs from the anchor at most."""
        if self.verify == "agreement":
            return max(1, self.branches * self.drafts)
        return max(1, self.branches) if self.lookahead == "nested" else 1
