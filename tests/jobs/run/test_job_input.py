"""What a request is called in the journal."""

from __future__ import annotations

from typing import Any

from lopa_dist.engine.request import Request
from lopa_dist.jobs.run.job_input import request_id
from lopa_dist.tasks.task import Item

REQUEST = Request(0, [1, 2], 8, 77)


def named(request: Request = REQUEST, custom_id: str = "a", **more: Any) -> str | None:
    return request_id(Item(custom_id, **more), request)


def test_a_request_is_the_same_when_its_text_would_be() -> None:
    assert named(Request(4, [1, 2], 8, 77)) == named()
    others = [Request(4, [1, 3], 8, 77), Request(4, [1, 2], 9, 77), Request(4, [1, 2], 8, 78)]
    assert len({named(), named(custom_id="b"), *map(named, others)}) == 5


def test_what_it_is_judged_by_makes_another_request() -> None:
    assert len({named(), named(reference="5"), named(reference=["5"]), named(reference=("def f():", "f()"))}) == 4
    assert named(stop=("5",)) != named(reference=["5"])


def test_other_stop_strings_make_another_request() -> None:
    assert named() == named(stop=())
    assert len({named(), named(stop=("x",)), named(stop=("y",))}) == 3
