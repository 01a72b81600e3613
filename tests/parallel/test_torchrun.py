"""torchrun's end: that of its ranks where these were stopped in order, a failure everywhere else."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lopa_dist.parallel import torchrun
from lopa_dist.parallel.stop import STOPPED


@pytest.mark.parametrize(
    ("statuses", "quiet"),
    [
        ([STOPPED], True),
        ([STOPPED, -15], True),
        ([143, STOPPED], True),
        ([1], False),
        ([STOPPED, 1], False),
        ([-15], False),
    ],
)
def test_ranks_that_were_stopped_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], quiet: bool
) -> None:
    failures = {rank: ProcessFailure(rank, 0, status, "<N/A>") for rank, status in enumerate(statuses)}

    def failing() -> None:
        raise ChildFailedError("lopa_dist", failures)

    monkeypatch.setattr(torchrun, "torchrun", failing)
    with pytest.raises(SystemExit if quiet else ChildFailedError) as ended:
        torchrun.main()
    assert not quiet or ended.value.code == STOPPED
