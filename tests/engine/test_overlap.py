"""What a step leaves to do on the host is done while the device works on the next one."""

from __future__ import annotations

from typing import Any

import pytest

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.lockstep import Lockstep
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.running_batch import RunningBatch
from lopa_dist.engine.statistics import Statistics
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.test_loop import BASE, random_requests, texts

FORWARD_S = 5.0


class Device:
    """A device that takes `FORWARD_S` for a forward, and a clock that only it and the host's work move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy_until = 0.0
        self.events: list[str] = []
        forward, to_host, step = Lockstep.forward, RunningBatch.to_host, Statistics.step

        def launch(*given: Any) -> Any:
            self.events.append("launch")
            self.busy_until = max(self.now, self.busy_until) + FORWARD_S
            return forward(*given)

        def synchronise(*given: Any) -> Any:
            self.events.append("synchronise")
            self.now = max(self.now, self.busy_until)
            return to_host(*given)

        def count(*given: Any) -> None:
            self.events.append("count")
            step(*given)

        monkeypatch.setattr(Lockstep, "forward", launch)
        monkeypatch.setattr(RunningBatch, "to_host", synchronise)
        monkeypatch.setattr(Statistics, "step", count)

    def work(self, seconds: float, what: str) -> None:
        self.events.append(what)
        self.now += seconds


def test_the_consumer_works_while_the_device_does(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(1, 12, BASE.max_new_tokens)
    wanted = texts(small_model, BASE, requests)
    device = Device(monkeypatch)
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4))
    engine.meanwhile.append(lambda engine: device.work(1, "meanwhile"))
    found = {}
    for generation in engine.generate(requests):
        device.work(0.5, "yield")
        found[generation.request.index] = generation.tokens, generation.forwards
    assert found == wanted
    steps = device.events.count("launch")
    assert steps > 5
    # of every step but the last: counted, shown and handed out between the next launch and the wait for it
    assert device.events[:2] == ["launch", "synchronise"]
    segments = "|".join(device.events[2:]).split("launch|")
    assert segments[0] == ""
    for number, segment in enumerate(segments[1:], 1):
        events = segment.strip("|").split("|")
        between, after = events[: events.index("synchronise")], events[events.index("synchronise") + 1 :]
        assert (between[0], between[-1]) == ("count", "meanwhile")
        assert set(between[1:-1]) <= {"yield"}
        assert not after or number == steps - 1
    # so the host's work costs nothing, but for that after the last step
    last = device.events[::-1].index("synchronise")
    after_last = sum({"meanwhile": 1.0, "yield": 0.5}.get(event, 0.0) for event in device.events[-last:])
    assert device.now == steps * FORWARD_S + after_last


def test_every_step_is_counted_and_shown_once(small_model: Transformer) -> None:
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4))
    seen: list[tuple[str, int]] = []
    engine.on_step.append(lambda engine: seen.append(("after", engine.statistics.steps)))
    engine.meanwhile.append(lambda engine: seen.append(("meanwhile", engine.statistics.steps)))
    for _ in range(2):  # a generation that nobody finishes leaves nothing to the next
        next(engine.generate(random_requests(1, 12, BASE.max_new_tokens)))
    seen.clear()
    before = engine.statistics.steps
    assert len(list(engine.generate(random_requests(2, 6, BASE.max_new_tokens)))) == 6
    steps = (engine.statistics.steps - before) or 1
    assert seen == [
        (what, before + number + offset) for number in range(steps) for what, offset in (("after", 0), ("meanwhile", 1))
    ]
