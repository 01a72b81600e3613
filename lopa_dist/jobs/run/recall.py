"""What a resumed job drafts from: the answers that its earlier attempts have written."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from lopa_dist.engine.drafter import Drafter
from lopa_dist.jobs.folder.journal import Journal, attempt_of
from lopa_dist.parallel.group import Group

MOST_ANSWERS = 4096  # the last ones
MOST_CHARACTERS = 1 << 20  # of all these answers


def recall(drafter: Drafter, journal: Journal, attempt: int, tokenizer: PreTrainedTokenizerBase, group: Group) -> None:
    """Add the last answers of a job's earlier attempts to the table that `drafter` drafts from.

    Rank 0 reads them and all ranks add the same, because the ranks of a replica must propose the same drafts. The
    answers' texts are tokenized again. If the model wrote other tokens, a draft may be wrong, but no text.
    """
    own = json.dumps(list(last_texts(journal, attempt))) if group.world.rank == 0 else ""
    for text in json.loads(group.store.broadcast("texts", own)):
        drafter.remember(tokenizer(text, add_special_tokens=False).input_ids)


def last_texts(journal: Journal, attempt: int) -> Iterator[str]:
    """Yield the texts of the last answers that attempts before `attempt` wrote to the journal, the last one first."""
    lines = (entry.get("line") for entry, location in journal.entries() if attempt_of(location.part) < attempt)
    texts = deque((line["text"] for line in lines if line and line.get("text")), maxlen=MOST_ANSWERS)
    room = MOST_CHARACTERS
    while texts and room > len(texts[-1]):
        text = texts.pop()
        room -= len(text)
        yield text
