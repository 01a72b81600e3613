"""Two hosts, as network namespaces joined by a cable (veth): the text of one process, and the cable cut in mid-run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import entries

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 4
TORCHRUN_S = 20  # torchrun's own time from the end of its worker to its own
OVERRIDES = [
    "decode.branches=3", "logging.wandb.mode=disabled", "parallel.threads=1",
    "logging.progress=never",
]  # fmt: skip


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check)


def obstacle() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip command: apt-get install iproute2"
    name = f"lopa-{os.getpid()}-try"
    tried = ip("netns", "add", name, check=False)
    ip("netns", "delete", name, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = obstacle()
pytestmark = [pytest.mark.system, pytest.mark.timeout(200), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, with a cable of which each has the end `cable`."""
    names = [f"lopa-{os.getpid()}-{n}" for n in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            for process in ip("netns", "pids", name, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "delete", name, check=False)


def torchrun(number: int) -> list[str]:
    """The beginning of one host's command line."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node",
        "1", "--master-addr", "10.77.0.1", "--master-port", "29500",
    ]  # fmt: skip


def start(host: str, number: int, launcher: list[str], folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """One host's rank; what it prints goes into a file. A launcher that is Python alone gets torchrun's variables."""
    command = [
        "ip", "netns", "exec", host, *launcher, "-m", "lopa_dist", *OVERRIDES, f"hydra.run.dir={folder}",
        f"parallel.timeout_s={TIMEOUT_S}", *overrides,
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", "TORCHELASTIC_RUN_ID": "two",
        "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": str(number),
        "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
    }  # fmt: skip
    with (folder.parent / f"host-{number}").open("w") as printed:
        return subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip


def printed(folder: Path, number: int) -> str:
    return (folder.parent / f"host-{number}").read_text()


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


def test_same_text_as_one_process(hosts: list[str], one_process: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "two"
    given = ["task.limit=8", "parallel.branch=2"]
    jobs = [start(host, n, [sys.executable], folder, *given) for n, host in enumerate(hosts)]
    assert [job.wait(120) for job in jobs] == [0, 0], printed(folder, 0)[-3000:] + printed(folder, 1)[-3000:]
    assert texts(folder) == one_process[:8]
    assert json.loads((folder / "report.json").read_text())["comm_bytes_per_step"]["all_gather"] > 0


def test_a_cut_cable_ends_both_sides_in_time(hosts: list[str], tmp_path: Path) -> None:
    """Replicas, which no collective of a step would tell of it; `test_faults.py` loses branch ranks."""
    folder = tmp_path / "run"
    given = ["task.limit=2000", "parallel.data=2"]
    jobs = [start(host, n, torchrun(n), folder, *given) for n, host in enumerate(hosts)]
    end = time.monotonic() + 100
    while entries(folder) < 8 and time.monotonic() < end and all(job.poll() is None for job in jobs):
        time.sleep(0.05)
    assert entries(folder) >= 8, printed(folder, 0)[-3000:] + printed(folder, 1)[-3000:]
    ip("-n", hosts[0], "link", "set", "cable", "down")
    cut = time.monotonic()
    seen: dict[int, float] = {}
    while len(seen) < 2 and time.monotonic() < cut + TIMEOUT_S + 10:
        for number in (0, 1):
            if number not in seen and f"lopa-dist: rank {1 - number} of 2 does not answer" in printed(folder, number):
                seen[number] = time.monotonic() - cut
        time.sleep(0.05)
    assert sorted(seen) == [0, 1], printed(folder, 0)[-3000:] + printed(folder, 1)[-3000:]
    assert max(seen.values()) < TIMEOUT_S + 5
    statuses = [job.wait(TORCHRUN_S) for job in jobs]
    assert all(status != 0 for status in statuses)
