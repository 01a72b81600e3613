"""Which rule decodes: the one that the keys of `decode` ask for."""

from __future__ import annotations

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.own_code import load
from lopa_dist.rules.causal import CAUSAL
from lopa_dist.rules.lopa import LOPA
from lopa_dist.rules.plain import PLAIN
from lopa_dist.rules.rule import Rule
from lopa_dist.rules.verified import VERIFIED

RULES = (CAUSAL, VERIFIED, LOPA, PLAIN)
"""All rules; the first that serves a configuration decodes."""


def rule_for(config: DecodeConfig) -> Rule:
    """Return the rule of decoding that `config` asks for, or the user's own (`decode.rule`).

    Raises:
        ValueError: the user's own rule is none, or cannot decode in this context.
    """
    if config.rule is None:
        return next(rule for rule in RULES if rule.serves(config))
    rule = own_rule(config.rule)
    if rule.rows.in_place != config.causal:
        raise ValueError(
            f"decode.rule={config.rule}: its rows are those of {'causal' if rule.rows.in_place else 'masked'} models, "
            f"but decode.context={config.context}; give the rule rows=, such as those of lopa_dist.rules.causal.CAUSAL"
        )
    return rule


def own_rule(text: str) -> Rule:
    """Return the rule that ``decode.rule`` names.

    Raises:
        ValueError: there is no such thing, or it is not a `Rule`.
    """
    rule = load(text, "decode.rule")
    if not isinstance(rule, Rule):
        raise ValueError(
            f"decode.rule={text}: is a {type(rule).__name__}; make it a lopa_dist.rules.Rule, with its verify and spawn"
        )
    return rule
