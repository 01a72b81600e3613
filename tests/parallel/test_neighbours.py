"""A rank of this host that has ended is noticed by the others, as long as nothing is doubtful."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.neighbours import ended_here, ranks_here
from lopa_dist.parallel.stop import STOPPED

pytestmark = pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")

STEP = """
import os, subprocess, sys
open("/proc/self/comm", "w").write(sys.argv[1])
def start(rank, program):
    environment = dict(os.environ)
    if sys.argv[1] == "hydra_pmi_proxy":
        environment |= {"PMI_SIZE": "3", "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "3"}
    else:
        environment |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
                        "SLURM_GTIDS": "0,1,2"}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE)
look = "from lopa_dist.parallel.neighbours import ended_here; print(ended_here(), flush=True)"
waiting = start(2, "input()")
dead = start(1, "")
dead.stdin.close()
if sys.argv[2] == "reaped":
    dead.wait()
else:
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
other = subprocess.Popen(["sleep", "60"]) if sys.argv[2] == "doubtful" else None
start(0, look).wait()
waiting.kill()
waiting.wait()
if other: other.kill()
"""


@pytest.mark.parametrize(
    ("parent", "case", "said"),
    [
        ("slurmstepd", "reaped", "[1]"),
        ("slurmstepd", "not reaped", "[1]"),
        ("hydra_pmi_proxy", "reaped", "[1]"),
        ("slurmstepd", "doubtful", "[]"),  # a process that may be a rank soon
        ("bash", "reaped", "[]"),  # a rank that has ended is not its child
    ],
)
def test_who_has_ended(parent: str, case: str, said: str) -> None:
    command = [sys.executable, "-c", STEP, parent, case]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip() == said


RANKS = """
import os, subprocess, sys
program = '''
import time
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.neighbours import ranks_here
while len(found := ranks_here(detect())) < 3: time.sleep(0.05)
print(*sorted(found), flush=True)
input()
'''
started = []
for rank in range(3):
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "6", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3",
                                "TORCHELASTIC_RUN_ID": "none"}
    started.append(subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, text=True))
other = subprocess.Popen(["sleep", "60"])
said = [rank.stdout.readline() for rank in started]
for rank in started: rank.communicate("\\n")
other.kill()
print(said == [" ".join(str(one) for one in sorted(rank.pid for rank in started)) + "\\n"] * 3)
"""


def test_the_ranks_of_a_host_know_each_other() -> None:
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n", done.stderr
    assert ranks_here(World("torchrun", 0, 2, 0, 2)) == [], "this process is no rank"


def test_other_launchers_end_a_job_themselves() -> None:
    assert ended_here({}) == []


WAITS = """
import os, sys, time
from lopa_dist.parallel.neighbours import watched_from_outside
parent = os.getppid()
print("begins", flush=True)
while sys.argv[1] == "gone before" and os.getppid() == parent:
    time.sleep(0.01)
with watched_from_outside():
    print("waits", flush=True)
    time.sleep(100)
"""
LAUNCHER = """
import os, socket, subprocess, sys
own, ranks = socket.socketpair()
reader, writer = os.pipe()
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env={**os.environ, "PMI_FD": str(ranks.fileno())},
                 pass_fds=[ranks.fileno()], stderr=writer if sys.argv[2] == "its reader" else None)
ranks.close()
os.close(writer)
sys.stdin.read()
"""


@pytest.mark.parametrize("case", ["gone later", "gone before", "its reader"])
def test_a_rank_whose_launcher_has_been_killed_does_not_wait_for_ever_in_mpi(case: str) -> None:
    ranks = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, WAITS, case], env={**os.environ, **ranks}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "begins\n"
    if case != "gone before":
        assert launcher.stdout.readline() == "waits\n"
    launcher.kill()
    said = launcher.communicate(timeout=60)[1]  # when the rank has ended
    assert ("mpirun, which started rank 1, has ended" in said) == (case != "its reader")


LEAVES = """
import os, signal, sys
from lopa_dist.parallel.launcher import die
from lopa_dist.parallel.stop import leave_at_signals
leave_at_signals()
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
os.close(writer)
die("a last word", 7) if sys.argv[1] == "die" else signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(("how", "status"), [("die", 7), ("signal", STOPPED)])
def test_a_process_whose_words_nobody_reads_leaves_all_the_same(how: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", LEAVES, how], timeout=60, check=False).returncode == status
