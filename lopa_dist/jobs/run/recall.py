"""What a resumed job drafts and learns from: the answers that its earlier attempts have written."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lopa_dist.jobs.folder.journal import Journal, attempt_of
from lopa_dist.jobs.folder.packed import RequestIds
from lopa_dist.parallel.group import Group

MOST_ANSWERS = 4096  # the last ones
MOST_CHARACTERS = 1 << 20  # of all these answers


class Recalled(NamedTuple):
    """An answer of an earlier attempt."""

    number: int  # of its request in the input; -1 if the input no longer has it
    tokens: list[int]
    finish_reason: str


def recall(
    journal: Journal, attempt: int, ids: RequestIds, tokenizer: PreTrainedTokenizerBase, group: Group
) -> list[Recalled]:
    """Return the last answers of a job's earlier attempts, the last one first.

    Rank 0 reads them and all ranks get the same, because the ranks of a replica must propose the same drafts. The
    answers' texts are tokenized again. If the model wrote other tokens, a draft may be wrong, but no text.

    Args:
        journal: of the job.
        attempt: the number of the one that runs.
        ids: of all requests; only rank 0's are read.
        tokenizer: of the model.
        group: all ranks.
    """
    own = json.dumps(list(last_texts(journal, attempt, ids))) if group.world.rank == 0 else ""
    found = json.loads(group.store.broadcast("texts", own))
    return [
        Recalled(number, tokenizer(text, add_special_tokens=False).input_ids, reason) for number, text, reason in found
    ]


def last_texts(journal: Journal, attempt: int, ids: RequestIds) -> Iterator[tuple[int, str, str]]:
    """Yield the last answers that attempts before `attempt` wrote to the journal, the last one first.

    Each is the number of its request in the input, its text and its finish reason.
    """
    lines = (
        (index, entry.get("line"))
        for index, entry, where in journal.entries_of(ids)
        if attempt_of(where.part) < attempt
    )
    texts = deque(
        ((index, line["text"], line.get("finish_reason", "")) for index, line in lines if line and line.get("text")),
        maxlen=MOST_ANSWERS,
    )
    room = MOST_CHARACTERS
    while texts and room > len(texts[-1][1]):
        answer = texts.pop()
        room -= len(answer[1])
        yield answer
