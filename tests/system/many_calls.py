"""Many calls of one program: `python -m tests.system.many_calls --calls 300`.

Two ranks make an `LLM` for each call and generate with it, under torchrun and under mpirun, on another axis of the mesh
each time. After the first few calls the number of open files and of threads of each rank must stay as it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.system.conftest import ROOT
from tests.system.random_faults import MPIRUN

SETTLED = 5  # calls, after which a program holds what it will hold
SLACK = 2  # files or threads: one may be about to end
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": [str(MPIRUN), "-n", "2", sys.executable],
}


def held() -> tuple[int, int]:
    """The files that this process has open, and its threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def calls(count: int, folder: Path) -> None:
    """On each rank: make the calls, and write down what was held after each."""
    from lopa_dist import LLM

    found, texts = [], set()
    gc.disable()  # what a call used ends with it, not when the garbage collector comes
    for number in range(count):
        axis = ("data", "branch", "tensor")[number % 3]
        llm = LLM("embedded", f"parallel.{axis}=2", "parallel.threads=1", "parallel.timeout_s=20")
        outputs = llm.generate(["Ann has 3 books . How many books does Ann have now ?"] * 2, max_new_tokens=8)
        texts.add(tuple(output.text for output in outputs))
        rank = llm.world.rank
        del llm, outputs
        if number % 20 == 0:  # cycles of other packages' making are few, but a thousand calls would add up
            gc.collect()
        found.append(held())
    assert len(texts) == 1, texts
    (folder / f"{rank}.json").write_text(json.dumps(found))


def run(launcher: str, count: int, folder: Path) -> list[list[tuple[int, int]]]:
    """Start the two ranks; returns what each held after each call."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*LAUNCHERS[launcher], str(Path(__file__)), "--calls", str(count), "--of", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [[tuple(pair) for pair in json.loads((folder / f"{rank}.json").read_text())] for rank in range(2)]


def constant(found: Sequence[tuple[int, int]]) -> bool:
    """Whether a rank held no more at the end than when it had settled."""
    first, last = found[SETTLED - 1], found[-1]
    return all(end <= begin + SLACK for begin, end in zip(first, last, strict=True))


def main() -> None:
    """Under each launcher that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        return calls(options.calls, options.of)
    growing = 0
    for launcher in LAUNCHERS if MPIRUN.exists() else ["torchrun"]:
        with tempfile.TemporaryDirectory() as folder:
            for rank, found in enumerate(run(launcher, options.calls, Path(folder))):
                growing += not constant(found)
                shown = {n: found[n - 1] for n in (1, SETTLED, options.calls // 2, options.calls)}
                print(f"{launcher}, rank {rank}: files and threads after so many calls: {shown}", flush=True)
    sys.exit("they grow" if growing else None)


if __name__ == "__main__":
    main()
