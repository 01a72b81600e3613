"""The state of decoding, and what all rules have in common. Tensors in, tensors out; no models, no ranks, no rows.

Read `state` first, then `advance`, D2F's part of a step; the others are in `lopa_dist.rules`. The letters in shapes
are explained in docs/architecture.md, "Glossary". The rest can wait: `config` and `context` have the options, `edit` is
for models that replace filled tokens, `written` for answers with probabilities.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lopa_dist.decode.config import DecodeConfig
    from lopa_dist.decode.state import FAILED, Admitted, HostState, Records, State, Vocabulary
    from lopa_dist.decode.winner import Winner

__all__ = ["FAILED", "Admitted", "DecodeConfig", "HostState", "Records", "State", "Vocabulary", "Winner"]

HOMES = dict.fromkeys(__all__, "state") | {"DecodeConfig": "config", "Winner": "winner"}


def __getattr__(name: str) -> Any:
    """Return a public name, imported only now: the options are read without torch, which takes seconds to import."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
