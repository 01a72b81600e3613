"""Measure what an adapter that learns drafts from a model's own answers gains, and what the learning costs.

    python -m benchmarks.learned_drafts --minutes 20                        # the package's model, shuffled questions
    python -m benchmarks.learned_drafts --model MY/AUTOREGRESSIVE/CHECKPOINT --name autoregressive --kind own
    python -m benchmarks.learned_drafts --adapter outputs/run/drafts        # measures an adapter from an earlier run
    python -m benchmarks.learned_drafts --part rows                         # processor time of a trained mask

An adapter learns from the model's own answers to the first `--answers` prompts of a kind (`benchmarks.text_drafts`).
Then tokens per forward are measured on the next `--held-out` prompts, with drafts from masks, from text, and from both.
The table of text holds the answers from which the adapter learned. Every text is compared with the one that is written
one token at a time.

`--part rows` measures the processor time of a trained mask, in the way of `lopa_dist.learn` and in the plain way: dense
attention over prompt, answer and masks together, gradients for all rows, 192 rows per text. Writes the results to
benchmarks/results/learned_drafts.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.answers import load
from benchmarks.results import Result, replace_rows, show
from benchmarks.text_drafts import CAUSAL, TEMPERATURES, prompts
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.learning import mask_token
from lopa_dist.learn.groups import Answer, GroupBatch, group_batches
from lopa_dist.learn.learning import Answers, Learning
from training.attention import dense
from training.causal import hidden_rows

KINDS = ("own", "shuffled", "samples")
SOURCES = ("masks", "text", "auto")
PLAIN_ROWS = 192  # rows of a text with its groups of masks, in the plain way
KEYS = ("part", "model", "kind", "temperature", "drafts", "draft_from")  # identify a row in the file
SHOWN = {
    "drafts": "{drafts}", "from": "{draft_from}", "tokens per forward": "{tpf:.2f}",
    "rows per token": "{rows_per_token:.2f}", "processor s": "{processor_s:.1f}",
    "equal": "{equal}", "of": "{problems}",
}  # fmt: skip


def written(builder: EngineBuilder, config: DecodeConfig, requests: list[Request], known: Answers) -> Result:
    """Answer the requests, with the text of `known` answers in the table; return the texts and their figures."""
    engine = builder.engine(config, EngineConfig(64))
    engine.take_adapter()
    if engine.drafter and config.draft_from != "masks":
        for one in known.learned:
            engine.drafter.remember(one.tokens)
    processor = time.process_time()
    done = sorted(engine.generate(requests), key=lambda one: one.request.index)
    seconds, tokens = time.process_time() - processor, sum(len(one.tokens) for one in done)
    return {
        "texts": [one.tokens for one in done],
        "tpf": tokens / engine.statistics.forwards,
        "rows_per_token": engine.statistics.rows / tokens,
        "processor_s": seconds,
    }


def own_answers(builder: EngineBuilder, config: DecodeConfig, requests: list[Request]) -> Answers:
    """Return the model's answers to the requests, in the form in which an adapter learns from them."""
    engine = builder.engine(replace(config, drafts=4, draft_from="text"), EngineConfig(64))
    answers = Answers()
    for one in sorted(engine.generate(requests), key=lambda one: one.request.index):
        answers.take(one, builder.shape.eos_ids[0])
    return answers


def measure(builder: EngineBuilder, arguments: argparse.Namespace) -> None:
    """Let an adapter learn, or load one that learned earlier; measure it, and print and write the results."""
    kind, model = arguments.kind, builder.load()
    config = replace(CAUSAL, temperature=arguments.temperature or TEMPERATURES.get(kind, 0.0))
    requests = prompts(builder, kind, arguments.answers + arguments.held_out)
    answers = own_answers(builder, config, requests[: arguments.answers])
    held_out = requests[arguments.answers :]
    mask_id = mask_token(model.config, builder.tokenizer)
    learning = Learning(model, mask_id, arguments.rank, masks=arguments.masks)
    if arguments.adapter:
        if not learning.load(arguments.adapter, builder.revision):
            raise SystemExit(f"{arguments.adapter}: not of this checkpoint, or not of rank {arguments.rank}")
        file = arguments.adapter / "learn.json"
        lesson = json.loads(file.read_text()) if file.exists() else {}
    else:
        torch.set_num_threads(arguments.threads)
        found = learning.lesson(answers, 60 * arguments.minutes)
        lesson = {
            "minutes": found.seconds / 60, "processor_minutes": found.processor_s / 60, "steps": found.steps,
            "rows": found.rows, "acceptance_before": found.before.shares, "acceptance": found.after.shares,
        }  # fmt: skip
        print(json.dumps(lesson), flush=True)
        torch.set_num_threads(1)
        if arguments.keep:
            learning.save(arguments.keep, arguments.model, builder.revision)
            (arguments.keep / "learn.json").write_text(json.dumps(lesson) + "\n")
    name, rows = arguments.name or arguments.model, []
    plain = written(builder, replace(config, drafts=0), held_out, answers)
    before: dict[tuple[int, str], Result] = {}
    for drafts in arguments.drafts if arguments.before else ():
        for source in SOURCES if model.config.has_mask else ("text",):
            way = replace(config, drafts=drafts, draft_from=source)
            before[drafts, source] = written(builder, way, held_out, answers)
    learning.adopt()
    for drafts in arguments.drafts:
        for source in SOURCES:
            result = written(builder, replace(config, drafts=drafts, draft_from=source), held_out, answers)
            texts = result.pop("texts")
            row = {"part": "drafts", "model": name, "kind": kind, "temperature": config.temperature}
            row |= {"drafts": drafts, "draft_from": source, "answers": len(answers), "problems": len(texts)} | result
            row |= {"equal": sum(a == b for a, b in zip(texts, plain["texts"], strict=True))}
            row |= {"plain_processor_s": plain["processor_s"], "masks": arguments.masks, "learned": lesson}
            if (drafts, source) in before:
                row["tpf_before"] = before[drafts, source]["tpf"]
            rows.append(row)
    replace_rows("learned_drafts", rows, KEYS)
    show(f"{name}, {kind}, {len(answers)} answers, {len(held_out)} held out", rows, SHOWN)


def plain_step(learning: Learning, batch: GroupBatch, optimizer: torch.optim.Optimizer) -> None:
    """Make a training step in the plain way: clean rows and masks in one forward, with gradients for all of them."""
    model, adapter, config = learning.model, learning.adapter, learning.model.config
    tokens, starts, counts = (torch.from_numpy(x) for x in (batch.tokens, batch.starts, batch.counts))
    count, length = tokens.shape
    groups, n = starts.shape[1], batch.masks
    place = torch.arange(length).expand(count, -1)
    ahead = starts[..., None] + 1 + torch.arange(n)
    positions = torch.cat([place, ahead.flatten(1)], 1)
    last = torch.cat([place, starts[..., None].expand(-1, -1, n).flatten(1)], 1)
    numbers = torch.cat([torch.zeros_like(place), (1 + torch.arange(groups)).repeat_interleave(n).expand(count, -1)], 1)
    inputs = torch.cat([tokens, torch.full_like(ahead.flatten(1), config.mask_id)], 1)
    drafting = (numbers > 0).flatten()[:, None]

    def adding(a: Tensor, b: Tensor) -> Any:
        return lambda _, x, y: torch.where(drafting, y + F.linear(F.linear(x[0], a.to(y.dtype)), b.to(y.dtype)), y)

    triples = zip(adapter.names, adapter.a, adapter.b, strict=True)
    handles = [model.get_submodule(name).register_forward_hook(adding(a, b)) for name, a, b in triples]
    with learning.trainer.precision():
        hidden = model(inputs.flatten(), positions.flatten(), dense(config, hidden_rows(positions, last, numbers)))
        of_masks = hidden.unflatten(0, inputs.shape)[:, length:].unflatten(1, (groups, n))
        real = torch.arange(1, n + 1) <= counts[..., None]
        target = tokens[:, None].expand(-1, groups, -1).gather(2, (ahead + 1).clamp(max=length - 1))[real]
        loss = F.cross_entropy(F.linear(of_masks[real], model.head_weight).float(), target)
    loss.backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def rows(builder: EngineBuilder, arguments: argparse.Namespace) -> None:
    """Measure the processor time of a trained mask in both ways, which take turns; print and write the results."""
    requests = prompts(builder, arguments.kind, 400)
    known = list(own_answers(builder, CAUSAL, requests).learned)
    model = builder.load()
    ways: dict[str, list[float]] = {"ours": [], "plain": []}
    mask_id = mask_token(model.config, builder.tokenizer)
    learning = Learning(model, mask_id, arguments.rank, masks=arguments.masks)
    optimizer = torch.optim.AdamW(learning.adapter.parameters(), lr=1e-4)
    rng = np.random.default_rng(0)
    few = [Answer(one.prompt, one.tokens) for one in known]
    for _ in range(arguments.rounds):
        ours: Iterator[GroupBatch | None] = iter(group_batches(known, arguments.masks, 4096, rng, 0)[:10])
        begin, trained = time.process_time(), 0
        for _ in range(10):
            trained += learning.trainer.step(ours, 1.0, 0.0)[1]
        ways["ours"].append((time.process_time() - begin) / trained)
        longest = max(len(a.prompt) + len(a.tokens) for a in few)
        share = max(1, (PLAIN_ROWS - longest) // arguments.masks) / max(len(a.tokens) for a in few)
        batches = group_batches(few, arguments.masks, 2048, rng, 0, share)[:10]
        begin, trained = time.process_time(), sum(batch.rows for batch in batches)
        for batch in batches:
            plain_step(learning, batch, optimizer)
        ways["plain"].append((time.process_time() - begin) / trained)
    micro = {way: 1e6 * median(seconds) for way, seconds in ways.items()}
    ratio = median(a / b for a, b in zip(ways["ours"], ways["plain"], strict=True))
    row = {"part": "rows", "model": arguments.name or arguments.model, "kind": arguments.kind, "temperature": 0.0}
    row |= {"drafts": arguments.masks, "draft_from": "", "us_a_row": micro, "against_plain": ratio}
    replace_rows("learned_drafts", [row], KEYS)
    print(
        f"a trained mask: {micro['ours']:.0f} us of the processor, by the plain way {micro['plain']:.0f}: {ratio:.2f}"
    )


def main() -> None:
    """Measure the part that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("drafts", "rows"), default="drafts")
    parser.add_argument("--model", default="causal", help="a checkpoint of a causal model")
    parser.add_argument("--name", help="of the model in the file; its path unless told otherwise")
    parser.add_argument("--kind", choices=KINDS, default="shuffled")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=2, help="while learning")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=2000)
    parser.add_argument("--masks", type=int, default=8, help="of a group in training")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--drafts", type=int, action="append", help="may be repeated; 8 and 16")
    parser.add_argument("--before", action="store_true", help="also measure before learning")
    parser.add_argument("--adapter", type=Path, help="do not learn, take this one")
    parser.add_argument("--keep", type=Path, help="a folder for the adapter")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.drafts = arguments.drafts or [8, 16]
    builder = load(arguments.model)
    (measure if arguments.part == "drafts" else rows)(builder, arguments)


if __name__ == "__main__":
    main()
