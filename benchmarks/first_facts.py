"""The facts of a stage of `gpu_first`: each is found by a function, and printed at once as a line of JSON.

If a function fails, the line has the end of the traceback, and the stage goes on with the next fact. After an error of
the GPU itself, everything else in the same process would fail. So the process ends, and `gpu_first` starts another one,
which goes on after that fact. A stage that hangs prints where it is when it gets the signal SIGQUIT. A stage that
crashes in C code also prints where.
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

BROKEN_GPU = "CUDA error"  # an error whose message has these words ends all computing in this process
LONGEST = 6000  # most characters of a traceback, counted from its end

Fact = tuple[str, Callable[[], dict[str, Any]]]  # a name, and a function whose result has "ok": False for a fault


@dataclass(frozen=True)
class Making:
    """The function of a fact that later facts need; the function is called even if the fact is to be skipped."""

    function: Callable[[], dict[str, Any]]

    def __call__(self) -> dict[str, Any]:
        """Make what later facts need."""
        return self.function()


StageOf = Callable[[torch.device], Iterator[Fact]]


def say(**line: Any) -> None:
    """Print `line` as a line of JSON, and flush the output."""
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


def find(name: str, function: Callable[[], dict[str, Any]]) -> None:
    """Call the `function` that finds the fact `name`, and print the fact or the error.

    Raises:
        SystemExit: after an error of the GPU, this process can compute nothing more on it.
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
    """Run one of the `stages`, as a child process of `gpu_first`."""
    parser = argparse.ArgumentParser(description="Find the facts of one stage.")
    parser.add_argument("stage", choices=list(stages))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--skip", action="append", default=[], metavar="FACT")
    parser.add_argument("--only", metavar="FACT")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="each N-th fact from I on"
    )
    options = parser.parse_args(arguments)
    gc.freeze()  # otherwise the collection after each fact takes 0.1 s, to look through everything that was imported
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
    """Find the facts of a stage on a device; facts that later ones need (`Making`) are found in any case.

    Args:
        stage: yields the facts.
        device: where to find them.
        skip: names of facts to leave out.
        only: name of the only fact to find; None: all of them.
        share: this process's number, and the number of processes that share the facts.
    """
    torch.manual_seed(0)
    number, processes = share
    with torch.inference_mode():
        for place, (name, function) in enumerate(stage(device)):
            mine = place % processes == number and name not in skip and only in (None, name)
            if isinstance(function, Making) or mine:
                find(name, function)


def compared(found: Tensor, wanted: Tensor, bound: float) -> dict[str, Any]:
    """Compare two tensors ``[R, ...]`` by the relative norm of their difference, which may be at most `bound`.

    If the norm is larger, the result says where they differ: the wrong rows and columns show which tile is at fault.
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
    """Return a text that describes ascending numbers: how many they are, and the first ten ranges that they form."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in ranges[:10])
    return f"{len(numbers)}: {shown}{', and more' if len(ranges) > 10 else ''}"
