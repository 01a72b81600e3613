"""The Python API gives what jobs give, and says what is wrong with a call."""

from __future__ import annotations

import json
import math
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file

import lopa_dist
from lopa_dist import LLM, DecodeConfig, Output, SamplingParams
from lopa_dist.composing import composed
from lopa_dist.config import Config, LoggingConfig, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.setup import build
from lopa_dist.llm import likelihood_of
from lopa_dist.models.files import EMBEDDED, find
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.stop import Stopped
from lopa_dist.tasks.embedded import Arithmetic
from lopa_dist.tasks.word_problems import problems

ROOT = Path(__file__).parent.parent
PROBLEMS = [str(item.messages[-1]["content"]) for item in Arithmetic(20).items() if item.messages]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Also for the tests that come later."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", "parallel.threads=1")


def job(folder: Path, lines: list[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
    """The result lines of a batch job."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    logging = LoggingConfig(progress="never", token_ids=True, wandb=WandbConfig(mode="disabled"))
    task = TaskConfig("batch", limit=None, input=str(folder / "prompts.jsonl"))
    run(
        replace(config, task=task, logging=logging, parallel=ParallelConfig(threads=1)), folder / "run", World("python")
    )
    return [json.loads(line) for line in (folder / "run" / "results.jsonl").read_text().splitlines()]


def compare(outputs: list[Output], lines: list[dict[str, Any]]) -> None:
    assert len(outputs) == len(lines)
    for output, line in zip(outputs, lines, strict=True):
        assert (output.text, output.tokens) == (line["text"], line["token_ids"])
        assert output.finish_reason == line["finish_reason"]
        assert (output.prompt_tokens, output.forwards) == (line["usage"]["prompt_tokens"], line["usage"]["forwards"])
        assert output.tokens_per_forward == pytest.approx(line["tpf"], abs=1e-4)


def test_the_answers_are_those_of_a_job(llm: LLM, tmp_path: Path) -> None:
    """More prompts than run at a time, texts and chats, greedy; with the model's own decoding."""
    outputs = llm.generate([PROBLEMS[0], *([{"role": "user", "content": text}] for text in PROBLEMS[1:])])
    lines = [{"prompt": PROBLEMS[0]}, *({"messages": [{"role": "user", "content": text}]} for text in PROBLEMS[1:])]
    compare(outputs, job(tmp_path, lines, composed([])))
    assert sum(output.drafts for output in outputs) > sum(output.accepted for output in outputs) > 0


def test_outputs_tell_how_tokens_were_written(llm: LLM) -> None:
    asked, other = llm.generate(PROBLEMS[:2], sampling=[SamplingParams(logprobs=True), SamplingParams()])
    assert other.logprobs is other.steps is other.ways is None
    assert asked.logprobs is not None
    assert asked.steps is not None
    assert asked.ways is not None
    assert len(asked.logprobs) == len(asked.steps) == len(asked.ways) == len(asked.tokens)
    assert all(logprob <= 0 for logprob in asked.logprobs)
    assert 0 < asked.ways.count("accepted") <= asked.accepted
    assert 1 <= min(asked.steps) < max(asked.steps) <= asked.forwards


def test_the_score_of_an_answer_is_the_sum_of_its_log_probabilities() -> None:
    """Of a causal model, whose likelihood is exact; and the greedy answer is found to be that."""
    causal = LLM("causal", "parallel.threads=1")
    chats = [[{"role": "user", "content": text}] for text in PROBLEMS[:3]]
    outputs = causal.generate(chats, sampling=SamplingParams(logprobs=True, max_tokens=20))
    scores = causal.score(chats, [output.text for output in outputs])
    for output, score in zip(outputs, scores, strict=True):
        assert output.logprobs is not None
        assert score.loglikelihood == pytest.approx(sum(output.logprobs), abs=1e-4)
        assert (score.error, score.greedy) == (0, True)
    tops = causal.score(chats, [output.text for output in outputs], top_logprobs=3)
    for output, score, same in zip(outputs, tops, scores, strict=True):
        assert output.logprobs is not None
        assert score.tokens is not None
        assert [one.token for one in score.tokens] == output.tokens
        assert [one.logprob for one in score.tokens] == pytest.approx(output.logprobs, abs=1e-4)
        assert sum(one.logprob for one in score.tokens) == pytest.approx(score.loglikelihood)
        for one in score.tokens:  # the answer is the greedy one
            assert one.top[0] == (one.token, one.logprob)
            assert [logprob for _, logprob in one.top] == sorted((logprob for _, logprob in one.top), reverse=True)
            assert len({token for token, _ in one.top}) == 3
        assert likelihood_of(json.loads(json.dumps(list(score)))) == score, "as it comes from another rank"
        assert (same.tokens, same.loglikelihood) == (None, pytest.approx(score.loglikelihood, abs=1e-6))
    [worse] = causal.score(chats[:1], [" Tom Tom Tom"])
    assert worse.loglikelihood < min(score.loglikelihood for score in scores)
    assert not worse.greedy


def test_raw_log_probabilities_of_what_was_sampled() -> None:
    """Those of `generate` are after the temperature; those of `score` as the model has them, of every token."""
    causal = LLM("causal", "parallel.threads=1")
    chats = [[{"role": "user", "content": PROBLEMS[0]}]]
    [drawn] = causal.generate(chats, sampling=SamplingParams(temperature=1.5, seed=1, logprobs=True, max_tokens=12))
    [score] = causal.score(chats, [drawn.text], top_logprobs=10**6)
    assert drawn.logprobs is not None
    assert score.tokens is not None
    for one in score.tokens:
        logprobs = dict(one.top)
        assert one.logprob == pytest.approx(logprobs[one.token])
        assert sum(map(math.exp, logprobs.values())) == pytest.approx(1)
    warm = [torch.tensor([logprob for _, logprob in one.top]).div(1.5).logsumexp(0).item() for one in score.tokens]
    cooled = [one.logprob / 1.5 - total for one, total in zip(score.tokens, warm, strict=True)]
    assert [one.token for one in score.tokens] == drawn.tokens
    assert cooled == pytest.approx(drawn.logprobs, abs=1e-3)


def test_a_right_answer_is_likelier_than_a_wrong_one(llm: LLM) -> None:
    """By the bound of the masked model."""
    for problem in islice(problems("held_out", 1), 2):
        *words, last = problem.answer.split()
        answers = [f" {' '.join([*words, number])}" for number in (last, str((int(last) + 7) % 100))]
        right, wrong = llm.score([problem.question] * 2, answers, samples=8)
        assert right.loglikelihood > wrong.loglikelihood + 5


def test_what_is_wrong_with_a_score_is_said(llm: LLM) -> None:
    for prompts, continuations, message in (
        (["x"], "y", "continuations is one string: give a list"),
        (["x"], None, "continuations is of type NoneType: give a list of strings"),
        (["x"], ["y", "z"], "continuations: 2 for 1 prompts; give one string for each"),
        (["x", "y"], ["z", ""], r"prompts\[1\]: the continuation is empty"),
        (["x"], ["\ud800"], r"prompts\[0\]: the continuation has half of a surrogate pair"),
        (["x " * 600], ["y"], r"prompts\[0\]: prompt and continuation have .* positions; shorten"),
        (["x"], ["<|mask|>"], r"prompts\[0\]: the text contains the mask token"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.score(prompts, continuations)
    for wrong, message in ((3, "only a causal model's tokens"), (-1, "a number from 0 on"), (True, "a number")):
        with pytest.raises(ValueError, match=f"top_logprobs={wrong}: .*{message}"):
            llm.score(["x"], ["y"], top_logprobs=wrong)
    with pytest.raises(ValueError, match="samples=0: must be at least 1"):
        llm.score(["x"], ["y"], samples=0)


def test_each_prompt_may_be_sampled_in_its_own_way(llm: LLM, tmp_path: Path) -> None:
    asked = [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.9, "seed": 4, "top_k": 5},
        {"max_tokens": 5},
        {"stop": " has"},
        {"stop": ["books", "."], "max_tokens": 70},  # above decode.max_new_tokens
        {},
    ]
    prompts = PROBLEMS[: len(asked)]
    sampling = [SamplingParams(**fields) for fields in asked]
    outputs = llm.generate(prompts, "embedded_lopa", sampling, progress=False, branches=3)
    lines = [{"prompt": prompt} | fields for prompt, fields in zip(prompts, asked, strict=True)]
    lines[-1] |= {"max_tokens": 64}
    compare(
        outputs,
        job(tmp_path, lines, composed(["decode=embedded_lopa", "decode.branches=3", "decode.max_new_tokens=70"])),
    )
    assert len(outputs[2].tokens) == 5
    assert outputs[2].finish_reason == "length"
    alone = llm.generate([prompts[1]], "embedded_lopa", sampling[1], branches=3)[0]
    assert alone.text == outputs[1].text, "a seed of its own means the same text anywhere"


def test_samples_are_those_of_a_job(llm: LLM, tmp_path: Path) -> None:
    """With their prompts and numbers, and all of it in `asdict`, as a data frame wants it."""
    sampling = [SamplingParams(temperature=0.9, n=2), SamplingParams(temperature=0.9, seed=3, n=2), SamplingParams()]
    outputs = llm.generate(PROBLEMS[:3], sampling=sampling)
    lines = [{"n": 2, "temperature": 0.9}, {"n": 2, "temperature": 0.9, "seed": 3}, {}]
    found = job(tmp_path, [{"prompt": p} | line for p, line in zip(PROBLEMS, lines, strict=False)], composed([]))
    compare(outputs, found)
    assert [(output.id, output.sample) for output in outputs] == [
        ("line-1", 0), ("line-1", 1), ("line-2", 0), ("line-2", 1), ("line-3", 0)
    ]  # fmt: skip
    assert [output.prompt for output in outputs] == [PROBLEMS[i] for i in (0, 0, 1, 1, 2)]
    assert asdict(outputs[0])["tokens_per_forward"] == outputs[0].tokens_per_forward > 0


def test_the_model_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    load = build.load_model
    monkeypatch.setattr(build, "load_model", lambda *of: (calls.append(of), load(*of))[1])
    llm = LLM(str(EMBEDDED), "model.pattern=d2f", "parallel.threads=1")
    assert llm.config.model.path == str(EMBEDDED)
    for _ in range(2):
        [output] = llm.generate(
            PROBLEMS[:1],
            decode=DecodeConfig(verify="confidence", drafts=0, branches=1, block_size=16, max_new_tokens=32),
        )
        assert output.text
        assert output.acceptance is None
    assert len(calls) == 1


@pytest.mark.parametrize("model", ["causal", "embedded"])
def test_weights_are_written_in_place_or_refused(model: str) -> None:
    """Kernels know the tensors by their addresses: others in their place were not seen, or ended the process."""
    llm = LLM(model, "parallel.threads=1", "decode.max_new_tokens=16")
    before = llm.generate(PROBLEMS[:2])
    assert llm.builder.model is not None
    weights = {name: weight.clone() for name, weight in llm.builder.model.state_dict().items()}
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    llm.builder.model.load_state_dict(zeros)
    assert [one.text for one in llm.generate(PROBLEMS[:2])] != [one.text for one in before]
    llm.builder.model.load_state_dict(weights)
    assert [one.text for one in llm.generate(PROBLEMS[:2])] == [one.text for one in before]
    llm.builder.model.load_state_dict(weights, assign=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="the model's weights are other tensors than in the last call"):
            llm.generate(PROBLEMS[:2])


def tied(folder: Path, seed: int) -> Path:
    """The embedded model with tied weights, as random as the order of its vocabulary."""
    shutil.copytree(EMBEDDED, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    order = torch.randperm(len(head), generator=torch.Generator().manual_seed(seed))
    save_file(weights | {"model.embed_tokens.weight": head[order].contiguous()}, folder / "model.safetensors")
    return folder


def test_tied_weights_that_are_written_count_for_inputs_and_outputs(tmp_path: Path) -> None:
    options = "model.pattern=d2f", "parallel.threads=1", "decode.max_new_tokens=16"
    llm, other = (LLM(str(tied(tmp_path / str(seed), seed)), *options) for seed in (1, 2))
    before, wanted = llm.generate(PROBLEMS[:2]), [one.text for one in other.generate(PROBLEMS[:2])]
    assert [one.text for one in before] != wanted
    assert llm.builder.model is not None
    assert other.builder.model is not None
    llm.builder.model.load_state_dict(other.builder.model.state_dict())
    assert [one.text for one in llm.generate(PROBLEMS[:2])] == wanted


def test_a_call_goes_on_from_what_the_calls_before_have_made_and_written() -> None:
    """Drafts come from earlier answers, and no text changes: also where other options or a score came between."""
    causal = LLM("causal", "parallel.threads=1", "decode.draft_from=text", "decode.drafts=8")
    chats = [[{"role": "user", "content": problem}] for problem in PROBLEMS[:3]]
    first = causal.generate(chats)
    assert causal.engine is not None
    drafter, space = causal.engine.drafter, causal.engine.workspace
    again = causal.generate(chats)
    assert (causal.engine.drafter, causal.engine.workspace) == (drafter, space)
    assert [one.text for one in again] == [one.text for one in first]
    assert sum(one.forwards for one in again) < 0.7 * sum(one.forwards for one in first)
    drawn = causal.generate(chats, temperature=0.9)
    assert causal.engine.drafter is not drafter
    assert causal.generate(chats, temperature=0.9)[0].text == drawn[0].text
    shorter = causal.generate(chats, temperature=0.9, sampling=SamplingParams(max_tokens=9))
    assert [one.tokens for one in shorter] == [one.tokens[:9] for one in drawn]
    causal.score(chats[:1], [" Tom"])
    assert causal.engine is None
    fresh = LLM("causal", "parallel.threads=1").generate(chats)
    assert [one.text for one in causal.generate(chats)] == [one.text for one in fresh]


def test_each_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("embedded", "parallel.threads=1")
    for _ in range(2):
        llm.generate(PROBLEMS[:1], progress=False)
        llm.generate(PROBLEMS[:1], sampling=SamplingParams(n=2, top_p=0.5), progress=False)
    said = [record.message for record in caplog.records if record.name == "lopa_dist"]
    assert sum("answers only repeat another answer" in message for message in said) == 1
    assert sum("a top_p or top_k of their own at temperature 0: 2" in message for message in said) == 1


def test_decode_options_are_presets_configs_or_overrides(llm: LLM) -> None:
    assert llm.configured(None, {}) is llm.config
    assert llm.configured("embedded_plain", {"tau_conf": 0.8}).decode.tau_conf == 0.8
    assert llm.configured("lopa", {"max_active_blocks": None, "context": "vanilla"}).decode.context == "vanilla"
    mine = DecodeConfig(verify="confidence", drafts=0, branches=2)
    assert llm.configured(mine, {"branches": 4}).decode == replace(mine, branches=4)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("one", {}, "give a list"),
        ([{"role": "user", "content": "x"}], {}, r"prompts\[0\]: the prompt is a single message"),
        (["x", " "], {}, r"prompts\[1\]: prompt has nothing but white space"),
        (["x", [{"role": "user"}]], {}, r"prompts\[1\]: messages\[0\] \(user\) has no content"),
        (["Tom " * 600, "x", "Tom " * 700], {}, r"prompts\[0\]: the prompt has .* positions.* \(and 1 more\)"),
        (["x"], {"sampling": SamplingParams(temperature=-1)}, r"prompts\[0\]: temperature=-1 must be a number of at"),
        (["x"], {"sampling": [SamplingParams()] * 2}, "2 sampling parameters for 1 prompts"),
        (["x"], {"decode": "best"}, "decode=best: no such preset. There are causal, d2f, embedded, "),
        (["x"], {"brances": 1}, "decode.brances: no such key; did you mean decode.branches"),
        (["x", 5], {}, r"prompts\[1\]: the prompt is of type int: a prompt is a string, or a chat"),
        (["x", ["y"]], {}, r"prompts\[1\]: the prompt is of type list: a prompt is a string, or a chat"),
        (["x"], {"sampling": {"temperature": 1.0}}, "sampling: give SamplingParams"),
        (["x"], {"sampling": 1.0}, "sampling: give SamplingParams"),
        (["x"], {"sampling": []}, "0 sampling parameters for 1 prompts"),
        (["x"], {"sampling": SamplingParams(tries=0)}, r"prompts\[0\]: tries=0 must be an integer of at least 1"),
        (["x"], {"sampling": SamplingParams(tries=math.nan)}, "tries=nan must be"),  # type: ignore[arg-type]
        (["x"], {"sampling": SamplingParams(tries="3")}, "tries='3' must be"),  # type: ignore[arg-type]
        (["x"], {"decode": "vanilla", "tau_add": 0.5}, "decode.tau_add=0.5: has no effect: decode.max_active"),
        (["x"], {"drafts": True}, r"decode\.drafts=True: must be an integer"),
        (["x"], {"tau_conf": "high"}, "decode.tau_conf: Value 'high'"),
        (["x"], {"tau_conf": 2}, r"decode.tau_conf=2.*between 0 and 1"),
        (["x", "\ud800"], {}, r"prompts\[1\]: the prompt has half of a surrogate pair"),
        (
            ["x"],
            {"sampling": SamplingParams(temperature=np.float32(-1))},
            r"temperature=np.float32\(-1.0\) must be a nu",
        ),
        (["x"], {"sampling": SamplingParams(temperature=10**400)}, r"prompts\[0\]: temperature=1000"),
        (["x"], {"sampling": SamplingParams(top_k=-(10**5000))}, r"prompts\[0\]: top_k=\(a int\) must be"),
        (["x"], {"decode": DecodeConfig(), "branches": -1}, r"decode.branches=-1: must be an integer of at least 0"),
        (["x"], {"samples": 3}, r"samples: give it as sampling=SamplingParams\(n=\.\.\.\)"),
        (["x"], {"stop": ["."]}, r"stop: give it as sampling=SamplingParams\(stop=\.\.\.\)"),
        (["x"], {"decode": SamplingParams()}, r"decode is of type SamplingParams: .* give sampling=SamplingParams"),
        (["x"], {"decode": {"drafts": 4}}, "decode is of type dict: .* give single options as drafts=4"),
        (["x"], {"fill": len}, "fill is of type builtin_function_or_method: .* is a string, FILE.py:FUNCTION"),
        (["x"], {"sampling": SamplingParams(stop=5)}, r"prompts\[0\]: stop must be"),  # type: ignore[arg-type]
        ([{"id": "a", "prompt": "x"}], {}, r"prompts\[0\]: the prompt is of type dict: a prompt is a string"),
        (5, {}, "prompts is of type int: give a list"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(llm: LLM, prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, **options)


def test_what_is_wrong_with_infilling_or_scoring_is_said(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling: give SamplingParams"):
        llm.infill(["a"], [" b"], 4, sampling=[None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prefixes is one string: give a list"):
        llm.infill("a", [" b"], 4)
    with pytest.raises(ValueError, match=r"prefixes\[1\]: .* surrogate"):
        llm.infill(["a", "\ud800"], [" b", " b"], 4, context="vanilla")
    with pytest.raises(ValueError, match=r"prefixes\[0\]: the prompt is of type int"):
        llm.infill([3], [" b"], 4)  # type: ignore[list-item]
    assert len(llm.infill(iter(PROBLEMS[:1]), [" b"], 4)) == 1  # type: ignore[arg-type]
    for samples in ("3", True, 2.5):
        with pytest.raises(ValueError, match=rf"samples={samples!r}: must be an integer of at least 1"):
            llm.score(["a"], [" b"], samples=samples)  # type: ignore[arg-type]


def test_an_answer_reaches_as_far_as_the_model(llm: LLM) -> None:
    """A limit beyond that makes no room for more."""
    [far] = llm.generate(PROBLEMS[:1], sampling=SamplingParams(max_tokens=10**30))
    [near] = llm.generate(PROBLEMS[:1], sampling=SamplingParams(max_tokens=64))
    assert far.tokens == near.tokens
    assert llm.engine is not None
    assert llm.engine.config.max_new_tokens == 64


def test_prompts_may_come_one_by_one(llm: LLM) -> None:
    given = (prompt for prompt in PROBLEMS[:2])
    assert [one.prompt for one in llm.generate(given)] == PROBLEMS[:2]  # type: ignore[arg-type]
    assert repr(llm).startswith("LLM('embedded'")


def test_a_limit_of_one_prompt_is_no_other_s(llm: LLM) -> None:
    """Where it is as large as all of the model's positions, each answer has as many tokens as its prompt leaves."""
    most = SamplingParams(max_tokens=600)
    wide = LLM("causal", "decode.max_new_tokens=512")
    alone = wide.generate([PROBLEMS[0]], progress=False)
    both = wide.generate([PROBLEMS[0], PROBLEMS[1]], sampling=[SamplingParams(), most], progress=False)
    assert [both[0].text] == [one.text for one in alone]
    assert both[1].text == wide.generate([PROBLEMS[1]], progress=False)[0].text


def test_threads_take_turns() -> None:
    """Also in the first calls, which load the model."""
    wanted = [one.text for one in LLM("embedded").generate(PROBLEMS[:3], progress=False)]
    for _ in range(3):
        cold, begin = LLM("embedded"), Barrier(4)

        def call(cold: LLM = cold, begin: Barrier = begin) -> list[str]:
            begin.wait()
            return [one.text for one in cold.generate(PROBLEMS[:3], progress=False)]

        with ThreadPoolExecutor(4) as threads:
            assert [one.result() for one in [threads.submit(call) for _ in range(4)]] == [wanted] * 4


def test_no_stop_is_none(llm: LLM) -> None:
    [plain] = llm.generate(PROBLEMS[:1], progress=False)
    assert llm.generate(PROBLEMS[:1], sampling=SamplingParams(stop=None), progress=False)[0].text == plain.text


@pytest.fixture
def _default_signals() -> Iterator[None]:
    """Jobs in this process have handlers of their own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_default_signals")
def test_the_callers_answers_to_signals_stay(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(llm, "collected", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match="SIGTERM"):
        llm.generate(PROBLEMS[:1])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("_default_signals")
def test_a_signal_that_the_program_answers_itself_stops_no_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that puts its job back into Slurm's queue."""
    heard, collected = [], llm.collected
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    def and_a_signal(*given: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return collected(*given)

    monkeypatch.setattr(llm, "collected", and_a_signal)
    assert len(llm.generate(PROBLEMS[:1])) == 1
    assert heard == [signal.SIGTERM]


def test_a_call_within_a_call_is_refused(llm: LLM) -> None:
    """It would wait for the other forever."""
    with pytest.raises(RuntimeError, match="generate: called while another call of this LLM runs"):
        llm.generate(llm.generate([one])[0].text for one in PROBLEMS[:2])  # type: ignore[arg-type]
    assert len(llm.generate(PROBLEMS[:1])) == 1


def test_tables_are_given_by_column(llm: LLM) -> None:
    table = pandas.DataFrame(
        {"prompt": PROBLEMS[:3], "suffix": [" has 3 .", " has 4 .", " has 5 ."], "most": [4, 5, 6]}
    )
    table = table.iloc[::-1]  # its labels are not its rows' places
    columns = [table.prompt, table.suffix, table.most]
    found = llm.infill(*columns, context="vanilla")
    assert found == [
        replace(one, seconds=it.seconds)
        for one, it in zip(llm.infill(*map(list, columns), context="vanilla"), found, strict=True)
    ]
    by_column, by_list = llm.score(table.prompt, table.suffix), llm.score(list(table.prompt), list(table.suffix))
    assert by_column == by_list
    for given in (table, {"prompt": "x"}):
        with pytest.raises(ValueError, match=f"prompts is of type {type(given).__name__}: .* one of its columns"):
            llm.generate(given)  # type: ignore[arg-type]


def test_options_may_be_numpy_s(llm: LLM) -> None:
    options = {"tau_conf": np.float32(0.5), "drafts": np.int64(3)}
    assert llm.configured("embedded", options).decode.drafts == 3
    assert llm.configured(DecodeConfig(), options).decode.tau_conf == 0.5
    assert len(llm.infill(["a"], [" b"], np.array(4), context="vanilla")[0].tokens) <= 4  # type: ignore[arg-type]
    assert llm.score(["a"], [" b"], samples=np.int64(2)) == llm.score(["a"], [" b"], samples=2)


def test_a_pickled_llm_loads_its_model_again() -> None:
    llm = LLM(EMBEDDED, "decode.drafts=2")
    again = pickle.loads(pickle.dumps(llm))
    assert repr(again) == repr(llm)
    assert again.config == llm.config
    assert again.builder.model is not llm.builder.model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedded", "task.limit=3"], "task.limit=3: has no effect on LLM, which takes settings of model, decode"),
        (["embedded", "engine.max_sequence=3"], "did you mean engine.max_sequences"),
        (["embedded", "decode=embeded"], "decode=embeded: no such preset; did you mean embedded? There are causal, "),
        (["./nowhere"], r"model.path=./nowhere: no such folder"),
        (["local"], "model 'local': give the checkpoint's folder in its place"),
        ([""], "model is an empty string: give the name of a preset"),
        ([None], "model is of type NoneType: give the name of a preset, a folder, or a hub id"),
        (["embedded", 3], "3: give settings as strings, such as 'decode.drafts=4'"),
        (["embeded"], "model 'embeded': neither a preset nor a folder; did you mean embedded?"),
        (["./no where=b"], r"model.path=./no where=b: no such folder"),
        (["./o'brien/model"], r"model.path=./o'brien/model: no such folder"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(*arguments)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "generate.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "#### 8\n" in shown
    assert "drafts accepted" in shown


def test_the_package_is_light_until_it_is_used() -> None:
    code = "import sys, lopa_dist; lopa_dist.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert set(dir(lopa_dist)) == set(lopa_dist.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLm'"):
        lopa_dist.LLm  # noqa: B018 - a typing error


@pytest.mark.parametrize(
    ("name", "hint"), [("max_new_tokens", "did you mean max_tokens?"), ("best_of", "there are temperature, top_p,")]
)
def test_an_argument_that_sampling_does_not_have_is_told_with_the_right_one(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"SamplingParams has no {name}: {hint}")):
        SamplingParams(**{name: 1})
    assert replace(SamplingParams(n=2), n=3) == SamplingParams(n=3)


def test_infilling_is_what_a_job_finds(llm: LLM, tmp_path: Path) -> None:
    """Between texts and in an assistant's turn; the same from a line, and a true sentence where the end is known."""
    question = "Olga has 8 books . Olga buys 4 more . Then Olga loses 4 books . What is the final number of books ?"
    before, behind = " Originally Olga keeps 8 overall .", " Next Olga keeps 12 - 4 = 8 now altogether ."
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": before}]
    prefixes, suffixes, most = [chat, f"<|user|> {question}<|assistant|>{before}"], [behind, behind], [11, 5]
    found = llm.infill(prefixes, suffixes, most, progress=False, context="vanilla")
    assert "8 + 4 = 12" in found[0].text
    assert len(found[1].tokens) <= 5
    assert found[0].prompt_tokens == found[1].prompt_tokens  # both texts, and a chat as its template writes it
    lines = [
        {key: prefix, "suffix": suffix, "max_tokens": count}
        for key, prefix, suffix, count in zip(("messages", "prompt"), prefixes, suffixes, most, strict=True)
    ]
    compare(found, job(tmp_path, lines, composed(["decode.context=vanilla"])))
    empty = llm.infill(prefixes, ["", ""], most, progress=False, context="vanilla")
    assert [one.prompt_tokens for one in empty] == [found[0].prompt_tokens - 11] * 2


def test_infilling_needs_a_model_that_sees_what_is_behind(llm: LLM, tmp_path: Path) -> None:
    for context in ("d2f_causal", "blocks"):
        with pytest.raises(ValueError, match=f"context={context} no token sees anything after its block"):
            llm.infill(["a"], ["b"], 4, progress=False, context=context)
    with pytest.raises(ValueError, match="suffix contains the mask token"):
        llm.infill(["a"], ["<|mask|>"], 4, progress=False)
    with pytest.raises(ValueError, match="suffixes is one string"):
        llm.infill(["a"], "b", 4)
    with pytest.raises(ValueError, match="2 max_tokens for 1 prefixes"):
        llm.infill(["a"], ["b"], [4, 4])
    [line] = job(tmp_path, [{"prompt": "a", "suffix": "b"}], composed([]))
    assert "suffix needs max_tokens" in line["error"]


@pytest.mark.parametrize("wrong", [5, None, ["a"]])
def test_what_is_no_text_is_refused_by_its_place(wrong: Any) -> None:
    llm = LLM("embedded")
    with pytest.raises(ValueError, match=r"suffixes\[1\]: give a string"):
        llm.infill(["a", "b"], ["x", wrong], 3)
    with pytest.raises(ValueError, match=r"continuations\[0\]: give a string"):
        llm.score(["a"], [wrong])


def test_bad_prompts_are_returned_beside_the_answers_of_the_others() -> None:
    """Which are those of a call without them."""
    llm, good = LLM("embedded"), "Sam has 3 books . Sam buys 4 more . How many books does Sam have now ?"
    prompts: Any = [good, None, " ", good, "x " * 5000, {"role": "user"}]
    found = llm.generate(prompts, errors="return", max_new_tokens=64)
    assert [output.finish_reason for output in found] == ["stop", "error", "error", "stop", "error", "error"]
    alone = llm.generate([good], max_new_tokens=64)
    assert found[0].text == found[3].text == alone[0].text
    assert [output.id for output in found] == [f"line-{i}" for i in range(1, 7)]
    assert found[1].error.startswith("the prompt is of type NoneType: a prompt is a string")
    assert found[2].error.startswith("prompt has nothing but white space")
    assert "positions" in found[4].error
    assert not found[0].error
    assert [output.prompt for output in found[2:6]] == [" ", good, "x " * 5000, {"role": "user"}]
    assert [output.finish_reason for output in llm.generate([""], errors="return")] == ["error"]
    with pytest.raises(ValueError, match=r"errors='ignore': must be raise or return"):
        llm.generate([good], errors="ignore")  # type: ignore[arg-type]


def test_a_folder_may_be_called_like_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hydra reads 1.50 as 1.5, which is another folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("1.50", "1.5"):
        shutil.copytree(find("causal"), tmp_path / name)
    for name in ("1.50", Path("1.50")):
        assert LLM(name).builder.folder == Path("1.50")


def test_a_warning_is_not_repeated_for_other_numbers_or_words(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("embedded", "decode.max_new_tokens=4", "decode.drafts=0", "decode.verify=confidence")
    for words in (["Xanthippe"], ["Zeus", "Hera"], ["Zeus", "Hera", "Ares"]):
        llm.generate(words, temperature=0.7)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    kinds = [re.sub(r"\d+|\(.*?\)", "", message) for message in said]
    assert any("does not know" in kind for kind in kinds)
    assert len(kinds) == len(set(kinds))
    assert len(llm.warned) < 6


def test_a_warning_about_another_setting_is_told(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("embedded", "decode.max_new_tokens=4", "decode.drafts=0", "decode.verify=confidence")
    for setting in ({"top_p": 0.9}, {"top_p": 0.8}, {"top_k": 5}):
        llm.generate(PROBLEMS[:1], **setting)
    said = [message for message in caplog.messages if "at temperature 0 no token is drawn" in message]
    assert [message.split(":")[0] for message in said] == ["decode.top_p=0.9", "decode.top_k=5"]
