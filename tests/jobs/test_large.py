"""What a request takes of memory, counted in bytes: a job may have a million."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.folder.batch_output import line_of, write_batch_output
from lopa_dist.jobs.folder.journal import Journal
from lopa_dist.jobs.folder.merged import merge
from lopa_dist.jobs.run.job_input import JobInput
from lopa_dist.jobs.run.prompts import Encoder
from lopa_dist.tasks.batch import Batch
from tests.jobs.run.test_job import config

Result = TypeVar("Result")
COUNT = 8_000
ENTRY: dict[str, Any] = {
    "at": 1.5,
    "work": {"rows": 400, "prompt_tokens": 50},
    "figures": {"tokens": 40, "forwards": 9, "seconds": 0.5, "first_step_seconds": 0.1, "filled": 64, "correct": None},
    "line": {"custom_id": "a", "text": "word " * 200, "finish_reason": "stop", "tpf": 4.4},
}


def bytes_a_request(act: Callable[[], Result]) -> tuple[Result, float, float]:
    """What an act returns, and what it holds at its end and at most."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = act()
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, (held - before) / COUNT, (most - before) / COUNT


@pytest.fixture(scope="module")
def read(
    tmp_path_factory: pytest.TempPathFactory, embedded_model: Any, embedded_tokenizer: Any
) -> tuple[JobInput, float, float]:
    """Many long prompts, as a job reads them."""
    source = tmp_path_factory.mktemp("large") / "in.jsonl"
    prompt = "Ann has 3 books . " * 10
    with source.open("w") as out:
        out.writelines(json.dumps({"custom_id": f"request-{n:07}", "prompt": prompt}) + "\n" for n in range(COUNT))
    encoder = Encoder(config(TaskConfig()), embedded_model.config, embedded_tokenizer)
    encoder.encode(0, next(iter(Batch(str(source)).items())))  # what is made once
    return bytes_a_request(lambda: JobInput(encoder, Batch(str(source)).items(), named=True))


def test_reading_keeps_next_to_nothing(read: tuple[JobInput, float, float]) -> None:
    job_input, held, most = read
    assert len(job_input) == COUNT
    assert job_input.items[777].custom_id == "request-0000777"
    assert held < 150  # of which 25 for its id and flag, and what is fixed: a few blocks of 256 requests
    assert most < 700  # until all ids are known to differ; and a thousand requests in all forms


def test_resuming_and_ending_hold_places_not_texts(read: tuple[JobInput, float, float], tmp_path: Path) -> None:
    job_input = read[0]
    journal = Journal(tmp_path)
    journal.folder.mkdir()
    for replica in range(2):
        with (journal.folder / f"001-{replica}.jsonl").open("w") as out:
            names = [job_input.ids[n] for n in range(replica, COUNT, 2)]
            out.writelines(json.dumps({"id": name, **ENTRY}) + "\n" for name in names)
    tries = [bytes_a_request(lambda ids=ids: journal.done(ids)) for ids in (deepcopy(job_input.ids), job_input.ids)]
    for (done, *_), _, _ in tries:
        assert sum(done) == COUNT
    assert min(most for *_, most in tries) < 300  # threads of earlier tests may take some meanwhile, too
    merged, held, most = bytes_a_request(
        lambda: merge(journal, tmp_path, job_input.ids, job_input.rejection, range(COUNT))
    )
    assert len(merged.figures) == COUNT
    assert held < 150  # of which 64 are figures
    assert most < 350
    write = lambda: write_batch_output(tmp_path, lambda: map(line_of, job_input.items), "m")  # noqa: E731
    assert bytes_a_request(write)[2] < 150
    assert bytes_a_request(lambda: job_input.digest("x"))[2] < 150
    with (tmp_path / "results.jsonl").open() as lines:
        assert [json.loads(line)["index"] for line in lines] == list(range(COUNT))
