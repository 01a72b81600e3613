"""Plain decoding: every step runs the anchor alone, and fills what its own predictions are sure of."""

from __future__ import annotations

from lopa_dist.rules.rule import Rule

PLAIN = Rule("plain", serves=lambda config: not config.causal and not config.branches and not config.drafts)
