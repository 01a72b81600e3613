"""What a stage of `gpu_first` consists of: facts, each found by a function and printed as a line of JSON at once.

A fact that fails is a line with the whole traceback, and the next one is tried. After an error of the GPU itself, all
that follows in the same process would fail, so it ends, and `gpu_first` begins another one behind that fact. A stage
that hangs prints where when it is asked to (SIGQUIT); one that dies in C code prints where, too.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BROKEN_GPU = "CUDA error"  # in an error's words: nothing more can be computed in this process
LONGEST = 6000  # characters of a traceback, from its end

Fact = tuple[str, Callable[[], dict[str, Any]]]  # a name, and what finds it; "ok" says whether it is as it should be


@dataclass(frozen=True)
class Making:
    """The function of a fact that makes what later facts need; it is found again where earlier facts are skipped."""

    function: Callable[[], dict[str, Any]]

    def __call__(self) -> dict[str, Any]:
        """Make it."""
        return self.function()


StageOf = Callable[[torch.device], Iterator[Fact]]


def say(**line: Any) -> None:
    """Print a line of JSON now."""
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


def find(name: str, function: Callable[[], dict[str, Any]]) -> None:
    """Find a fact and say it, or what went wrong.

    Raises:
        SystemExit: the GPU is of no more use to this process.
    """
    say(begun=name)
    began, broken = time.perf_counter(), False
    try:
        found = {"ok": True} | function()
    except Exception as error:
        broken = BROKEN_GPU in str(error)
        found = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-LONGEST:]}
    say(fact=name, seconds=round(time.perf_counter() - began, 3), **found)
    if broken:
        sys.exit(1)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def main(stages: Mapping[str, StageOf], arguments: list[str] | None = None) -> None:
    """Run one of the stages, as a child of `gpu_first`."""
    parser = argparse.ArgumentParser(description="Find the facts of one stage.")
    parser.add_argument("stage", choices=list(stages))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--skip", action="append", default=[], metavar="FACT")
    parser.add_argument("--only", metavar="FACT")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="each N-th fact from I on"
    )
    options = parser.parse_args(arguments)
    gc.freeze()  # a collection after each fact takes 0.1 s if it looks through all that was imported
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    device = torch.device("cuda:0" if torch.cuda.is_available() and not options.toy else "cpu")
    perform(stages[options.stage], device, options.skip, options.only, options.share)


def perform(
    stage: StageOf,
    device: torch.device,
    skip: Collection[str] = (),
    only: str | None = None,
    share: Sequence[int] = (0, 1),
) -> None:
    """Find the facts of a stage, without those to skip, or one alone; in any case those that others need.

    Of several processes that share the facts, `share` has this one's number and how many they are.
    """
    torch.manual_seed(0)
    number, processes = share
    with torch.inference_mode():
        for place, (name, function) in enumerate(stage(device)):
            mine = place % processes == number and name not in skip and only in (None, name)
            if isinstance(function, Making) or mine:
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
