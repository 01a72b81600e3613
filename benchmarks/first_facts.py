"""What a stage of `gpu_first` consists of: facts, each found by a function and printed as a line of JSON at once.

A fact that fails is a line with the whole traceback, and the next one is tried. A stage that hangs prints where
when it is asked to (SIGQUIT); one that dies in C code prints where, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

LONGEST = 6000  # characters of a traceback, from its end

Fact = tuple[str, Callable[[], dict[str, Any]]]  # a name, and what finds it; "ok" says whether it is as it should be
StageOf = Callable[[torch.device], Iterator[Fact]]


def say(**line: Any) -> None:
    """Print a line of JSON now."""
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


def find(name: str, function: Callable[[], dict[str, Any]]) -> None:
    """Find a fact and say it, or what went wrong."""
    say(begun=name)
    began = time.perf_counter()
    try:
        found = {"ok": True} | function()
    except Exception as error:
        found = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-LONGEST:]}
    say(fact=name, seconds=round(time.perf_counter() - began, 3), **found)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def main(stages: Mapping[str, StageOf], arguments: list[str] | None = None) -> None:
    """Run one of the stages, as a child of `gpu_first`."""
    parser = argparse.ArgumentParser(description="Find the facts of one stage.")
    parser.add_argument("stage", choices=list(stages))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    device = torch.device("cuda:0" if torch.cuda.is_available() and not options.toy else "cpu")
    perform(stages[options.stage], device)


def perform(stage: StageOf, device: torch.device) -> None:
    """Find the facts of a stage."""
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, function in stage(device):
            find(name, function)


def compared(found: Tensor, wanted: Tensor, bound: float) -> dict[str, Any]:
    """Two tensors ``[R, ...]``: the relative norm of what lies between them, and where it is if it is above `bound`.

    Which rows and columns are wrong shows the tile that went wrong.
    """
    found, wanted = found.double().flatten(1), wanted.double().flatten(1)
    apart = (found - wanted).abs().nan_to_num(torch.inf)
    error = float(apart.norm() / wanted.norm())
    result: dict[str, Any] = {"ok": error <= bound, "error": error, "bound": bound, "shape": list(found.shape)}
    if error <= bound:
        return result
    row, column = divmod(int(apart.argmax()), apart.shape[1])
    wrong = apart > 10 * bound * wanted.abs().mean()
    rows, columns = (wrong.any(d).nonzero().flatten().tolist() for d in (1, 0))
    result |= {"worst": [row, column], "found": float(found[row, column]), "wanted": float(wanted[row, column])}
    return result | {"wrong rows": brief(rows), "wrong columns": brief(columns)}


def brief(numbers: list[int]) -> str:
    """Return ascending numbers as a text: how many, and the ranges that they form, the first ten of them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in ranges[:10])
    return f"{len(numbers)}: {shown}{', and more' if len(ranges) > 10 else ''}"
