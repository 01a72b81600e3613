"""The two forms of a primitive, whatever this machine would choose: what is compared with what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch


def plain(primitive: Callable[..., Any], *arguments: Any) -> Any:
    """What torch's operators give: the oracle, also on a GPU."""
    with patch.object(sys.modules[primitive.__module__], "fused", lambda *_: False):
        return primitive(*arguments)


def by_triton(primitive: Callable[..., Any], *arguments: Any) -> Any:
    """What the kernel gives, also without a GPU, where it is interpreted."""
    with patch.object(sys.modules[primitive.__module__], "fused", lambda *_: True):
        return primitive(*arguments)
