"""What a person sees while a job runs: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from lopa_dist.engine.statistics import Statistics
from lopa_dist.jobs.show.report import INVALID
from lopa_dist.parallel.counters import NAMES
from lopa_dist.parallel.stop import Stop

ESTIMATE_S = 300.0  # seconds over which the time left is estimated: batches end many requests at once, then none
SHORT_S = 1.0  # after which a notebook shows a bar: the bars of all calls stay below their cell
MANY = 100  # answers after which a warning says if none has its format

log = logging.getLogger("lopa_dist")


class ProgressDisplay:
    """Shows requests done, time left and so far, failures, tokens/s, TPF, right answers, accepted drafts or wins.

    All but the requests done and their failures are of this attempt.
    """

    def __init__(self, mode: str, total: int, statistics: Statistics, every_s: float) -> None:
        console = Console(stderr=True, emoji=False)
        notebook = console.is_jupyter
        shown = console.is_terminal or (notebook and find_spec("ipywidgets") is not None)  # which rich needs there
        self.live = mode == "always" or (mode == "auto" and shown)
        self.silent, self.total, self.statistics, self.every_s = mode == "never", total, statistics, every_s
        self.began = self.last = time.perf_counter()
        self.shown, self.broken, self.told, self.warned = 0, False, False, False
        self.lesson = ""  # how far a lesson has got, while there is one
        self.totals = dict.fromkeys(NAMES, 0)
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=8),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # on a narrow terminal this column is cut, and the others stay whole
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        )
        self.progress = Progress(
            *columns, console=console, disable=not self.live, expand=True, speed_estimate_period=ESTIMATE_S
        )
        self.later = Timer(SHORT_S, self.attempt, (self.progress.start,)) if self.live and notebook else None
        self.task = self.progress.add_task("", total=total, status="")

    def __enter__(self) -> ProgressDisplay:
        if self.later:
            self.later.start()
        else:
            self.attempt(self.progress.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self.later:
            self.later.cancel()
            self.later.join()  # it may be starting the bar
        self.attempt(self.progress.stop)

    def update(self, totals: dict[str, int]) -> None:
        """Show what all replicas have done: `totals` by `NAMES`."""
        self.attempt(lambda: self.show(totals))

    def stopping(self, stop: Stop, in_flight: int) -> None:
        """Log that the job stops and how long that may take, once, if it was asked to stop."""
        if stop.asked and not self.told:
            self.told = True
            log.warning("stopping: %d in flight, at most %.0f s (job.grace_s)", in_flight, stop.grace_s)
            self.update(self.totals)

    def learning(self, share: float, loss: float) -> None:
        """Show how far a lesson of the job has got, or log it now and then. Nothing is generated meanwhile."""
        self.lesson = f"learning {share:.0%}, loss {loss:.2f}"
        self.attempt(self.show_lesson)

    def learned(self) -> None:
        """Show that a lesson is over."""
        self.lesson = ""
        self.attempt(self.show_lesson)

    def show_lesson(self) -> None:
        """Show the status while no request is finished; without a display, log the lesson now and then."""
        self.progress.update(self.task, status=self.status())
        now = time.perf_counter()
        if self.lesson and now - self.last >= self.every_s and not (self.live or self.silent):
            self.last = now
            log.info("%s", self.lesson)

    def attempt(self, act: Callable[[], None]) -> None:
        """Call `act`, which shows something. After the first failure show nothing more: the terminal may be gone."""
        if self.broken:
            return
        try:
            act()
        except (Exception, SystemExit) as error:  # rich leaves the program where standard error is closed
            self.broken = True
            why = "standard error is closed" if isinstance(error, SystemExit) else repr(error)
            log.warning("WARNING: progress can no longer be shown (%s). The job goes on.", why)

    def show(self, totals: dict[str, int]) -> None:
        """Update the display with `totals`; where there is none, log a line now and then."""
        self.totals = totals
        done, before = totals["done"], self.shown
        self.shown = done
        self.progress.update(self.task, completed=done, status=self.status())
        now = time.perf_counter()
        due = now - self.last >= self.every_s or done == self.total
        answers = done - totals["failed"]
        if answers >= MANY and totals["invalid"] == answers and not self.warned:
            self.warned = True
            log.warning("none of the first %d answers has the format that was asked for", answers)
        if done > before and due and not (self.live or self.silent):
            self.last = now
            log.info("%d/%d requests, %s", done, self.total, self.status())

    def status(self) -> str:
        """Return the figures so far, in one line."""
        now = self.totals
        rate = now["tokens"] / max(1e-9, time.perf_counter() - self.began)
        parts = [f"{now[name]:,} {said}" for name, said in (("failed", "failed"), ("invalid", INVALID)) if now[name]]
        parts += [f"{timedelta(seconds=int(time.perf_counter() - self.began))} so far", f"{rate:.0f} tokens/s"]
        parts = [part for part in ("stopping" * self.told, self.lesson) if part] + parts
        if now["forwards"]:  # none are counted where texts are scored
            parts.append(f"TPF {now['tokens'] / now['forwards']:.2f}")
        if now["judged"]:
            of = f" of {now['judged']:,}" if now["judged"] < now["done"] - now["failed"] else ""  # of this attempt
            parts.append(f"{now['right'] / now['judged']:.1%}{of} right")
        choices = sum(self.statistics.wins.values())
        if self.statistics.accepted:
            parts.append(f"{self.statistics.accepted_per_forward():.1f} drafts accepted per forward")
        elif choices:
            parts.append(f"lookahead won {1 - self.statistics.wins[0] / choices:.0%}")
        return ", ".join(parts)
