"""Answers of the package's models to problems, and figures about these answers.

An answer's tokens are counted up to the first EOS. All forwards of a sequence are counted, prefill included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.task import Item, Task

PUBLISHED: dict[str, Any] = {
    "verify": "confidence",
    "drafts": 0,
}  # decoding without verification: plain decoding, LoPA and the control


COLUMNS = {
    "accuracy": "{accuracy:.1%}",
    "tokens per forward": "{tpf:.2f}",
    "rows per token": "{rows_per_token:.1f}",
    "tokens/s": "{tokens_per_s:.0f}",
}


def load(path: str = "embedded", **options: Any) -> EngineBuilder:
    """Return a builder with the model at `path` loaded, in fp32 by default, on one thread of the CPU.

    `options` are more arguments of `ModelOptions`.
    """
    torch.set_num_threads(1)
    builder = EngineBuilder(ModelOptions(**{"path": path, "dtype": "fp32", **options}), torch.device("cpu"))
    builder.load(warn=False)
    return builder


def requests_of(items: Sequence[Item], tokenizer: Any, max_new_tokens: int) -> list[Request]:
    """Return a request for the chat of each of the `items`, in their order."""
    requests = []
    for i, item in enumerate(items):
        text = tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        requests.append(Request(i, ids, max_new_tokens, request_key(0, item.custom_id)))
    return requests


@dataclass
class Answers:
    """Answers to problems, and what generating them took."""

    tokens: list[list[int]]  # the answer to each problem
    accuracy: float
    seconds: float
    processor_s: float
    engine: Engine

    @property
    def total(self) -> int:
        """The number of tokens in all answers."""
        return sum(map(len, self.tokens))

    @property
    def figures(self) -> dict[str, Any]:
        """Accuracy, tokens per forward, rows per token, and tokens per second of wall-clock time.

        Only the last one depends on the machine, unless the number of drafts follows the times of steps.
        """
        return {
            "accuracy": self.accuracy,
            "tpf": self.total / self.engine.statistics.forwards,
            "tokens_per_s": self.total / self.seconds,
            "rows_per_token": self.engine.statistics.rows / self.total,
        }


def answer(builder: EngineBuilder, config: DecodeConfig, task: Task, items: Sequence[Item], in_flight: int) -> Answers:
    """Generate the answers to the `items` of a task, score them, and return them."""
    requests = requests_of(items, builder.tokenizer, config.max_new_tokens)
    engine = builder.engine(config, EngineConfig(in_flight))
    clock, processor = time.perf_counter(), time.process_time()
    done = sorted(engine.generate(requests), key=lambda generation: generation.request.index)
    seconds, processor_s = time.perf_counter() - clock, time.process_time() - processor
    tokens = [generation.tokens for generation in done]
    scores = [task.score(item, builder.tokenizer.decode(ids)) for item, ids in zip(items, tokens, strict=True)]
    right = sum(bool(score.correct) for score in scores if score)
    return Answers(tokens, right / len(scores), seconds, processor_s, engine)
