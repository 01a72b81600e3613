"""Rules of decoding: which tokens a step verifies and which branches it runs next, a file each.

Read `rule` first (what a rule is), then `plain` and `lopa`; `verified` is the default, and `causal` the one whose text
no lookahead changes. `candidates` and `paths` serve several rules. To add one, see CONTRIBUTING.md.
"""

from lopa_dist.rules.registry import rule_for
from lopa_dist.rules.rule import Rule

__all__ = ["Rule", "rule_for"]
