"""Check everything on a new GPU, and measure the default decoding, within minutes and whatever fails.

    python -m benchmarks.gpu_first --out DIR         # under ten minutes; needs no network, no checkpoint, no Hydra
    python -m benchmarks.gpu_first --out DIR --bench # forwards, attention and products against their bars (`gpu_bench`)
    python -m benchmarks.gpu_first --out DIR --toy   # on a CPU, with small shapes, where nothing is measured

Each stage runs in its own process with a time limit, so a stage that crashes, hangs or runs out of memory does not
affect the others. A stage that dies while it finds a fact is started again, after that fact. At the end, if there is
time left, each such fact is tried once more with blocking launches, which show where an error on a GPU happened.

DIR gets `first.jsonl`, with a line for each fact as soon as it is found; `first-errors.txt`, with tracebacks; and
`first.md`, a summary on one screen. With --bench, the names begin with `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Timer
from typing import Any

MODULE, BENCH_MODULE = "benchmarks.first_stages", "benchmarks.gpu_bench"


@dataclass(frozen=True)
class Stage:
    """A part of the program, with its time limit."""

    name: str
    seconds: float
    module: str = MODULE  # the module that runs it


STAGES = (  # texts come before kernels: texts show whether something is wrong, kernels explain what
    Stage("environment", 20),
    Stage("compiled", 75),
    Stage("preflight", 60),
    Stage("engines", 50),
    Stage("texts", 85),
    Stage("graphs", 40),
    Stage("kernels", 95),
    Stage("speed", 95),
    Stage("ranks", 40),
    Stage("layers", 35),
)
SANITIZER = Stage("sanitizer", 300)  # runs only with --stage: it compiles everything again, and checks each access
BENCH = (
    Stage("environment", 20),
    Stage("steps", 270, BENCH_MODULE),
    Stage("attention", 70, BENCH_MODULE),
    Stage("eager", 60, BENCH_MODULE),
    Stage("products", 150, BENCH_MODULE),
)
TOTAL = 590.0  # time limit, in seconds, of all stages and repetitions together
UNKILLABLE = 30.0  # seconds to wait for a killed process to end
LEAST = 5.0  # with fewer seconds left, no stage is started


@dataclass
class Journal:
    """What was found, written to `folder` as it is found: `name`.jsonl, `name`.md and `name`-errors.txt."""

    folder: Path
    name: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def put(self, line: dict[str, Any]) -> None:
        """Add a line, and its traceback, if it has one, to `name`-errors.txt."""
        if trace := line.get("trace"):
            self.error(f"{line.get('stage')}: {line.get('fact')}", str(trace))
        self.lines.append(line)
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def error(self, title: str, text: str) -> None:
        """Add a text, such as a traceback, to `name`-errors.txt."""
        with (self.folder / f"{self.name}-errors.txt").open("a") as file:
            file.write(f"## {title}\n{text.strip()}\n\n")

    def write_screen(self) -> None:
        """Write the page `name`.md: how each stage ended, what is wrong, and what was measured."""
        lines = [f"# {self.name.capitalize()} run", ""]
        for line in (line for line in self.lines if "ended" in line):
            lines += [f"- {line['stage']}: {line['ended']}, {line['facts']} facts, {line['wrong']} wrong"]
        lines += ["", "## Wrong", ""]
        for line in self.lines:
            if not line.get("ok", True):
                first = str(line.get("error") or line.get("fault") or "").strip().split("\n")[0]
                lines.append(f"- {line['stage']}: {line.get('fact', 'the process')}: {first}")
        lines += ["", "## Measured", ""]
        lines += [f"- {line['fact']}: {line['measured']}" for line in self.lines if "measured" in line]
        (self.folder / f"{self.name}.md").write_text("\n".join(lines) + "\n")


def run(stages: Sequence[Stage], folder: Path, toy: bool, name: str = "first", total: float = TOTAL) -> Journal:
    """Run stages one after the other; then, while time is left, try again each fact in which a stage died."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (f"{name}.jsonl", f"{name}-errors.txt"):
        (folder / file).unlink(missing_ok=True)
    journal, end = Journal(folder, name), time.monotonic() + total
    fatal = [(stage, fact) for stage in stages for fact in around(stage, journal, toy, end)]
    for stage, fact in fatal:
        in_time(stage, journal, toy, end, only=fact)
    return journal


def around(stage: Stage, journal: Journal, toy: bool, end: float) -> list[str]:
    """Run a stage, and start it again after each fact in which it dies; return these facts."""
    end = min(end, time.monotonic() + stage.seconds)
    done: list[str] = []
    fatal: list[str] = []
    while True:
        ended = in_time(stage, journal, toy, end, skip=[*done, *fatal])
        last = ended.begun or (ended.facts[-1] if ended.facts else "")
        if not ended.how.startswith("died") or not last or last in fatal:
            return fatal
        done += ended.facts
        fatal.append(last)


@dataclass(frozen=True)
class Ended:
    """How an attempt at a stage ended."""

    how: str  # "fine", "time limit", "died (...)" or "no time left"
    facts: Sequence[str] = ()  # the facts that were found
    begun: str = ""  # the fact that had begun and was not found


def in_time(
    stage: Stage, journal: Journal, toy: bool, end: float, skip: Sequence[str] = (), only: str | None = None
) -> Ended:
    """Run a stage as `attempt` does, but at most until the time `end`; if no time is left, do not start it."""
    left = end - time.monotonic()
    if left < LEAST:
        ended = Ended("no time left")
        journal.put({"stage": stage.name, "blocking": only is not None, "ok": False, "error": ended.how})
    else:
        ended = attempt(replace(stage, seconds=min(stage.seconds, left)), journal, toy, skip, only)
    journal.write_screen()
    return ended


def attempt(stage: Stage, journal: Journal, toy: bool, skip: Sequence[str], only: str | None) -> Ended:
    """Run a stage in its own process, and return how it ended.

    Args:
        stage: the stage, with its time limit.
        journal: gets what is found.
        toy: whether to run on the CPU, with small shapes.
        skip: facts to leave out.
        only: the only fact to find, with blocking launches; None: all facts, without blocking launches.
    """
    blocking = only is not None
    command = [sys.executable, "-m", stage.module, stage.name, *["--toy"] * toy]
    command += [word for fact in skip for word in ("--skip", fact)] + ["--only", only] * blocking  # type: ignore[list-item]
    environment = {**os.environ, **({"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {})}
    log, late = journal.folder / "stderr.txt", Event()
    began, wrong, begun = time.monotonic(), 0, ""
    facts: list[str] = []
    with log.open("w+") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )

        def stop() -> None:
            late.set()
            child.send_signal(signal.SIGQUIT)  # makes the child print where it is
            end(child)

        timer = Timer(stage.seconds, stop)
        timer.start()
        assert child.stdout is not None
        for text in child.stdout:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = None
            if not isinstance(line, dict):  # a library printed this
                continue
            begun = line.get("begun", begun)
            if "fact" in line:
                facts.append(line["fact"])
                wrong, begun = wrong + (not line["ok"]), ""
                journal.put({"stage": stage.name, "blocking": blocking, **line})
        timer.cancel()
        end(child)
        try:
            code = child.wait(UNKILLABLE)
        except subprocess.TimeoutExpired:  # the child hangs in the driver, where no signal reaches it
            code = -signal.SIGKILL
        errors.seek(0)
        last = errors.read()
    log.unlink()
    if late.is_set():
        ended = "time limit"
    else:
        ended = "fine" if code == 0 else f"died ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})"
    if ended != "fine":
        what = f"{ended} in {begun or 'no fact'}"
        journal.put({"stage": stage.name, "blocking": blocking, "ok": False, "error": what, "stderr": last[-6000:]})
        journal.error(f"{stage.name}: {what}{', with blocking launches' if blocking else ''}", last)
    seconds = round(time.monotonic() - began, 2)
    journal.put({"stage": stage.name, "ended": ended, "facts": len(facts), "wrong": wrong, "seconds": seconds})
    print(f"{stage.name}: {ended}, {len(facts)} facts, {wrong} wrong, {seconds:.0f} s", flush=True)
    return Ended(ended, facts, begun)


def end(child: subprocess.Popen[str]) -> None:
    """Wait a second for a stage's process to end; then kill its whole session, which includes its compilers."""
    try:
        child.wait(1)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> None:
    """Run the stages that the command line asks for, and exit with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Check everything on a GPU, then measure the default decoding.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the facts go")
    parser.add_argument("--toy", action="store_true", help="small shapes on the CPU: nothing is measured")
    parser.add_argument("--bench", action="store_true", help="measure forwards and kernels beside their bars instead")
    every = {stage.name: stage for stage in (*STAGES, SANITIZER, *BENCH)}
    parser.add_argument("--stage", action="append", choices=list(every), help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    name, stages = ("bench", BENCH) if options.bench else ("first", STAGES)
    chosen = [every[stage] for stage in options.stage] if options.stage else list(stages)
    # the first import reads gigabytes from a disk that may be slow, so it must not count as a stage's time
    subprocess.run([sys.executable, "-c", f"import {MODULE}"], check=False)
    journal = run(chosen, options.out, options.toy, name)
    print(options.out / f"{name}.md")
    sys.exit(any(not line.get("ok", True) for line in journal.lines))


if __name__ == "__main__":
    main()
