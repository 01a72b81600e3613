"""The state of decoding, and what all rules have in common. Tensors in, tensors out; no models, no ranks, no rows.

Read `state` first, then `advance`, D2F's part of a step; the others are in `lopa_dist.rules`. The letters in shapes
are explained in docs/architecture.md, "Glossary". The rest can wait: `config` and `context` have the options, `edit` is
for models that replace filled tokens, `written` for answers with probabilities.
"""

from typing import TYPE_CHECKING

from lopa_dist.imports import when_asked

if TYPE_CHECKING:
    from lopa_dist.decode.config import DecodeConfig
    from lopa_dist.decode.state import FAILED, Admitted, HostState, Records, State, Vocabulary
    from lopa_dist.decode.winner import Winner

__all__ = ["FAILED", "Admitted", "DecodeConfig", "HostState", "Records", "State", "Vocabulary", "Winner"]

# the options are read without torch, which takes seconds to import
__getattr__ = when_asked(__name__, dict.fromkeys(__all__, "state") | {"DecodeConfig": "config", "Winner": "winner"})


def __dir__() -> list[str]:
    return __all__
