"""A job on a cluster, simulated step by step: which replica runs which requests, and when each answer is there.

Data replicas take requests from one queue, as in a job (`lopa_dist/engine/running_batch.py`). A step takes as long as
its rows say. In each, a sequence gains as many tokens as sequences did that were measured with as much of their answer
left. What a request draws depends on the request and its step alone, so that its forwards are the same in any batch,
in any order and on any number of replicas: policies are compared on equal work.

A policy is an order in which requests are handed out, and what replicas do that find the queue empty. `ORDERS`:

- ``input``: in the order of the input, and a replica fills all its slots at once;
- ``longest``: in the order of their answers' length, which is taken as known;
- ``dealt``: the same, but at first every replica gets one request, then every one a second, until all slots are full.
  lopa_dist does this with the requests' limits (`JobInput.left`), which may differ more or less than the answers do.

`TAILS`:

- ``wait``: nothing, as lopa_dist does;
- ``branches``: their ranks become branch ranks of a replica that still runs, so that its sequences gain more a step;
- ``share``: they take over half of the sequences of the replica that runs most.

For either, K/V are sent once, before the receiver's next step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ORDERS = ("input", "longest", "dealt")
TAILS = ("wait", "branches", "share")
DRAWS = 100_003  # random numbers that all requests draw from, each from a place of its own


@dataclass(frozen=True)
class Requests:
    """What is asked for: tokens ``[N]`` of each prompt, and of its answer up to the EOS, which counts."""

    prompt: Ints
    answer: Ints


@dataclass(frozen=True)
class Gains:
    """What a step does to a sequence that lacks 1 to R tokens of its answer, as measured for one k and m.

    The first dimension says whether it is the answer's first step (0), whose window is one block, or a later one (1).
    Longer answers are gained piece by piece, as so many answers of R tokens one after the other.
    """

    tokens: Ints  # [2, R, Q] gained in a step, in Q equally likely cases; [:, r] is of sequences that lack r + 1
    rows: Floats  # [2, R] that the step has for such a sequence on the busiest rank, its prompt's not counted

    def at(self, missing: Ints, forwards: Ints) -> tuple[Ints, Ints]:
        """Return the first two indices ``[n]`` of sequences that lack so many tokens after so many forwards."""
        longest = self.tokens.shape[1]
        later = (forwards > 0) & (missing % longest > 0)
        return later.astype(np.int64), (missing - 1) % longest


@dataclass(frozen=True)
class Kind:
    """A data replica with a certain number of branch ranks."""

    gains: Gains
    seconds: Callable[[float, int], float]  # of a step, by the rows of its busiest rank and its number of sequences


@dataclass(frozen=True)
class Cluster:
    """Who works, and how.

    Attributes:
        replicas: data replicas.
        kinds: what a replica is when the ranks of so many replicas work on its sequences; all begin as number 1.
        max_sequences: that a replica has in flight at most.
        order, tail: of `ORDERS` and `TAILS`.
        moving: seconds that it takes to send the K/V of so many tokens.
    """

    replicas: int
    kinds: Mapping[int, Kind]
    max_sequences: int
    order: str = "input"
    tail: str = "wait"
    moving: Callable[[int], float] = lambda tokens: 0.0


@dataclass
class Outcome:
    """What came of a job."""

    finished: Floats  # [N] seconds from its start until each answer was there
    forwards: Ints  # [N] of each request
    steps: Ints  # [replicas]
    busy: Floats  # [replicas] seconds in steps
    moved: int = 0  # tokens whose K/V were sent

    @property
    def seconds(self) -> float:
        """Until the last answer."""
        return float(self.finished.max(initial=0.0))


@dataclass
class Replica:
    """What runs on one replica."""

    number: int
    running: Ints  # [n] requests
    kind: Kind | None = None  # during a step
    helpers: list[Replica] = field(default_factory=list)  # whose ranks are branch ranks of this one
    joining: list[Replica] = field(default_factory=list)  # who will be from its next step on
    takers: list[Replica] = field(default_factory=list)  # who get half of its sequences when its step is over


class Simulation:
    """The state of one job, see `simulate`."""

    def __init__(self, requests: Requests, cluster: Cluster, seed: int = 0) -> None:
        for chosen, among in ((cluster.order, ORDERS), (cluster.tail, TAILS)):
            if chosen not in among:
                raise ValueError(f"there is no {chosen}; choose one of {', '.join(among)}")
        self.requests, self.cluster = requests, cluster
        count = len(requests.answer)
        by_length = np.argsort(-requests.answer, kind="stable")
        self.queue, self.taken = np.arange(count) if cluster.order == "input" else by_length, 0
        # as a job does: no replica has more in flight than its share
        self.slots = max(1, min(cluster.max_sequences, -(-count // cluster.replicas)))
        self.missing = requests.answer.copy()  # [N] tokens
        random = np.random.default_rng(seed)
        self.draws, self.luck = random.random(DRAWS), random.integers(DRAWS, size=count)
        zeros = np.zeros(cluster.replicas)
        self.outcome = Outcome(np.zeros(count), np.zeros(count, np.int64), zeros.astype(np.int64), zeros)
        if cluster.order == "dealt":
            self.taken = min(count, self.slots * cluster.replicas)
        first = self.queue[: self.taken]
        self.replicas = [Replica(n, first[n :: cluster.replicas]) for n in range(cluster.replicas)]
        self.idle: list[Replica] = []
        # once the queue is empty: how much each replica needs help, and how many others it takes (0: none help)
        self.need, self.wanted = np.zeros(cluster.replicas), np.zeros(cluster.replicas, np.int64)
        self.events = [(0.0, n) for n in range(cluster.replicas)]  # a heap of (seconds, replica): when a step may begin

    def run(self) -> Outcome:
        """Until all requests are finished."""
        while self.events:
            now, number = heapq.heappop(self.events)
            replica = self.replicas[number]
            if replica.kind is not None:
                self.end_step(replica, replica.kind, now)
            self.begin_step(replica, now)
        return self.outcome

    def end_step(self, replica: Replica, kind: Kind, now: float) -> None:
        """Give its sequences what they gained, and take out those that are finished."""
        running, gains = replica.running, kind.gains
        missing, forwards = self.missing[running], self.outcome.forwards[running]
        draw = self.draws[(self.luck[running] + forwards) % DRAWS]
        case = (draw * gains.tokens.shape[2]).astype(np.int64)
        missing -= gains.tokens[(*gains.at(missing, forwards), case)]
        self.missing[running], self.outcome.forwards[running] = missing, forwards + 1
        self.outcome.finished[running[missing == 0]] = now
        replica.running, replica.kind = running[missing > 0], None

    def begin_step(self, replica: Replica, now: float) -> None:
        """Admit what fits, let others join or take their share, and start; without sequences become idle."""
        if len(replica.running) < self.slots and self.taken < len(self.queue):
            new = self.queue[self.taken : self.taken + self.slots - len(replica.running)]
            self.taken += len(new)
            replica.running = np.concatenate([replica.running, new])
        now += self.regroup(replica, now)
        if len(replica.running):
            seconds = self.start(replica)
            heapq.heappush(self.events, (now + seconds, replica.number))
        else:
            self.idle += [replica, *replica.helpers]
            replica.helpers = []
        if self.taken == len(self.queue) and self.cluster.tail != "wait":
            self.note(replica)
            self.employ()

    def start(self, replica: Replica) -> float:
        """Begin a step; returns its seconds."""
        running = replica.running
        replica.kind = kind = self.cluster.kinds[max(n for n in self.cluster.kinds if n <= 1 + len(replica.helpers))]
        forwards = self.outcome.forwards[running]
        windows = kind.gains.rows[kind.gains.at(self.missing[running], forwards)].sum()
        prompts = self.requests.prompt[running[forwards == 0]].sum()
        seconds = kind.seconds(float(windows + prompts), len(running))
        self.outcome.steps[replica.number] += 1
        self.outcome.busy[replica.number] += seconds
        return seconds

    def regroup(self, replica: Replica, now: float) -> float:
        """Let those who wait for the end of its step join or take their share; returns the seconds that it takes."""
        seconds = 0.0
        if replica.joining:
            seconds += self.move(replica.running)
            replica.helpers, replica.joining = replica.helpers + replica.joining, []
        for taker in replica.takers:
            order = np.argsort(-self.missing[replica.running], kind="stable")  # so that both get long and short ones
            replica.running, taker.running = replica.running[order[::2]], replica.running[order[1::2]]
            seconds += self.move(taker.running)
            heapq.heappush(self.events, (now + seconds, taker.number))
        replica.takers = []
        return seconds

    def move(self, running: Ints) -> float:
        """Send the K/V of sequences, those of their prompts and of what they have gained; returns the seconds."""
        gained = self.requests.answer[running] - self.missing[running]
        tokens = int((self.requests.prompt[running] + gained).sum())
        self.outcome.moved += tokens
        return self.cluster.moving(tokens) if tokens else 0.0

    def note(self, replica: Replica) -> None:
        """Work out how much a replica needs help, and how many others it takes."""
        if self.cluster.tail == "share":
            sequences = len(replica.running) >> len(replica.takers)
            need, wanted = float(sequences), int(sequences > 1)
        else:
            size = 1 + len(replica.helpers) + len(replica.joining)
            need = self.missing[replica.running].max(initial=0) / size  # the longest answer ends last
            wanted = min((n for n in self.cluster.kinds if n > size), default=size) - size
        self.need[replica.number], self.wanted[replica.number] = need, wanted

    def employ(self) -> None:
        """Send idle replicas where help is needed most."""
        while self.idle:
            need = np.where((self.wanted > 0) & (self.wanted <= len(self.idle)), self.need, 0)
            replica = self.replicas[int(need.argmax())]
            if not need[replica.number]:
                return
            helpers = [self.idle.pop() for _ in range(self.wanted[replica.number])]
            if self.cluster.tail == "share":
                replica.takers += helpers
            else:
                replica.joining += helpers
            self.note(replica)


def simulate(requests: Requests, cluster: Cluster, seed: int = 0) -> Outcome:
    """Run a job; the same `seed` gives the same draws to every request, whatever the cluster."""
    return Simulation(requests, cluster, seed).run()
