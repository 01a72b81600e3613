"""`lopa-dist trace RUN ID`: how the answer to one request was filled in, step by step.

The request is generated again with the run's settings. That gives the same text, whatever it was batched with, and so
runs need not record their steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lopa_dist.encodable import visible
from lopa_dist.engine.draft_kinds import SOURCES
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.folder.results import result_lines
from lopa_dist.jobs.run.answers import answer_of
from lopa_dist.jobs.run.attempt import own_sources
from lopa_dist.jobs.run.prompts import Encoder
from lopa_dist.jobs.run.tries import of_try
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.device import choose_device
from lopa_dist.jobs.show.page import write_page
from lopa_dist.jobs.show.report import OF_SOURCE, check_results, config_of
from lopa_dist.jobs.show.run_page import has_changed, question
from lopa_dist.jobs.show.where_it_began import report_where_it_began
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.registry import make_again
from lopa_dist.tasks.task import Item

LOOKAHEAD, BONUS, RECORD, EDIT = "lookahead", "bonus", "record", "edit"
"""How a token came to be written. LOOKAHEAD: a token that the winning branch tried, or an accepted draft. BONUS: what
replaced its first rejected draft. RECORD: any other token at a mask. EDIT: any other token in place of another."""
COLOURS = {LOOKAHEAD: "green", BONUS: "cyan", RECORD: "yellow", EDIT: "magenta"}
OTHER = (
    "This is not the text of the run: another version, machine or device made it, or a rule of your own looks at the "
    "sequences beside it."
)
END = "\u00b6"  # shown for an end-of-text token


@dataclass
class TraceStep:
    """One forward: the branches it ran, the one that won, and what was filled after it."""

    branches: int
    winner: int
    end: int  # of the last appended block, as a position of the answer
    filled: dict[int, str] = field(default_factory=dict)  # by position: LOOKAHEAD, BONUS, RECORD or EDIT
    drafts: int = 0  # how many could be accepted, along the deepest branch
    accepted: int = 0
    rejected: tuple[int, str] | None = None  # position and text of the first rejected draft
    sources: str = ""  # how many accepted drafts came from which source; empty without a drafter


@dataclass
class Trace:
    """The order in which the answer to one request was filled in."""

    custom_id: str
    prompt: str
    texts: list[str]  # of the token at each position of the answer
    steps: list[TraceStep]
    same: bool  # whether the text is the run's own
    verdict: str = ""  # in words; empty where nothing was judged
    forwards: int = 0  # how many the run took for it
    by_load: bool = False  # whether drafts, and so the steps, depend on the other requests

    @property
    def order(self) -> dict[int, int]:
        """Return the number of the step, from 1, in which each position's token was last written."""
        return {position: number for number, step in enumerate(self.steps, 1) for position in step.filled}


Tokens = list[tuple[int, int]]


class StepRecorder:
    """Records the steps of an engine that runs one request."""

    def __init__(self, decode: Callable[[int], str] = str) -> None:
        self.decode = decode  # returns the text of one token
        self.steps: list[TraceStep] = []
        self.tokens: list[int] = []
        self._branches, self._drafts = 1, 0
        # positions and tokens by branch: those that the branch holds, and the drafts that it verifies
        self._paths: list[Tokens] = [[]]
        self._chains: list[Tokens] = [[]]

    def __call__(self, engine: Engine) -> None:
        """Record the step that `engine` has just done, and keep what its next step will try."""
        assert engine.batch
        state, mask = engine.batch.state, engine.vocabulary.mask_id
        end, winner = min(int(state.end[0]), int(state.limit[0])), int(state.winner[0])
        [now] = state.generated([0], engine.batch.host.known, np.array([end]))
        end = len(now)  # in the answer, which may begin after position 0 of the sequence
        before = self.tokens + [mask] * (end - len(self.tokens))
        if engine.drafter is not None:  # it has drafted since the last call
            [drafts] = engine.drafter.verifying()
            chain_of_all = list(enumerate((token for token, _ in drafts), len(self.tokens)))
            self._drafts, self._chains = len(drafts), [chain_of_all] * state.config.max_branches
        path, chain = self._paths[min(winner, len(self._paths) - 1)], self._chains[winner]
        accepted = int(state.accepted[0]) if self._drafts else 0
        verified = right = max(0, accepted - len(path))  # of the winner's own drafts
        if winner and state.config.causal:  # those of the chain up to where the branch differs
            right = sum(1 for _ in takewhile(lambda draft: now[draft[0]] == draft[1], chain[:verified]))
        ahead = {position for position, _ in path + chain[:verified]}
        failed = chain[right] if right < len(chain) else None
        bonus = None if failed is None else failed[0]
        filled = {}
        for position, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new:
                written = RECORD if old == mask else EDIT
                filled[position] = LOOKAHEAD if position in ahead else BONUS if position == bonus else written
        rejected = None if failed is None else (failed[0], self.decode(failed[1]))
        sources = ""
        if engine.drafter is not None:
            of_branch = [f"{verified - right} from the branch that won"] if verified > right else []
            sources = ", ".join([*told(Counter(source for _, source in drafts[:right])), *of_branch])
        self.steps.append(TraceStep(self._branches, winner, end, filled, self._drafts, accepted, rejected, sources))
        self.tokens, self._branches, self._drafts = now, int(state.branches[0]), int(state.drafts[0])
        known, config = int(state.known[0]), state.config
        if config.causal:  # drafts are in the canvas
            drafted = range(int(state.complete[0]), int(state.complete[0]) + self._drafts)
            anchor = [(position - known, int(state.answers[0, position])) for position in drafted]
            self._chains = [anchor] * config.max_branches
            return

        def tokens(pairs: torch.Tensor) -> Tokens:
            return [(position - known, token) for position, token in pairs.T.tolist() if position >= 0]

        m, counts = int(config.drafts), state.paths[3, 0].tolist()
        self._paths = [tokens(edits) for edits in state.edits[:, 0].unbind(1)]
        self._chains = [tokens(state.chain[:2, 0, j * m : j * m + count]) for j, count in enumerate(counts)]


def told(sources: Counter[int]) -> list[str]:
    """Return in words how many drafts came from each source."""
    return [f"{count} from {OF_SOURCE[SOURCES[source]]}" for source, count in sources.items()]


def trace(folder: Path, which: str) -> Trace:
    """Generate the answer to one request of a finished run again, and return how it was filled in.

    Args:
        folder: the run folder.
        which: the request's custom_id, or its index where no request has this custom_id.

    Raises:
        ValueError: there is no such run or request, the request has no generated answer, or it cannot be repeated.
    """
    file = folder / "report.json"
    check_results(folder)
    report = report_where_it_began(folder)
    try:
        config = config_of(report)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    line = result(folder, which)
    if line["finish_reason"] == "error":
        raise ValueError(f"{line['custom_id']} has no answer to trace: {line['error']}")
    item = next(islice(make_again(config.task).items(), line["index"], None), None)
    changed = (
        f"{line['custom_id']}: the task's input has changed since the run, or task.input={config.task.input} is "
        "another file here: a relative path is looked for in the folder that you are in first"
    )
    if item is None or item.custom_id != line["custom_id"]:
        raise ValueError(changed)
    if item.continuations:
        raise ValueError(f"{line['custom_id']} was scored, not generated: there are no steps to show")
    builder = EngineBuilder(config.model, choose_device(config, World("python")))
    builder.load(warn=False)
    tokenizer = builder.tokenizer
    encoder = Encoder(config, builder.shape, tokenizer)
    request = encoder.encode(0, encoder.choose(item))
    assert isinstance(request, Request), request
    recorder = StepRecorder(lambda token: str(tokenizer.decode([token])))
    alone = replace(config.engine, max_sequences=1, max_rows=None, kv_tokens=None)
    engine = builder.engine(config.decode, alone, on_step=recorder)
    [generation] = engine.generate([of_try(request, line["usage"].get("tries", 1))])
    text = answer_of(tokenizer, generation, item.stop)[2]
    # where a prompt was cut, only its tokens show what is left
    cut = str(tokenizer.decode(request.prompt, skip_special_tokens=True)) if encoder.notes.cut else ""
    shown = zip(recorder.tokens, pieces(tokenizer, recorder.tokens), strict=True)
    texts = [END if token in builder.shape.eos_ids else piece for token, piece in shown]
    forwards, by_load = line["usage"]["forwards"], config.decode.drafts == "auto" or config.decode.drafts_text
    same, verdict = text == line["text"], verdict_of(line)
    if not same and has_changed(report):
        raise ValueError(changed)
    if not same and (others := builder.changed_since(report.get("weights", {}))):
        raise ValueError(f"{line['custom_id']}: {others}; restore the weights with which the run was made")
    edited = [
        source for source, found in own_sources(config).items() if report.get("own_code", {}).get(source) != found
    ]
    if not same and edited:
        raise ValueError(
            f"{line['custom_id']}: {' and '.join(edited)} has changed since the run; put it back as it was"
        )
    return Trace(line["custom_id"], cut or words(item), texts, recorder.steps, same, verdict, forwards, by_load)


def words(item: Item) -> str:
    """Return what a request asks, as its user wrote it, without few-shot examples and a chat template's tokens."""
    if item.messages is None or len(item.messages) == 1:
        return question(item)
    *before, last = [{"role": message["role"], "content": message["content"]} for message in item.messages]
    turns = [*before, last | {"content": last["content"].removeprefix(item.prefix)}]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def verdict_of(line: dict[str, Any]) -> str:
    """Return in words how a line of results judges its answer; empty where nothing was judged."""
    if line.get("correct") is None:
        return ""
    read = f", read as {line['extracted']!r}" if line.get("extracted") is not None else ""
    expected = f"; expected {line['expected']!r}" if line.get("expected") is not None else ""
    return f"{'right' if line['correct'] else 'wrong'}{read}{expected}"


def result(folder: Path, which: str) -> dict[str, Any]:
    """Return the line of a request in `results.jsonl`, by custom_id, or by index where no request has that id."""
    by_index, samples = None, []
    for _, line in result_lines(folder / "results.jsonl"):
        if line["custom_id"] == which:
            return line
        if line["custom_id"].rpartition("#")[0] == which:
            samples.append(line["custom_id"])
        if str(line["index"]) == which:
            by_index = line
    if by_index:
        return by_index
    if samples:
        raise ValueError(f"{folder}: {which} has {len(samples)} answers; name one: {samples[0]} to {samples[-1]}")
    raise ValueError(f"{folder}: no request {which!r}; give a custom_id or an index (from 0) of results.jsonl")


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text that each token adds."""
    shown = []
    for count in range(1, len(tokens) + 1):
        # spaces and split characters need a few tokens of context; more would take quadratic time on long answers
        window = tokens[max(0, count - 8) : count]
        after = tokenizer.decode(window)
        before = tokenizer.decode(window[:-1])
        shown.append(after[len(before) :] if after.startswith(before) else tokenizer.decode(tokens[count - 1 : count]))
    return shown


def show(trace: Trace, console: Console) -> None:
    """Print a trace: the text after each step, with the tokens that the step filled in colour."""
    trace = replace(trace, texts=[visible(text) for text in trace.texts])
    console.print(Text(f"request {visible(trace.custom_id)}\n", style="bold"))
    console.print(Text(visible(trace.prompt.strip()), style="dim"))
    legend = Text.assemble("\n", ("·", "dim"), " is a mask, ¶ an end of text.")
    if console.color_system:
        legend.append(" Tokens of the step are coloured: ")
        legends = {LOOKAHEAD: " a lookahead token ", BONUS: " what replaced a rejected draft ", RECORD: " any other "}
        if any(EDIT in step.filled.values() for step in trace.steps):
            legends[EDIT] = " instead of another token "
        for way, words in legends.items():
            legend.append(words, f"black on {COLOURS[way]}").append(" ")
    console.print(legend.append("\n"))
    seen: dict[int, str] = {}
    for number, step in enumerate(trace.steps, 1):
        ran = "the anchor alone" if step.branches == 1 else f"{step.branches} branches"
        won = "" if step.branches == 1 else ", the anchor won" if step.winner == 0 else f", lookahead {step.winner} won"
        drafted = f", {step.accepted} of {step.drafts} drafts accepted" if step.drafts else ""
        drafted += f" ({step.sources})" if step.sources else ""
        console.print(Text(f"step {number}: {ran}{won}{drafted}, {len(step.filled)} filled", style="bold"))
        if step.rejected:
            position, text = step.rejected
            instead = trace.texts[position].strip()
            replaced = step.filled.get(position) in (BONUS, LOOKAHEAD) and instead != text.strip()
            why = f"the model said {instead!r}" if replaced else "the text had ended before it"
            console.print(Text(f"  rejected: {text.strip()!r}; {why}", style="dim"))
        line = Text()
        for position in range(step.end):
            if kind := step.filled.get(position):
                line.append(trace.texts[position], f"black on {COLOURS[kind]}")
            else:
                line.append(*((trace.texts[position],) if position in seen else ("·", "dim")))
        seen |= step.filled
        console.print(line)
    steps, filled = len(trace.steps), len(seen)
    tokens = trace.texts.index(END) if END in trace.texts else filled
    more = filled - tokens - 1  # the end-of-text is of use
    filler = f"; {more} more token{'s' * (more > 1)} filled after the text's end" if more > 0 else ""
    console.print(f"\n{tokens} tokens of text in {steps} forwards: {tokens / steps:.2f} per forward{filler}")
    if trace.verdict:
        console.print(Text(visible(trace.verdict)))
    if said := differs(trace):
        console.print(said)
    if not trace.same:
        console.print(Text(OTHER, style="red"))


def differs(trace: Trace) -> str:
    """Return a note that the run's own steps may differ from those shown; empty where they are the same."""
    if not trace.by_load:
        return ""
    return (
        f"These are the steps of the request alone. The run took {trace.forwards} forwards: there, drafts also "
        "depended on the other requests, though no text does."
    )


def write_trace_page(trace: Trace, file: Path) -> None:
    """Write a trace as a page: the answer, coloured by the step that filled each token, and a slider over steps."""
    order = trace.order
    kinds = {i: kind for step in trace.steps for i, kind in step.filled.items() if kind != RECORD}
    tokens = [{"text": text, "step": order.get(i, 0), "kind": kinds.get(i, "")} for i, text in enumerate(trace.texts)]
    steps = [
        asdict(s) | {"filled": len(s.filled), "rejected": s.rejected[1] if s.rejected else ""} for s in trace.steps
    ]
    data = {"prompt": trace.prompt, "tokens": tokens, "steps": steps}
    said = {"verdict": trace.verdict, "differs": differs(trace), "other": "" if trace.same else OTHER}
    write_page(file, "trace.html", custom_id=trace.custom_id, steps=len(steps), data=data, **said)
