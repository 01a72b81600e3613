"""The decoding knobs users choose (config group `decode`), checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

CHOICES = {
    "confidence": ("probability", "margin", "neg_entropy"),
    "lookahead": ("single", "nested"),
    "score": ("mean", "lowest_fraction", "sliding_window", "gain"),
    "force": ("block", "window", "leftmost"),
    "window_attention": ("full", "block_causal"),
    "prompt_attention": ("self", "joint"),
    "boundary": ("fresh", "stale"),
    "cache": ("block", "none"),
}


@dataclass
class DecodeConfig:
    """How the masks are filled. Defaults are LoPA's published thresholds for GSM8K on D2F-Dream, with k = 7.

    Raises:
        ValueError: a value outside its range or choices; the message names the key and what is allowed.
    """

    branches: int = 7  # k lookahead branches beside the anchor; 0 is plain D2F / confidence decoding
    block_size: int = 32  # tokens
    max_new_tokens: int = 512
    max_active_blocks: int | None = None  # 1 is block diffusion; null lets tau_add alone decide
    tau_add: float = 0.1  # share of the last block that must be filled before a block is appended
    tau_act: float = 0.95  # share of a block that must be filled before the next one is fully active
    tau_conf: float = 0.9  # a token is filled when its probability is above this
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
    prompt_attention: str = "self"
    boundary: str = "fresh"  # the row before the window: recomputed every step, or its record kept
    cache: str = "block"  # none: the whole sequence is the window, every step
    stop_at_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"decode.{key}={getattr(self, key)!r}: must be one of {', '.join(choices)}")
        at_least = {
            "branches": 0,
            "extra_fill": 0,
            "block_size": 1,
            "max_new_tokens": 1,
            "score_window": 1,
            "top_k": 0,
        }
        for key, least in at_least.items():
            if getattr(self, key) < least:
                raise ValueError(f"decode.{key}={getattr(self, key)}: must be at least {least}")
        if self.max_active_blocks is not None and self.max_active_blocks < 1:
            raise ValueError(f"decode.max_active_blocks={self.max_active_blocks}: must be at least 1, or null")
        for key in ("tau_add", "tau_act", "tau_conf", "tau_look", "alpha", "score_fraction", "top_p"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"decode.{key}={getattr(self, key)}: must be between 0 and 1")
        if self.temperature < 0:
            raise ValueError(f"decode.temperature={self.temperature}: must be 0 (greedy) or more")
        if self.top_p == 0:
            raise ValueError("decode.top_p=0: must be above 0; 1 switches it off")
        if self.window_attention == "block_causal" and self.prompt_attention == "joint":
            raise ValueError(
                "decode.prompt_attention=joint needs decode.window_attention=full: with block_causal a prompt row "
                "cannot see the first mask block"
            )

    @property
    def max_branches(self) -> int:
        """Branches of a sequence, the anchor included: k + 1."""
        return self.branches + 1

    @property
    def max_edits(self) -> int:
        """Tokens in which a branch differs from the anchor at most."""
        return max(1, self.branches) if self.lookahead == "nested" else 1
