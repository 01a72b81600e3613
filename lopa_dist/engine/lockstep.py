"""What the ranks of a replica do together in every step: run the forward, gather its records, and agree to go on.

Every rank brings a `StopLevel` to each step, and all ranks follow the highest of them. So all ranks stop at the same
step, whichever was asked to stop or failed. Each rank also proposes how far to look ahead in the next step
(`LookaheadPolicy`), and all ranks follow the first one's proposal. Every other decision is made by each rank alone,
from the same records, and must be the same on all ranks: that is checked if the user's own code takes part
(`Agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode.winner import Winner
from lopa_dist.engine.agreement import Agreement
from lopa_dist.engine.forecast import Choice
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.engine.running_batch import RunningBatch, Step
from lopa_dist.engine.statistics import Statistics
from lopa_dist.parallel.communicator import Communicator, PeerFailure
from lopa_dist.parallel.failures import broken
from lopa_dist.parallel.stop import StopLevel
from lopa_dist.rows import ForwardBatch
from lopa_dist.staging import to_device


class Lockstep:
    """Keeps the ranks of a replica in step.

    Args:
        comm: the branch group.
        tensor: the group that the model is split over.
        requested: returns what this rank was asked to do.
        statistics: records the times of phases.
        own_parts: as in `Agreement`.
    """

    def __init__(
        self,
        comm: Communicator,
        tensor: Communicator,
        requested: Callable[[], StopLevel],
        statistics: Statistics,
        own_parts: Mapping[str, str],
    ) -> None:
        self.comm, self.tensor, self.requested, self.statistics = comm, tensor, requested, statistics
        self.agreement = Agreement(own_parts, comm, tensor)
        self.level = StopLevel.RUN  # what all ranks agreed to do
        # on the device, the level and choice of each branch rank in this step; empty for one rank alone
        self.levels = torch.empty(0)
        self.own_level = StopLevel.RUN
        self.error: Exception | None = None  # of this rank in this step, from `attempt`
        self.choice = Choice(0, 0)  # how far to look ahead in the next step: the first rank's proposal

    def must_leave(self) -> bool:
        """Return whether this rank was told to leave at once, and no other rank waits for it; then `level` says so."""
        leaves = self.comm.size == self.tensor.size == 1 and self.requested() == StopLevel.ABORT
        self.level = StopLevel.ABORT if leaves else self.level
        return leaves

    def least(self, value: int, device: torch.device) -> int:
        """Return the least of all ranks' values, from which all ranks then decide the same."""
        for comm in (self.tensor, self.comm):
            if comm.size > 1:
                value = int(comm.all_gather(torch.tensor([value], device=device)).min())
        return value

    def forward(self, runner: Runner, batch: ForwardBatch, step: Step) -> tuple[Prepared | None, Tensor]:
        """Run this rank's share of a forward, and return it with all ranks' records.

        If it fails on one of several branch ranks, the step goes on until `finish`, where all of them learn of it. They
        make the same calls until then.

        Args:
            runner: runs the forward.
            batch: this rank's rows.
            step: the step that the rows are for.

        Returns:
            This rank's share as it ran, for `commit`, None if it failed; and records ``[ranks, branches, columns, 3 or
            5]`` int32.
        """
        prepared = None
        if self.error is None:  # else a chunk before it failed
            with self.attempt():
                prepared = runner.prepare(batch, step.slots)
                self.statistics.lap("host")
                records = runner.forward(prepared)
                self.statistics.lap("forward")
        if self.error:
            records = batch.heads.no_records(runner.record_size)
        self.own_level = StopLevel.FAILED if self.error else self.requested()
        gathered = self.gather(records, step.proposal)
        self.statistics.lap("all_gather")
        return prepared, gathered

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Hold an exception back until `finish`, when the other branch ranks have been told of it.

        It is raised at once if there are no others, or if a collective broke, which they notice themselves.
        """
        try:
            yield
        except Exception as error:
            if self.comm.size == 1 or broken(error):
                raise
            self.error = self.error or error

    def gather(self, records: Tensor, proposal: Choice) -> Tensor:
        """Return the records of all branch ranks. Levels and proposals travel with them and stay on the device."""
        if self.comm.size == self.tensor.size == 1:
            self.levels = records.new_empty(0)
            return records[None]
        own = to_device(np.array([self.own_level, *proposal], np.int32), records.device)
        if self.tensor.size > 1:  # tensor ranks receive a signal at different moments
            gathered = self.tensor.all_gather(own)
            own = torch.cat([gathered[:, 0].amax(0, keepdim=True), gathered[0, 1:]])
        if self.comm.size == 1:
            self.levels = own
            return records[None]
        gathered = self.comm.all_gather(torch.cat([records.flatten(), own]))
        self.levels = gathered[:, -len(own) :].flatten()
        return gathered[:, : -len(own)].view(self.comm.size, *records.shape)

    def finish(self, batch: RunningBatch, step: Step, winner: Winner) -> StopLevel:
        """Copy the state to the host, and return what all ranks do: the highest of their levels.

        All ranks take the first rank's `choice`. The copy is all that the host learns about a step.

        Raises:
            Exception: this rank's forward failed (`attempt`).
            PeerFailure: another rank's forward failed.
            UserError: code of the user's own decided differently on different ranks.
        """
        extra = self.levels
        if self.agreement.compares:
            extra = torch.cat([extra, self.agreement.gather(step.state)])
        if self.error:
            error, self.error = self.error, None
            raise error
        received = batch.to_host(step, winner, extra)
        levels, fingerprints = received[: len(self.levels)], received[len(self.levels) :]
        values = levels[:: 1 + len(step.proposal)].tolist()
        self.choice = Choice(*levels[1 : 1 + len(step.proposal)].tolist()) if values else step.proposal
        if StopLevel.FAILED in values:
            raise PeerFailure(f"the forward of branch rank {values.index(StopLevel.FAILED)} failed")
        self.agreement.check(fingerprints)
        self.level = StopLevel(max(values, default=self.own_level))
        return self.level
