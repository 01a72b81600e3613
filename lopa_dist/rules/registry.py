"""Which rule decodes: the one that the `decode` config asks for."""

from __future__ import annotations

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.rules.causal import CAUSAL
from lopa_dist.rules.lopa import LOPA
from lopa_dist.rules.own_rule import own_rule
from lopa_dist.rules.plain import PLAIN
from lopa_dist.rules.rule import Rule
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
