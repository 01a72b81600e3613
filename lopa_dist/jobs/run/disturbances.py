"""What makes a job's times unreliable: programs that used its cores, and pauses of its machine."""

from __future__ import annotations

import torch

from lopa_dist.config import Config
from lopa_dist.jobs.setup.device import cores, threads
from lopa_dist.jobs.setup.other_programs import KEPT_BUSY, OtherPrograms, contended
from lopa_dist.jobs.show.report import duration
from lopa_dist.parallel.group import Group


class Disturbances:
    """Notices what disturbs this rank from now on.

    Args:
        config: without any ``auto``.
        group: notices pauses.
        device: where the model is. Other programs disturb only work on a CPU. They cannot be told from other ranks on
            the same machine, so they are noticed only if there are none.
    """

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        self.group, self.paused_s = group, group.failures.pauses.seconds
        self.others = OtherPrograms() if device.type == "cpu" and group.world.local_size == 1 else None
        self.threads, self.usable = threads(config, group.world).number, cores(group.world).number

    def look(self) -> tuple[float | None, list[str]]:
        """Return how many cores other programs kept busy, None if that is not known, and the warnings."""
        busy, warnings = self.others.busy() if self.others else None, []
        if busy is not None and contended(busy, self.threads, self.usable):
            warnings.append(
                f"{KEPT_BUSY} {busy:.1f} of {self.usable} cores busy while this job generated with {self.threads} "
                f"thread{'s' * (self.threads > 1)}: its times and tokens per second are not reliable"
            )
        if paused_s := self.group.failures.pauses.seconds - self.paused_s:
            warnings.append(
                f"the job stood still for {duration(paused_s)} while it generated, because it was suspended "
                "or its machine did nothing: its times and tokens per second include that"
            )
        return busy, warnings
