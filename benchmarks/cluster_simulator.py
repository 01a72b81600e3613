"""A job on a cluster, simulated step by step: which replica runs which requests, and when each answer is there.

Data replicas take requests from one queue, as in a job (`lopa_dist/engine/running_batch.py`). A step takes as long as
its rows say. In each, a sequence gains as many tokens as sequences did that were measured with as much of their answer
left. What a request draws depends on the request and its step alone, so that its forwards are the same in any batch,
in any order and on any number of replicas: orders are compared on equal work. `ORDERS`:

- ``input``: in the order of the input, and a replica fills all its slots at once;
- ``longest``: in the order of their answers' length, which is taken as known;
- ``dealt``: the same, but at first every replica gets one request, then every one a second, until all slots are full.
  lopa_dist does this with the requests' limits (`JobInput.left`), which may differ more or less than the answers do.
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
class Cluster:
    """Who works, and how.

    Attributes:
        replicas: data replicas.
        gains: what a step of a replica does to its sequences.
        seconds: of a step, by the rows of its busiest rank and its number of sequences.
        max_sequences: that a replica has in flight at most.
        order: of `ORDERS`.
    """

    replicas: int
    gains: Gains
    seconds: Callable[[float, int], float]
    max_sequences: int
    order: str = "input"


@dataclass
class Outcome:
    """What came of a job."""

    finished: Floats  # [N] seconds from its start until each answer was there
    forwards: Ints  # [N] of each request
    steps: Ints  # [replicas]
    busy: Floats  # [replicas] seconds in steps

    @property
    def seconds(self) -> float:
        """Until the last answer."""
        return float(self.finished.max(initial=0.0))


def simulate(requests: Requests, cluster: Cluster, seed: int = 0) -> Outcome:
    """Run a job; the same `seed` gives the same draws to every request, whatever the cluster."""
    require("order", cluster.order, ORDERS)
    count, replicas, gains = len(requests.answer), cluster.replicas, cluster.gains
    random = np.random.default_rng(seed)
    draws, luck = random.random(DRAWS), random.integers(DRAWS, size=count)
    outcome = Outcome(np.zeros(count), np.zeros(count, np.int64), np.zeros(replicas, np.int64), np.zeros(replicas))
    forwards, missing = outcome.forwards, requests.answer.copy()  # [N] so far
    slots = max(1, min(cluster.max_sequences, -(-count // replicas)))  # as a job: no more in flight than its share
    queue = np.arange(count) if cluster.order == "input" else np.argsort(-requests.answer, kind="stable")
    taken = min(count, slots * replicas) if cluster.order == "dealt" else 0
    running = [queue[:taken][number::replicas] for number in range(replicas)]
    in_step = [False] * replicas
    events = [(0.0, number) for number in range(replicas)]  # a heap of (seconds, replica): when a step may begin
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
