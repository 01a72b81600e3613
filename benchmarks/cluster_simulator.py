"""A job on a cluster, simulated step by step: which replica runs which requests, and when each answer is finished.

Data replicas take requests from one queue, as in a job (`lopa_dist/engine/running_batch.py`). The time of a step
follows from its rows and sequences. The tokens that a sequence gains in a step are drawn from measured steps of
sequences with as many missing tokens. A draw depends only on the request and the number of its step. So a request needs
the same forwards in any batch, in any order and on any number of replicas, and orders are compared on equal work. The
`ORDERS`:

- ``input``: the order of the input; a replica fills all its slots at once;
- ``longest``: the longest answer first, as if the lengths of answers were known;
- ``dealt``: the longest answer first, but every replica gets one request, then every replica a second one, until all
  slots are full. lopa_dist does this by the requests' limits (`JobInput.left`), which may vary more or less than the
  lengths of answers do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lopa_dist.checks import require

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ORDERS = ("input", "longest", "dealt")
DRAWS = 100_003  # random numbers that all requests share; each request begins at a random one of them


@dataclass(frozen=True)
class Requests:
    """The lengths of N requests, in tokens."""

    prompt: Ints  # [N]
    answer: Ints  # [N] up to the EOS, and including it


@dataclass(frozen=True)
class Gains:
    """What a step does for a sequence that lacks 1 to R tokens of its answer, as measured for one k and m.

    The first dimension says whether the step is the first one of the answer (0), whose window is one block, or a later
    one (1). An answer of more than R tokens is simulated as several answers, one after the other.
    """

    tokens: Ints  # [2, R, Q] tokens gained in Q equally likely cases; [:, r] is for sequences that lack r + 1 tokens
    rows: Floats  # [2, R] rows of such a sequence on the busiest rank, without those of its prompt

    def at(self, missing: Ints, forwards: Ints) -> tuple[Ints, Ints]:
        """Return the first two indices ``[n]`` for sequences that lack `missing` tokens after `forwards` forwards."""
        longest = self.tokens.shape[1]
        later = (forwards > 0) & (missing % longest > 0)
        return later.astype(np.int64), (missing - 1) % longest


@dataclass(frozen=True)
class Cluster:
    """The data replicas of a simulated cluster.

    Attributes:
        replicas: the number of data replicas.
        gains: what a step does for a sequence.
        seconds: a function from the rows of the busiest rank and the number of sequences to the seconds of a step.
        max_sequences: the most sequences in flight on a replica.
        order: one of `ORDERS`.
    """

    replicas: int
    gains: Gains
    seconds: Callable[[float, int], float]
    max_sequences: int
    order: str = "input"


@dataclass
class Outcome:
    """The result of a simulated job."""

    finished: Floats  # [N] seconds from the start of the job until each answer was finished
    forwards: Ints  # [N] forwards of each request
    steps: Ints  # [replicas] steps of each replica
    busy: Floats  # [replicas] seconds that each replica spent in steps

    @property
    def seconds(self) -> float:
        """The seconds from the start of the job until the last answer was finished."""
        return float(self.finished.max(initial=0.0))


def simulate(requests: Requests, cluster: Cluster, seed: int = 0) -> Outcome:
    """Simulate a job and return its outcome; with the same `seed`, a request has the same draws on every cluster."""
    require("order", cluster.order, ORDERS)
    count, replicas, gains = len(requests.answer), cluster.replicas, cluster.gains
    random = np.random.default_rng(seed)
    draws, luck = random.random(DRAWS), random.integers(DRAWS, size=count)
    outcome = Outcome(np.zeros(count), np.zeros(count, np.int64), np.zeros(replicas, np.int64), np.zeros(replicas))
    forwards, missing = outcome.forwards, requests.answer.copy()  # [N] forwards so far; tokens still missing
    slots = max(1, min(cluster.max_sequences, -(-count // replicas)))  # at most a replica's share, as in a job
    queue = np.arange(count) if cluster.order == "input" else np.argsort(-requests.answer, kind="stable")
    taken = min(count, slots * replicas) if cluster.order == "dealt" else 0
    running = [queue[:taken][number::replicas] for number in range(replicas)]
    in_step = [False] * replicas
    events = [(0.0, number) for number in range(replicas)]  # a heap of (seconds, replica): when its next step may begin
    while events:
        now, number = heapq.heappop(events)
        sequences = running[number]
        if in_step[number]:
            case = (draws[(luck[sequences] + forwards[sequences]) % DRAWS] * gains.tokens.shape[2]).astype(np.int64)
            missing[sequences] -= gains.tokens[(*gains.at(missing[sequences], forwards[sequences]), case)]
            forwards[sequences] += 1
            outcome.finished[sequences[missing[sequences] == 0]] = now
            sequences = sequences[missing[sequences] > 0]
        admitted = queue[taken : taken + slots - len(sequences)]
        taken += len(admitted)
        running[number] = sequences = np.concatenate([sequences, admitted])
        in_step[number] = len(sequences) > 0
        if in_step[number]:
            windows = gains.rows[gains.at(missing[sequences], forwards[sequences])].sum()
            prompts = requests.prompt[sequences[forwards[sequences] == 0]].sum()
            seconds = cluster.seconds(float(windows + prompts), len(sequences))
            outcome.steps[number] += 1
            outcome.busy[number] += seconds
            heapq.heappush(events, (now + seconds, number))
    return outcome
