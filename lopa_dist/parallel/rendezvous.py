"""The store through which a job's processes find each other, whatever launched them."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lopa_dist.atomic import atomic
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.launcher import CONNECT, JOIN, OTHER_MPI, LaunchError, World, mpi, version_of
from lopa_dist.parallel.neighbours import wait_until, watched_from_outside
from lopa_dist.parallel.stop import Stopped

AGENT_S = 10.0  # for torchrun's agent to answer, which it does unless it has ended
FILES_A_RANK = 4  # connections per rank, whose other ends are at the store's host
SLURM_START = (  # these identify one start of a job step
    "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT",
)  # fmt: skip
CONNECTIONS: dict[World, tuple[Store, str]] = {}
"""Results of `connect`: a process connects once, however often its ranks meet. In tests, ranks are threads."""


def rendezvous(world: World, environment: Mapping[str, str] = os.environ, meeting: int = 0) -> Store:
    """Return a store that all ranks share; every `meeting` of the same processes has its own keys.

    Raises:
        LaunchError: the ranks do not find each other.
        Stopped: torchrun has restarted a job that was asked to stop.
    """
    if world not in CONNECTIONS:
        CONNECTIONS[world] = connect(world, environment)
    store, start = CONNECTIONS[world]
    return PrefixStore(f"{start}/{meeting}", store)


def connect(world: World, environment: Mapping[str, str]) -> tuple[Store, str]:
    """Return the store without a prefix, and a prefix that all ranks of this start share."""
    if world.launcher == "torchrun":
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it is up before any rank starts
            store = hosted_by(f"torchrun's agent at {address}:{port}", address, port, world, AGENT_S)
        else:
            store = TCPStore(address, port, world.size, world.rank == 0, JOIN)
        if store.check([keys.STOPPED]):
            raise Stopped(f"{store.get(keys.STOPPED).decode()}; torchrun started it again in vain")
        return store, f"lopa_dist/{common_start(store, world)}"
    first = host(world) if world.rank == 0 else None
    own = f"{own_address(world)} {first.port}" if first else ""
    endpoint = share_by_mpi(world, own) if world.launcher == "mpirun" else share_by_file(world, own, environment)
    address, number = endpoint.split()
    return first or hosted_by(f"rank 0 at {address}:{number}", address, int(number), world), "lopa_dist"


def hosted_by(who: str, address: str, port: int, world: World, limit_s: float = JOIN.total_seconds()) -> TCPStore:
    """Return the store that another process hosts; torch alone would wait for it silently.

    torch keeps trying to connect for as long as it may wait for a key, so the timeout is short at first: the host may
    end just after it has answered.

    Raises:
        LaunchError: the host does not answer within `limit_s`, or no longer answers; the message says `who` it is.
    """
    wait_until(lambda: answers(address, port), world, lambda: f"{who} does not answer", limit_s)
    try:
        store = TCPStore(address, port, world.size, False, CONNECT)
    except RuntimeError as error:
        raise LaunchError(f"{who} does not answer any more") from error
    store.set_timeout(JOIN)
    return store


def answers(address: str, port: int) -> bool:
    """Return whether anything listens on a port."""
    try:
        socket.create_connection((address, port), CONNECT.total_seconds()).close()
    except OSError:
        return False
    return True


def common_start(store: Store, world: World) -> int:
    """Return a number that all ranks of this start have in common, and no rank of an earlier start has.

    torchrun's store outlives the ranks that it restarts. What dead ranks wrote must not be read, and each agent counts
    restarts only for itself. So every rank takes a number when it arrives. Rank 0 writes its own number beside every
    number that was taken, until all ranks of this start have read it there.
    """
    own = store.add(keys.ARRIVALS, 1)
    if world.rank:
        key = keys.WELCOME.format(own)
        wait_until(lambda: store.check([key]), world, lambda: f"rank {world.rank} waits for rank 0")
        start = int(store.get(key))
        store.add(keys.FOUND.format(start), 1)
        return start
    welcomed, found = 0, keys.FOUND.format(own)

    def all_found() -> bool:
        nonlocal welcomed
        for number in range(welcomed + 1, (welcomed := store.add(keys.ARRIVALS, 0)) + 1):
            store.set(keys.WELCOME.format(number), str(own))
        return store.add(found, 0) == world.size - 1

    wait_until(all_found, world, lambda: f"{1 + store.add(found, 0)} of {world.size} ranks are here")
    return own


def never_again(store: Store, why: str) -> None:
    """Make ranks that torchrun restarts stop at once, since the job was asked to stop; `store` is from `rendezvous`."""
    if isinstance(store, PrefixStore):
        store.underlying_store.set(keys.STOPPED, why)


def host(world: World) -> TCPStore:
    """Return a store that this process hosts for all ranks.

    It has no password, so if all ranks are on this machine, only this machine can reach it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + FILES_A_RANK * world.size
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )
    address = own_address(world)
    if address != "127.0.0.1":
        return TCPStore(address, 0, world.size, True, JOIN, False)
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(address, port, world.size, True, JOIN, False, master_listen_fd=listener.detach())


def share_by_mpi(world: World, endpoint: str) -> str:
    """Return rank 0's `endpoint` on every rank, through MPI."""
    with watched_from_outside():
        everyone = mpi().COMM_WORLD
        if everyone.Get_size() != world.size:
            raise LaunchError(
                f"mpirun started {world.size} ranks, but mpi4py finds {everyone.Get_size()} with {version_of(mpi())}: "
                f"{OTHER_MPI}"
            )
        return str(everyone.bcast(endpoint))


def share_by_file(world: World, endpoint: str, environment: Mapping[str, str]) -> str:
    """Return rank 0's `endpoint` on every rank, through a file in the folder from which the job was submitted.

    srun provides no address and no broadcast.
    """
    file = rendezvous_file(environment)
    if world.rank == 0:
        with atomic(file) as partial:
            partial.write_text(endpoint, encoding="utf-8")
        return endpoint
    wait_until(file.exists, world, lambda: f"rank {world.rank}: rank 0 wrote no address into {file} (is it shared?)")
    return file.read_text(encoding="utf-8")


def rendezvous_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return a file name that no other start of a job step has: a job that was killed while joining leaves its file.

    Job numbers are unique on one cluster, but start again if it is set up anew.
    """
    start = "-".join(environment.get(name, "0") for name in SLURM_START)
    return Path(environment.get("SLURM_SUBMIT_DIR", ".")) / f".lopa_dist-rendezvous-{start}"


def all_are_here(world: World) -> None:
    """Remove the file through which the ranks found each other, now that all have joined."""
    if world.launcher == "srun" and world.rank == 0:
        rendezvous_file().unlink(missing_ok=True)


def own_address(world: World) -> str:
    """Return the address at which the other ranks reach this process."""
    if world.local_size == world.size:
        return "127.0.0.1"
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LaunchError(f"this host's name {host!r} does not resolve, so other nodes cannot reach it") from error
    return host
