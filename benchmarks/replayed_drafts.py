"""Measure drafts from text without a model: replay texts that are known, as if a model wrote them.

    python -m benchmarks.replayed_drafts DATA            # a folder with gsm8k_test.jsonl and HumanEval.jsonl.gz
    python -m benchmarks.replayed_drafts DATA --answers outputs/first-run/results.jsonl

The drafter in C drafts for 64 texts at a time, and what a greedy model would accept is what the text says next. That
takes seconds, where a model takes minutes, so ways of drafting can be compared on texts of many kinds: solutions of
GSM8K and of HumanEval, functions of Python's standard library, and the answers of runs (whose results.jsonl was written
with `logging.token_ids=true`). Words, numbers and signs are the tokens of texts that have none.

`tokens per forward` and `rows per token` are those of 8 drafts, if every draft that is right with a chance of at least
5 or 40 % has a row. Microseconds are those of drafting for one text.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Result, machine, show, write
from lopa_dist.decode import HostState
from lopa_dist.engine.c_drafter import CDrafter
from lopa_dist.engine.drafter import Drafter, Masks
from lopa_dist.engine.work import Work
from lopa_dist.jobs.run.prompts import common_prefix
from lopa_dist.tasks.rows import rows

Text = tuple[list[int], list[int]]  # tokens of a prompt, and of the answer to it
EOS, DRAFTS, SLOTS = 0, 8, 64
WORTHS = (0.05, 0.4)
TOKEN = re.compile(r" ?[A-Za-z]{1,6}|\d|\s+|[^\sA-Za-z\d]")
FUNCTIONS = 900  # of Python's library
COLUMNS = {
    "texts": "{texts}", "least chance": "{worth}", "tokens per forward": "{tokens_per_forward:.3f}",
    "rows per token": "{rows_per_token:.3f}", "us": "{us:.2f}",
}  # fmt: skip


def in_tokens(pairs: Sequence[tuple[str, str]]) -> list[Text]:
    """Return prompts and answers as tokens, with an end-of-text after each answer."""
    ids: dict[str, int] = {}

    def tokens(text: str) -> list[int]:
        return [ids.setdefault(token, 1 + len(ids)) for token in TOKEN.findall(text)]

    return [(tokens(prompt), [*tokens(answer), EOS]) for prompt, answer in pairs]


def functions() -> list[tuple[str, str]]:
    """Return functions of Python's standard library: the line that begins each, and the rest."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:90]:
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            text = (ast.get_source_segment(source, node) or "") if isinstance(node, ast.FunctionDef) else ""
            if 200 < len(text) < 1500:
                first, _, rest = text.partition("\n")
                found.append((first + "\n", rest))
    random.Random(0).shuffle(found)
    return found[:FUNCTIONS]


def texts_of(data: Path, answers: Sequence[Path]) -> Iterator[tuple[str, list[Text]]]:
    """Yield the names of the texts, and the texts."""
    yield "GSM8K", in_tokens([(one["question"], one["answer"]) for one in read(data / "gsm8k_test.jsonl")])
    yield (
        "HumanEval",
        in_tokens([(one["prompt"], one["canonical_solution"]) for one in read(data / "HumanEval.jsonl.gz")]),
    )
    yield "Python's library", in_tokens(functions())
    for path in answers:
        yield str(path), [([EOS], [*(1 + token for token in one["token_ids"]), EOS]) for one in read(path)]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON Lines.

    Raises:
        ValueError: it cannot be read, or a line cannot.
    """
    found = []
    for row in rows(str(file), "texts"):
        if row.value is None or row.error:
            raise ValueError(f"{file}, line {row.number}: {row.error}")
        found.append(row.value)
    return found


def replay(drafter: Drafter, texts: Sequence[Text], worth: float) -> Result:
    """Return how drafts of at least the chance `worth` would have fared, with `SLOTS` texts in flight.

    An answer's first token is known, as the pending token of a sequence is.
    """
    host = HostState._make(np.zeros((len(HostState._fields), SLOTS), np.int64))
    host.done.fill(1)
    masks = Masks(np.zeros((SLOTS, 1), np.int64), np.zeros((SLOTS, 1)), np.zeros(SLOTS, np.int64))
    due, places, total = np.zeros(SLOTS, bool), np.zeros((2, 4), np.int64), Work()
    left, answers = iter(texts), dict[int, list[int]]()  # by slot
    forwards = computed = tokens = 0
    seconds = 0.0
    while True:
        for slot in sorted({*range(SLOTS)} - answers.keys()):
            if (text := next(left, None)) is None:
                break
            prompt, answers[slot] = text
            drafter.admit(slot, [*prompt, answers[slot][0]], Work())
            host.done[slot], host.complete[slot], host.limit[slot], due[slot] = 0, 1, len(answers[slot]) + DRAFTS + 2, 1
        if not answers:
            return {
                "tokens_per_forward": tokens / forwards, "rows_per_token": computed / tokens,
                "us": 1e6 * seconds / forwards,
            }  # fmt: skip
        began = time.thread_time()
        made = drafter.draft_due(due, host, places, worth, masks, True)
        seconds += time.thread_time() - began
        slots, written = made.slots, np.zeros((len(made.slots), DRAFTS + 1), np.int64)
        counts = np.zeros(len(slots), np.int64)
        for number, slot in enumerate(slots.tolist()):
            chain, rest = made.tokens[number, : made.counts[number]].tolist(), answers[slot][host.complete[slot] :]
            new = rest[: common_prefix(chain, rest) + 1]
            written[number, : len(new)], counts[number] = new, len(new)
        forwards, computed = forwards + len(slots), computed + len(slots) + int(made.counts.sum())
        tokens += int(counts.sum())
        host.complete[slots] += counts
        drafter.hear(slots, written, counts, masks)
        for slot in slots.tolist():
            if host.complete[slot] >= len(answers[slot]):
                drafter.leave(slot)
                host.done[slot], due[slot] = 1, 0
                del answers[slot]
        drafter.learn(total)


def main() -> None:
    """Measure all texts; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--answers", type=Path, action="append", default=[], metavar="RESULTS.jsonl")
    arguments = parser.parse_args()
    results = [
        {"texts": name, "worth": worth} | replay(CDrafter([EOS], DRAFTS, masks=False), texts, worth)
        for name, texts in texts_of(arguments.data, arguments.answers)
        for worth in WORTHS
    ]
    write("replayed_drafts", machine() | {"rows": results})
    show("Drafts from text, by replaying texts", results, COLUMNS)


if __name__ == "__main__":
    main()
