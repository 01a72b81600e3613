"""Being asked to stop: drain first, drop after the grace; among ranks the highest level counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import INTERRUPTED, SIGNALS, STOPPED, Stop, StopLevel, Stopped, bounded_end


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_the_first_counts(number: signal.Signals) -> None:
    stop = Stop(1000)
    stop.install()
    stop.begin()
    assert (stop.asked, stop.level()) == (False, StopLevel.RUN)
    os.kill(os.getpid(), number)
    assert (stop.asked, stop.signal, stop.level()) == (True, number.name, StopLevel.DRAIN)
    when = stop.asked_at
    stop.ask("again")
    assert (stop.asked_at, stop.signal) == (when, number.name)


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_first_step_nothing_is_waited_for(number: signal.Signals) -> None:
    stop = Stop(1000)
    stop.install()
    with pytest.raises(Stopped, match=f"stopped by {number.name} before the first step"):
        os.kill(os.getpid(), number)
    with pytest.raises(Stopped, match=number.name):  # also where a library took the exception for its own
        stop.begin()


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Stop(1000).install()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_without_grace_everything_is_dropped() -> None:
    stop = Stop(0)
    stop.ask("test")
    assert stop.level() == StopLevel.ABORT


def test_only_sigterm_looks_for_lost_ranks_first() -> None:
    looked: list[bool] = []
    stop = Stop(10)
    stop.install(lambda: looked.append(stop.asked))
    stop.begin()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert looked == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert looked == [True]


def test_levels_are_in_order() -> None:
    assert max(StopLevel.RUN, StopLevel.FAILED, StopLevel.DRAIN, StopLevel.ABORT) == StopLevel.FAILED
    assert StopLevel.RUN < StopLevel.DRAIN < StopLevel.ABORT


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGUSR1, STOPPED, "lopa-dist: stopped by SIGUSR1 before the job began"),
        (signal.SIGTERM, STOPPED, "lopa-dist: stopped by SIGTERM before the job began"),
        (signal.SIGINT, INTERRUPTED, "lopa-dist: interrupted"),
    ],
)
@pytest.mark.parametrize("imported", ["hydra", "torch"])
def test_a_signal_during_the_imports(
    imported: str, number: signal.Signals, status: int, message: str, tmp_path: Path
) -> None:
    """Imports take seconds, those of the command line and those of a job; schedulers do not wait for them."""
    program = f"""
import os, signal, sys
from lopa_dist.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it

class Sender:
    def find_spec(self, name, path, target=None):
        if name == "{imported}":
            os.kill(os.getpid(), {int(number)})

sys.meta_path.insert(0, Sender())
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (status, message, "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, STOPPED), (signal.SIGTERM, 143)])
def test_one_of_several_ranks_that_is_ended_early_does_not_say_that_the_job_can_go_on(
    number: signal.Signals, status: int
) -> None:
    """Launchers end the others by SIGTERM when one has failed, and the highest status of all is their own."""
    program = f"""
import signal
from lopa_dist.parallel.stop import leave_at_signals
leave_at_signals()
signal.raise_signal({int(number)})
"""
    ranks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,1"}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **ranks}, timeout=60, check=False)
    assert done.returncode == status


ENDING = """
import atexit, sys, time
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import bounded_end
atexit.register(time.sleep, 100)  # as MPI's end, which waits for all ranks
with bounded_end(World("mpirun", rank=0, size=2), 0.2):
    if sys.argv[1] == "wrong":
        raise ValueError("own words")
atexit.unregister(time.sleep)
"""


@pytest.mark.parametrize(("how", "status"), [("wrong", -signal.SIGALRM), ("right", 0)])
def test_after_an_error_a_rank_does_not_wait_for_ever(how: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, how], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert ("own words" in done.stderr) == (how == "wrong")


def test_one_process_has_nobody_to_wait_for() -> None:
    with pytest.raises(ValueError, match="x"), bounded_end(World("python"), 0.2):
        raise ValueError("x")
    assert not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2  # a limit of the tests' own may be set
