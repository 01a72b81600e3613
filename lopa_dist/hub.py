"""A check before a job begins: whether the Hugging Face hub has a model or a data set."""

from __future__ import annotations

import os
from typing import Literal

from lopa_dist.checks import in_a_line

TIMEOUT_S = 10.0  # for the hub to answer
OFFLINE = {"model": ("HF_HUB_OFFLINE",), "data set": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}


def why_not_on_hub(kind: Literal["model", "data set"], name: str, remedy: str) -> str:
    """Return why `name`, which is not in the cache, cannot be downloaded, and `remedy`; empty if it can.

    Nothing is downloaded: the hub is only asked whether it has `name`.
    """
    missing = f"the {kind} {name} is not in the cache"
    if setting := next((s for s in OFFLINE[kind] if os.environ.get(s, "").upper() in ("1", "ON", "YES", "TRUE")), ""):
        return f"{missing}, and {setting} is set; {remedy}"
    try:
        from huggingface_hub import HfApi

        hub = HfApi()
        (hub.model_info if kind == "model" else hub.dataset_info)(name, timeout=TIMEOUT_S)
    except Exception as error:  # networks, names, rights: whatever the library raises
        return f"{missing} and cannot be had from the hub ({in_a_line(error)}); {remedy}"
    return ""
