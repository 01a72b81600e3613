"""`LLM` on two ranks: the same outputs on every rank as in one process, in call after call.

With `auto`, six prompts make the ranks replicas, and one prompt makes them branch ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_dist import LLM
from tests.system import forked
from tests.test_llm import PROBLEMS

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROGRAM = """
import gc, json, os, sys
import torch
from lopa_dist import LLM
from lopa_dist.parallel.calls import MEETINGS
from lopa_dist.parallel import group
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop
group.PART = 100  # outputs travel in many parts
folder, prompts, *settings = json.loads(sys.argv[1])
llm = LLM("embedded", *settings)
try:
    llm.generate([prompts[0], ""])
except ValueError as error:
    assert "prompts[1]" in str(error)
calls = [llm.generate(some, "embedded_lopa", branches=3) for some in (prompts, prompts[:1])]
answers = [[(o.text, o.tokens, o.forwards) for o in outputs] for outputs in calls]
answers.append(llm.score(prompts[:3], [" Tom", " has 3 apples", " x"], samples=4))
open(f"{folder}/{llm.world.rank}.json", "w").write(json.dumps(answers))
gc.collect()
gc.disable()  # what a call used ends with it
held = []
for _ in range(12):
    meeting = group.Group(llm.world, Mesh(1, 2), "auto", 20.0, torch.device("cpu"), Stop(0.0), next(MEETINGS))
    with meeting.failures.guard():
        meeting.comm.all_gather(torch.ones(3))
    held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
del held[0]
assert max(files for files, _ in held) < min(files for files, _ in held) + 6, held
assert max(threads for _, threads in held) < min(threads for _, threads in held) + 6, held
"""


REFUSED = """
import json, sys, time
from lopa_dist import LLM
from lopa_dist.jobs.setup.build import EngineBuilder
folder, prompts, *settings = json.loads(sys.argv[1])
llm = LLM("embedded", *settings)
rank, told, texts = llm.world.rank, [], []
bad = [
    lambda: llm.generate(prompts[rank:], max_new_tokens=4),
    lambda: llm.generate(prompts, max_new_tokens=4, tau_conf=[0.9, 7][rank]),
    lambda: llm.generate([prompts[0], ["x", ""][1 - rank]], max_new_tokens=4),
    lambda: llm.score(prompts, [" x"] * 6, samples=1) if rank else llm.generate(prompts, max_new_tokens=4),
]
for call in bad:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        told.append([type(error).__name__, str(error)])
    texts.append([one.text for one in llm.generate(prompts, max_new_tokens=4)])
make, taken = EngineBuilder.scoring_engine, []
EngineBuilder.scoring_engine = lambda self, decode, options, *rest: (
    taken.append(options.max_sequences), make(self, decode, options, *rest)
)[1]
llm.score(prompts[:5], [" x"] * 5, samples=1)
open(f"{folder}/{rank}.json", "w").write(json.dumps([told, texts, taken]))
"""


def ranks(folder: Path, count: int, *settings: str, program: str = PROGRAM) -> list[Any]:
    """What each rank got."""
    (folder / "program.py").write_text(program)
    arguments = json.dumps([str(folder), PROBLEMS[:6], "parallel.threads=1", *settings])
    started = forked.start(str(folder / "program.py"), count, arguments, log=folder / "log")
    assert started.wait() == [0] * count, started.printed()[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What one process gets."""
    llm = LLM("embedded", "parallel.threads=1")
    return [
        [[output.text, output.tokens, output.forwards] for output in llm.generate(some, "embedded_lopa", branches=3)]
        for some in (PROBLEMS[:6], PROBLEMS[:1])
    ] + [[list(one) for one in llm.score(PROBLEMS[:3], [" Tom", " has 3 apples", " x"], samples=4)]]


@pytest.mark.parametrize("axis", ["data=auto", "tensor=2"])
def test_two_ranks_give_what_one_gives(tmp_path: Path, alone: list[Any], axis: str) -> None:
    for *outputs, scores in ranks(tmp_path, 2, f"parallel.{axis}"):
        assert outputs == alone[:-1]
        for (*found, tokens), (*wanted, none) in zip(scores, alone[-1], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
            assert tokens is none is None


def test_after_a_call_that_some_ranks_refuse_there_may_be_another(tmp_path: Path) -> None:
    """Each rank is told at once what was wrong with its own call, or with the other rank's."""
    [told_0, texts_0, taken_0], [told_1, texts_1, taken_1] = ranks(tmp_path, 2, "parallel.branch=1", program=REFUSED)
    assert all(texts == texts_0[0] and any(texts) for texts in texts_0 + texts_1)
    for (kind, own), (other, heard), words in zip(
        [told_1[0], told_1[1], told_0[2], told_1[3]],
        [told_0[0], told_0[1], told_1[2], told_0[3]],
        ["would not do the same as rank 0", "decode.tau_conf=7", "prompts[1]", "would not do the same as rank 0"],
        strict=True,
    ):
        assert (kind, other) == ("ValueError", "RankError")
        assert words in own
        assert words in heard
    assert taken_0 == taken_1 == [3], "each replica takes its share of five"
