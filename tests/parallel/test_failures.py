"""A rank's own error is announced to the others, and what they wait for in vain is explained."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lopa_dist.checks import UserError
from lopa_dist.parallel import failures as failures_file
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.failures import Failures, broken, first_line
from lopa_dist.parallel.launcher import RankError, World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop, Stopped


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def failures(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failures]:
    """What rank 1 of 2 knows; rank 0 is silent."""
    made = Failures(store, World("torchrun", 1, 2), Mesh(2, 1), "gloo", 60.0, Stop(5.0))
    monkeypatch.setattr(made.stop, "install", lambda before: None)
    monkeypatch.setattr(made.heart, "silent", lambda: [0])
    yield made
    made.watch.close()
    made.heart.close()


def test_the_first_error_is_announced(store: HashStore, failures: Failures) -> None:
    with pytest.raises(ValueError, match="planted"), failures.guard():
        raise ValueError("planted")
    failures.announce(KeyError("later"))
    assert store.get(keys.FAILED) == b"rank 1: ValueError: planted"
    with pytest.raises(RankError, match="rank 1: ValueError: planted"):
        failures.check()


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), b"rank 1: it was interrupted"), (AssertionError(), b"rank 1: AssertionError")],
)
def test_an_error_without_a_message_is_announced(
    store: HashStore, failures: Failures, error: BaseException, said: bytes
) -> None:
    with pytest.raises(type(error)), failures.guard():
        raise error
    assert store.get(keys.FAILED) == said


def test_who_keeps_the_rendezvous_is_blamed_for_its_silence(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(failures_file, "die", said.append)
    for world in (World("torchrun", 0, 2), World("torchrun", 1, 2), World("srun", 1, 2)):
        failures.world = world
        failures._cut_off()
    assert [words.split(" (timeout")[0] for words in said] == [
        "lopa-dist: torchrun's process, which keeps the rendezvous, does not answer: it was suspended, or its host "
        "hangs or is unreachable",
        "lopa-dist: rank 0 of 2 does not answer, or torchrun's process there, which keeps the rendezvous: it was "
        "suspended, or its host hangs or is unreachable",
        "lopa-dist: rank 0 of 2 does not answer: its host, which keeps the rendezvous, hangs or is unreachable",
    ]


def test_a_rank_that_stops_knows_whether_it_is_alone(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s, here, alone in ((0.1, 0, True), (60.0, 1, False)):
        store.set(keys.LEFT, f"{here}")
        made = Failures(store, World("mpirun", 0, 2), Mesh(2, 1), "mpi", limit_s, Stop(5.0))
        monkeypatch.setattr(made.stop, "install", lambda before: None)
        with pytest.raises(Stopped) as error, made.guard():
            raise Stopped("stopped by SIGUSR1")
        assert error.value.alone is alone


def test_a_message_for_people_is_announced_without_its_class(store: HashStore, failures: Failures) -> None:
    with pytest.raises(UserError), failures.guard():
        raise UserError("the disk of /results is full")
    assert store.get(keys.FAILED) == b"rank 1: the disk of /results is full"


def test_an_error_on_one_of_several_hosts_is_announced_with_the_host(store: HashStore, failures: Failures) -> None:
    """A disk that is full may be that host's own."""
    for entry in ("1@n1 ", "0@n7 "):
        store.append(keys.HERE, entry)
    with pytest.raises(UserError), failures.guard():
        raise UserError("No space left on device in /tmp/spool")
    assert store.get(keys.FAILED) == b"rank 1 on n1: No space left on device in /tmp/spool"


def test_a_lost_rank_is_named_with_its_host(store: HashStore, failures: Failures) -> None:
    store.append(keys.HERE, "1@n1 ")
    store.append(keys.HERE, "0@n7 ")
    words = r"^rank 0 of 2 does not answer: killed, hanging or unreachable on n7 \(timeout"
    with pytest.raises(RankError, match=words), failures.guard():
        raise TimeoutError("it took too long")


def test_a_broken_collective_names_the_silent_rank(failures: Failures) -> None:
    words = r"^rank 0 of 2 does not answer: .*seen by rank 1: it took too long"
    with pytest.raises(RankError, match=words), failures.guard():
        raise TimeoutError("it took too long")


def test_a_slow_rank_is_named_by_all_and_by_itself(
    store: HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is at an fsync for longer than the timeout. When it comes back, rank 1 is gone, but not to blame."""
    failures.mesh = Mesh(1, 2)
    monkeypatch.setattr(failures.heart, "silent", list)
    store.set(keys.WAITS.format(0), "2")
    store.set(keys.WAITS.format(1), "3")
    said = r"^rank 0 of 2 is still at an earlier step: busy or hanging, though alive \(seen by rank 1: Timed out\)$"
    with pytest.raises(RankError, match=said), failures.guard():
        raise RuntimeError("[gloo/transport] Timed out")
    slow = Failures(store, World("torchrun", 0, 2), Mesh(1, 2), "gloo", 60.0, Stop(5.0))
    monkeypatch.setattr(slow.heart, "silent", lambda: [1])
    with pytest.raises(RankError, match=said), slow.guard():
        raise RuntimeError("[gloo/transport] Connection closed by peer")


def test_a_stop_before_the_first_step_is_left_for_the_others(store: HashStore, failures: Failures) -> None:
    with pytest.raises(Stopped), failures.guard():
        raise Stopped("stopped by SIGTERM before the first step")
    with pytest.raises(Stopped, match="SIGTERM"):
        failures.check_early()


def test_a_stop_is_shared(store: HashStore, failures: Failures) -> None:
    failures.check()
    assert not failures.stop.asked
    store.set(keys.STOP, "SIGUSR1")
    failures.check()
    assert (failures.stop.asked, failures.stop.signal) == (True, "SIGUSR1")


def test_a_rank_at_an_earlier_step_is_named(
    store: HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures.mesh = Mesh(1, 2)
    monkeypatch.setattr(failures.heart, "silent", list)
    assert failures.overdue(False) is None
    store.set(keys.WAITS.format(1), "3")
    assert str(failures.overdue(True)).startswith("rank 0 of 2 is still at an earlier step")
    store.set(keys.WAITS.format(0), "3")
    assert str(failures.overdue(True)).startswith("what rank 1 waits for does not come")


def test_sigterm_ends_a_rank_only_when_another_is_lost(
    store: HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(failures_file, "die", lambda message, status: said.append((message, status)))
    failures.end_if_lost()
    assert said == [
        (
            "lopa-dist: rank 0 of 2 does not answer: killed, hanging or unreachable "
            "(seen by rank 1, which was told to end)",
            143,
        )
    ]
    with monkeypatch.context() as patch:
        patch.setattr(failures.heart, "silent", list)
        failures.end_if_lost()
    store.add(keys.LEFT, 1)
    failures.end_if_lost()
    assert len(said) == 1, "the silent one has left in order"


def test_a_rank_that_was_suspended_blames_no_other(
    store: HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm wakes it with SIGCONT and SIGTERM; by then the others, which it could not hear, have named it and left."""
    said: list[str] = []
    monkeypatch.setattr(failures_file, "die", lambda message, status: said.append(message))
    monkeypatch.setattr(failures.pauses, "longest_s", 1000.0)
    failures.end_if_lost()
    assert said[0].startswith("lopa-dist: rank 1 of 2 did not answer for 1000 s: its process was suspended")
    store.set(keys.FAILED, "rank 1 of 2 does not answer")
    failures.end_if_lost()
    assert said[1] == "lopa-dist: rank 1 of 2 does not answer"


def test_a_stop_after_which_the_store_is_gone_is_still_a_stop(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(failures_file, "never_again", gone)
    with pytest.raises(Stopped, match="SIGTERM"), failures.guard():
        raise Stopped("stopped by SIGTERM before the first step")


def test_errors_of_collectives_are_known() -> None:
    assert broken(RuntimeError("[../gloo/transport] Connection closed by peer"))
    assert broken(TimeoutError("no answer"))
    with pytest.raises(dist.DistStoreError) as caught:  # gloo waits so for the others when it begins
        HashStore().wait(["what no rank wrote"], timedelta(seconds=0.01))
    assert broken(caught.value)
    assert not broken(RuntimeError("shapes do not match"))
    assert not broken(TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/nfs/prompts.jsonl"))
    assert first_line(RuntimeError("[enforce at x.cc:12] it broke\nand more")) == "it broke"
