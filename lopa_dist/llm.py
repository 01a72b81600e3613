"""Text generation from Python, in a script or a notebook: `LLM`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch

from lopa_dist.composing import composed
from lopa_dist.config import Config
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.likelihood import SAMPLES
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Likelihood, Request, TokenLikelihood
from lopa_dist.jobs.run.answers import answer_of
from lopa_dist.jobs.run.attempt import work
from lopa_dist.jobs.run.prompts import Encoder, Rejection
from lopa_dist.jobs.run.session import Session
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.device import device_of, threads
from lopa_dist.jobs.setup.resolve import check_decided, resolve, resolve_decode
from lopa_dist.jobs.show.progress import ProgressDisplay
from lopa_dist.overrides import in_quotes, quoted
from lopa_dist.own_code import forget_changed
from lopa_dist.parallel.calls import Calls
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.mesh import choose_mesh
from lopa_dist.parallel.stop import Stopped
from lopa_dist.sampling_params import Prompt, SamplingParams, for_each, items_of, listed, listed_texts, params_for
from lopa_dist.setting_keys import CONF, check_keys
from lopa_dist.surroundings import undisturbed
from lopa_dist.tasks.task import Continuation, Item

log = logging.getLogger("lopa_dist")

SECTIONS = ("model", "decode", "engine", "parallel", "seed")
AT_ONCE = 64  # the most continuations that a rank scores together
SAME_CALL = "Every rank makes the same calls, with the same arguments"


@dataclass(frozen=True)
class Output:
    """An answer to a prompt."""

    id: str  # of the prompt, as a job calls it: line-1 is the first
    sample: int  # which of the prompt's answers, from 0
    prompt: Prompt
    text: str
    tokens: list[int]  # of the text, up to the first end-of-text, which is left out
    finish_reason: str  # "stop": end-of-text or a stop string; "length": as many tokens as allowed; "invalid", "error"
    prompt_tokens: int
    forwards: int  # passes through the model, prefill included; the branches of a step count as one
    drafts: int  # drafted tokens that its forwards verified (decode.verify=agreement)
    accepted: int  # of these drafts
    seconds: float  # from admission to the end; other requests run meanwhile
    tokens_per_forward: float  # TPF, which lookahead is meant to raise
    acceptance: float | None  # the share of the drafts that was accepted; None if nothing was drafted
    reasoning: str | None = None  # what came before the text, if the chat template marks it; `tokens` includes it
    logprobs: list[float] | None = None  # of each token, in nats; this and the next two with `SamplingParams.logprobs`
    steps: list[int] | None = None  # the forward that wrote each token, from 1
    ways: list[str] | None = None  # "filled", "accepted" (a draft), "bonus" (instead of a refused one), "edited"
    tries: int = 1  # answers that were generated, this being the last; forwards and seconds are of all
    failed_tokens: int = 0  # tokens of the earlier answers, which were thrown away
    invalid: str = ""  # why the text does not have the format that was asked for
    error: str = ""  # why there is no answer, with `generate(..., errors="return")`


SAMPLING_ONLY = {entry.name for entry in fields(SamplingParams)} - {entry.name for entry in fields(DecodeConfig)}


SAID: set[str] = set()  # kinds of warnings about this process's threads, which hold for every LLM in it
F = TypeVar("F", bound=Callable[..., Any])


def in_turn(call: F) -> F:
    """Return a method of `LLM` that waits while another thread is in such a method: they share model and K/V space.

    What the program around has set in torch neither affects the method nor is changed by it.
    """

    @wraps(call)
    def waiting(self: LLM, *given: Any, **named: Any) -> Any:
        if self.process != os.getpid():  # forked, perhaps while a call ran, which does not go on here
            self.turn, self.calling, self.engine, self.process = Lock(), None, None, os.getpid()
        if self.calling == get_ident():
            raise RuntimeError(
                f"{call.__name__}: called while another call of this LLM runs, as by a generator of its prompts; "
                "give a list instead"
            )
        with self.turn:
            with self.calls.refusing():
                self.check_weights()
            try:
                self.calling = get_ident()
                with undisturbed(self.threads):
                    return call(self, *given, **named)
            finally:
                self.weights = self.builder.addresses()
                self.calling = None

    return cast("F", waiting)


class LLM:
    """A diffusion language model, loaded once, that answers batches of prompts.

    Under torchrun, mpirun or srun, every rank makes the same calls with the same arguments: ranks are used as in a job
    (`parallel.*`), and every rank gets all outputs. Calls from several threads run one after the other. A copy, or an
    `LLM` that was pickled for another process, loads the model again.

    Args:
        model: a preset (a file of `conf/model`: ``embedded``, ``dream_instruct``), a checkpoint's folder, or a hub id.
        settings: ``key=value`` as on the command line, of model.*, decode.*, engine.*, parallel.* and seed
            (`lopa-dist explain` has them all).

    Raises:
        ValueError: a setting or a checkpoint that cannot be used; the message says why and what to do.

    Example:
        >>> llm = LLM("causal")
        >>> problem = "Sam has 12 candles . Sam gives 6 away . Sam buys 12 more . How many candles does Sam have now ?"
        >>> llm.generate([problem])[0].finish_reason
        'stop'
    """

    def __init__(self, model: str | os.PathLike[str] = "embedded", *settings: str) -> None:
        self.named, self.turn = (model, *settings), Lock()
        self.calling: int | None = None  # the thread that a call runs in
        self.process = os.getpid()
        if wrong := [setting for setting in settings if not isinstance(setting, str)]:
            raise ValueError(f"{wrong[0]!r}: give settings as strings, such as 'decode.drafts=4'")
        self.settings = [*model_settings(model), *settings]
        check_keys(self.settings)
        for setting in settings:
            section = setting.lstrip("+~").split("=")[0].split(".")[0]
            if section not in SECTIONS:
                raise ValueError(f"{setting}: has no effect on LLM, which takes settings of {', '.join(SECTIONS)}")
        self.config = composed(self.settings)
        self.world = detect()
        self.warned: set[str] = set()  # kinds of warnings that were logged; once is enough
        self.engine: Engine | None = None  # of the last call that generated
        self.weights: list[int] | None = None  # where the model's weights were after the last call
        device, self.threads = device_of(self.config, self.world), torch.get_num_threads()
        if device.type == "cpu":
            self.threads, why, surprise = threads(self.config, self.world)
            if self.world.rank == 0 and surprise and surprise not in SAID:
                SAID.add(surprise)
                log.warning(why)
        with undisturbed(self.threads):
            self.builder = EngineBuilder(self.config.model, device)
            self.calls = Calls(self.world, self.config.parallel.timeout_s)  # some ranks may load for long
            if self.config.parallel.tensor in ("auto", 1):  # else this rank's share is known when the ranks have met
                self.builder.load(warn=self.world.rank == 0)

    def __reduce__(self) -> tuple[type[LLM], tuple[Any, ...]]:
        return type(self), self.named

    def __repr__(self) -> str:
        return f"LLM({', '.join(map(repr, self.named))})"

    def check_weights(self) -> None:
        """Raise a ValueError if other tensors are in place of the weights that the kernels know by their addresses."""
        if self.weights is not None and self.weights != self.builder.addresses():
            raise ValueError(
                "the model's weights are other tensors than in the last call, as after load_state_dict(assign=True) or "
                "`parameter.data = ...`. Write into the existing ones (load_state_dict, copy_), or make a new LLM"
            )

    @in_turn
    def generate(
        self,
        prompts: Sequence[Prompt],
        decode: str | DecodeConfig | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        errors: Literal["raise", "return"] = "raise",
        **overrides: Any,
    ) -> list[Output]:
        """Return an output for each prompt, or `SamplingParams.n` of them, in the order of the prompts.

        The text of a prompt does not depend on the others. The same call gives the same texts, even if tokens are drawn
        at random; for different texts, give another seed.

        Args:
            prompts: texts or chats. Texts are wrapped in the tokenizer's chat template if it has one, as
                `model.chat_template` says.
            decode: how masks are filled: a preset (a file of `conf/decode`: ``verified``, ``lopa``, ``threshold``), or
                options, taken as they are. None: the options of this `LLM`.
            sampling: one object for all prompts, or one for each.
            progress: show a bar on a terminal, or in a notebook with ipywidgets.
            errors: with ``return``, a prompt that cannot be used gets an output without a text, whose `finish_reason`
                is ``error`` and whose `error` says why; the others are answered.
            overrides: single decode options, such as ``branches=3, tau_conf=0.8``.

        Raises:
            ValueError: a prompt or an option cannot be used, so nothing is generated; the message says which, why and
                what to do.
            RankError: another rank failed or was lost.
            Stopped: SIGTERM, SIGUSR1 or SIGHUP came meanwhile.
        """
        with self.calls.refusing():
            if errors not in ("raise", "return"):
                raise ValueError(f"errors={errors!r}: must be raise or return")
            items = items_of(prompts, sampling, errors == "return")
            config = self.configured(decode, overrides)
        return self.answered(items, config, progress, overrides, errors == "return")

    @in_turn
    def infill(
        self,
        prefixes: Sequence[Prompt],
        suffixes: Sequence[str],
        max_tokens: int | Sequence[int],
        decode: str | DecodeConfig | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        **overrides: Any,
    ) -> list[Output]:
        """Return outputs with the text that the model writes between each prefix and its suffix, in their order.

        The model must see text in both directions: `decode.context` is vanilla, dual or d2f.

        Args:
            prefixes: texts, which are taken as they are, or chats. If a chat's last message is the assistant's, its
                turn begins with that.
            suffixes: one for each prefix; one that begins with a word needs the space before it.
            max_tokens: masks between prefix and suffix: one number for all pairs, or one for each. The answer has as
                many tokens, or fewer if an end-of-text is among them.
            decode, sampling, progress, overrides: as for `generate`.

        Raises:
            ValueError: a text or an option cannot be used; the message says which, why and what to do.
            RankError: another rank failed or was lost.
            Stopped: SIGTERM, SIGUSR1 or SIGHUP came meanwhile.
        """
        with self.calls.refusing():
            prefixes = listed(prefixes, "prefixes")
            suffixes = listed_texts(suffixes, "suffixes", len(prefixes), "prefixes")
            limits = for_each(max_tokens, len(prefixes), "max_tokens", "prefixes")
            params = params_for(sampling, len(prefixes), "prefixes")
            limited = [replace(one, max_tokens=limit) for one, limit in zip(params, limits, strict=True)]
            items = items_of(prefixes, limited, argument="prefixes")
            items = [replace(item, suffix=suffixes[item.origin.line - 1]) for item in items if item.origin]
            config = self.configured(decode, overrides)
        return self.answered(items, config, progress, overrides, argument="prefixes")

    def answered(
        self,
        items: Sequence[Item],
        config: Config,
        progress: bool,
        overrides: Collection[str],
        return_errors: bool = False,
        argument: str = "prompts",
    ) -> list[Output]:
        """Return an output for each item, in their order; with `return_errors`, also for items that are refused.

        An option in `overrides` that has no effect is refused. In errors, the prompts are called as their `argument`.
        """
        if not items:
            return []
        limits = [item.max_new_tokens or config.decode.max_new_tokens for item in items]
        items = [replace(item, max_new_tokens=limit) for item, limit in zip(items, limits, strict=True)]
        config = replace(config, decode=replace(config.decode, max_new_tokens=max(limits)))
        builder = self.builder
        with self.calls.refusing():
            resolved = replace(config, decode=resolve_decode(config.decode, builder.pattern))
            check_decided(resolved.decode, [f"decode.{key}" for key in overrides])
            encoder = Encoder(resolved, builder.shape, builder.tokenizer)
            refused: dict[int, Output] = {}
            if return_errors:
                refused = {one.index: failed(items[one.index], one) for one in rejections(encoder.encode_all(0, items))}
                items = [item for index, item in enumerate(items) if index not in refused]
                encoder = Encoder(resolved, builder.shape, builder.tokenizer)  # whose warnings are about these alone
            if not items:
                return list(refused.values())
            requests = encoded(encoder, items, argument)
            longest = max(request.max_new_tokens for request in requests)  # as far as the model's positions reach
            config = replace(config, decode=replace(config.decode, max_new_tokens=longest))
        self.warn(encoder)
        with self.joined(config, len(items), config.decode.max_branches) as group:
            config = resolve(config, builder.shape, builder.device)
            own = {"LLM's method": "generate", "the hash of the prompts": hash_of(requests, items)}
            group.store.agree("call", work(config, builder) | own, SAME_CALL)
            session = Session(config, builder, group, items, requests)
            earlier, self.engine = self.engine, None
            if earlier:
                session.engine.take_over(earlier)
                del earlier  # what was not taken over is freed before more is made

            def values(generation: Generation) -> list[Any]:
                return list(vars(self.output(generation, items[generation.request.index])).values())

            answers = iter([Output(*one) for one in self.collected(session, progress, values)])
            self.engine = session.engine
        return [refused.get(index) or next(answers) for index in range(len(items) + len(refused))]

    @in_turn
    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[str],
        decode: str | DecodeConfig | None = None,
        samples: int = SAMPLES,
        top_logprobs: int | None = None,
        **overrides: Any,
    ) -> list[Likelihood]:
        """Return how likely the model finds each prompt's continuation; for a masked model, a lower bound.

        Args:
            prompts: as for `generate`.
            continuations: one for each prompt; one that begins with a word needs the space before it.
            decode: what rows see (`decode.context`); other options have no effect.
            samples: how many masks of a continuation, or of each of its blocks, a bound is computed from.
            top_logprobs: for a causal model: also return the log probability of each token, and this many of the most
                probable tokens in its place (`Likelihood.tokens`).
            overrides: as for `generate`.

        Raises:
            ValueError: a prompt, a continuation or an option cannot be used; the message says which and why.
            RankError: another rank failed or was lost.
            Stopped: SIGTERM, SIGUSR1 or SIGHUP came meanwhile.
        """
        builder, self.engine = self.builder, None  # whose K/V take a GPU's memory
        with self.calls.refusing():
            config = self.configured(decode, overrides)
            config = replace(config, decode=resolve_decode(config.decode, builder.pattern))
            samples = samples.item() if isinstance(samples, np.generic) else samples
            if isinstance(samples, bool) or not isinstance(samples, int):
                raise ValueError(f"samples={samples!r}: must be an integer of at least 1")
            top_logprobs = top_logprobs.item() if isinstance(top_logprobs, np.generic) else top_logprobs
            if top_logprobs is not None:
                check_top(top_logprobs, config)
            items = items_of(prompts, None)
            continuations = listed_texts(continuations, "continuations", len(items), "prompts")
            encoder = Encoder(config, builder.shape, builder.tokenizer)
            pairs = zip(items, continuations, strict=True)
            items = [replace(item, continuations=(Continuation(text, text, item),)) for item, text in pairs]
            requests = [asking(request, top_logprobs) for request in encoded(encoder, items)]
            self.warn(encoder)
        everywhere = replace(config, parallel=replace(config.parallel, data="auto", branch=1))
        with self.joined(everywhere, max(len(requests), self.world.size), 1) as group:
            own = {"LLM's method": "score", "samples": samples, "the hash of the prompts": hash_of(requests, items)}
            group.store.agree("call", work(config, builder) | own, SAME_CALL)
            config = replace(config, engine=replace(config.engine, max_sequences=AT_ONCE))
            session = Session(config, builder, group, items, requests, samples)

            def values(generation: Generation) -> list[Any]:
                assert generation.likelihoods is not None
                return list(generation.likelihoods[0])

            return [likelihood_of(found) for found in self.collected(session, False, values)]

    def warn(self, encoder: Encoder) -> None:
        """Log what is odd about the prompts of a call, each kind only once: not again for other numbers or words."""
        for kind, warning in encoder.notes.warnings().items() if self.world.rank == 0 else ():
            if kind not in self.warned:
                log.warning(warning)
            self.warned.add(kind)

    def joined(self, config: Config, requests: int, branches: int) -> AbstractContextManager[Group]:
        """Return a context whose value is the joined ranks of a call with this number of requests and branches."""
        parallel = config.parallel
        with self.calls.refusing():
            mesh = choose_mesh(parallel.data, parallel.branch, parallel.tensor, self.world.size, requests, branches)
        return self.calls.joined(mesh, parallel.backend, self.builder.device)

    def configured(self, decode: str | DecodeConfig | None, overrides: Mapping[str, Any]) -> Config:
        """Return this object's settings with the decode options of a call."""
        forget_changed()
        if decode is not None and not isinstance(decode, str | DecodeConfig):
            kind = type(decode).__name__
            what = "sampling=SamplingParams(...)" if kind == "SamplingParams" else "single options as drafts=4"
            raise ValueError(f"decode is of type {kind}: it must be a preset's name or a DecodeConfig; give {what}")
        overrides = {key: value.item() if isinstance(value, np.generic) else value for key, value in overrides.items()}
        for key, value in overrides.items():
            if key in SAMPLING_ONLY or key == "samples":
                asked = "n" if key == "samples" else key  # `task.samples` of a job
                raise ValueError(f"{key}: give it as sampling=SamplingParams({asked}=...)")
            if not isinstance(value, str | int | float | None):
                rule = "; a rule of your own is a string, FILE.py:FUNCTION" if key == "fill" else ""
                raise ValueError(f"{key} is of type {type(value).__name__}: give a string, a number or None{rule}")
        given = [
            f"decode.{key}={quoted(value) if isinstance(value, str) else 'null' if value is None else value}"
            for key, value in overrides.items()
        ]
        check_keys(given)
        if isinstance(decode, DecodeConfig):
            return replace(self.config, decode=replace(decode, **overrides))
        preset = [] if decode is None else [f"decode='{decode}'"]
        return composed([*self.settings, *preset, *given]) if preset or given else self.config

    def collected(self, session: Session, progress: bool, values: Callable[[Generation], list[Any]]) -> list[list[Any]]:
        """Return on every rank what `values` makes of each request, in their order, once all replicas have finished.

        Args:
            session: of this rank.
            progress: show a bar on a terminal, or in a notebook with ipywidgets.
            values: turns a finished request into values that JSON can hold.

        Raises:
            Stopped: a rank was asked to stop.
        """
        session.prepare()
        group, total = session.group, len(session.requests)
        own: dict[int, list[Any]] = {}
        shown = "auto" if progress and group.world.rank == 0 else "never"
        with ProgressDisplay(shown, total, session.engine.statistics, self.config.logging.every_s) as display:
            for generation in session.generate():
                if group.is_leader:
                    own[generation.request.index] = values(generation)
                    amounts = {"tokens": len(generation.tokens), "forwards": generation.forwards}
                    display.update(group.progress.add(done=1, **amounts))
            if group.is_leader:
                display.update(group.progress.add())
        group.store.sum({})  # all ranks have ended, and know of a stop that any of them was asked for
        if group.stop.asked:
            raise Stopped(f"stopped by {group.stop.signal}")
        if group.world.size > 1:
            text = json.dumps(list(own.items())) if group.is_leader else None
            texts = group.store.gather(text, group.data_rank, group.mesh.data)
            own = {index: found for text in texts for index, found in json.loads(text)}
        return [own[index] for index in range(total)]

    def output(self, generation: Generation, item: Item) -> Output:
        """Return the output of a finished request."""
        generation, reasoning, text = answer_of(self.builder.tokenizer, generation, item.stop)
        written, work = generation.written, generation.work
        assert item.origin
        return Output(
            id=item.origin.custom_id,
            sample=item.origin.sample,
            prompt=item.messages or item.prompt or "",
            text=text,
            reasoning=reasoning,
            tokens=generation.tokens,
            finish_reason="invalid" if generation.invalid else generation.finish_reason,
            prompt_tokens=generation.request.given_tokens,
            forwards=generation.forwards,
            drafts=work.drafts_verified,
            accepted=work.drafts_accepted,
            seconds=generation.seconds,
            tokens_per_forward=len(generation.tokens) / max(1, generation.forwards),
            acceptance=work.accepted_share() if work.drafts_verified else None,
            logprobs=None if written is None else [token.logprob for token in written],
            steps=None if written is None else [token.step for token in written],
            ways=None if written is None else [token.way for token in written],
            tries=generation.tries,
            failed_tokens=generation.failed_tokens,
            invalid=generation.invalid,
        )


def hash_of(requests: Sequence[Request], items: Sequence[Item]) -> str:
    """Return a hash of a call's requests and of the formats that its items ask for."""
    asked = [
        (list(r.prompt), list(r.suffix), r.max_new_tokens, r.key, r.sampling, r.token_steps, r.stop, r.scored)
        for r in requests
    ]
    formats = [item.response_format for item in items]
    return hashlib.sha256(repr((asked, formats)).encode()).hexdigest()[:24]


def model_settings(model: str | os.PathLike[str]) -> list[str]:
    """Return the overrides that choose a model: a preset if there is one of this name, else a checkpoint."""
    if isinstance(model, os.PathLike):
        return ["model=local", f"model.path={in_quotes(os.fspath(model))}"]
    if not isinstance(model, str):
        raise ValueError(f"model is of type {type(model).__name__}: give the name of a preset, a folder, or a hub id")
    if not model:
        raise ValueError("model is an empty string: give the name of a preset, a folder, or a hub id")
    if model == "local":
        raise ValueError("model 'local': give the checkpoint's folder in its place")
    if (CONF / "model" / f"{model}.yaml").exists():
        return [f"model={model}"]
    near = get_close_matches(model.lower(), [file.stem for file in (CONF / "model").glob("*.yaml")], 1, 0.8)
    if near and not Path(model).exists():  # ids of the hub have a slash
        raise ValueError(f"model {model!r}: neither a preset nor a folder; did you mean {near[0]}?")
    return ["model=local", f"model.path={in_quotes(model)}"]  # a folder's name may be a number


def check_top(top_logprobs: Any, config: Config) -> None:
    """Raise a ValueError unless a call may ask for log probabilities of each token and of `top_logprobs` others."""
    if isinstance(top_logprobs, bool) or not isinstance(top_logprobs, int) or top_logprobs < 0:
        raise ValueError(f"top_logprobs={top_logprobs!r}: must be a number from 0 on")
    if not config.decode.causal:
        raise ValueError(
            f"top_logprobs={top_logprobs}: only a causal model's tokens have log probabilities of their own; for a "
            "masked model there is only a bound for the whole text"
        )


def asking(request: Request, top: int | None) -> Request:
    """Return `request`, which asks for likelihoods, with `Given.top` set to `top` in all of its texts."""
    return replace(request, scored=tuple(tuple(replace(part, top=top) for part in text) for text in request.scored))


def likelihood_of(values: Sequence[Any]) -> Likelihood:
    """Return the likelihood with these values, which JSON may have turned into lists."""
    found = Likelihood(*values)
    if found.tokens is None:
        return found
    tokens = [
        TokenLikelihood(token, logprob, [(id, other) for id, other in top]) for token, logprob, top in found.tokens
    ]
    return found._replace(tokens=tokens)


def rejections(requests: Sequence[Request | Rejection]) -> list[Rejection]:
    """Return those of the requests that the model refuses."""
    return [one for one in requests if isinstance(one, Rejection)]


def failed(item: Item, rejection: Rejection) -> Output:
    """Return the output of a prompt that cannot be used."""
    assert item.origin
    return Output(
        id=item.origin.custom_id, sample=item.origin.sample, prompt=item.messages or item.prompt or "", text="",
        tokens=[], finish_reason="error", prompt_tokens=0, forwards=0, drafts=0, accepted=0, seconds=0.0,
        tokens_per_forward=0.0, acceptance=None, error=rejection.reason,
    )  # fmt: skip


def encoded(encoder: Encoder, items: Sequence[Item], argument: str = "prompts") -> list[Request]:
    """Return the items as requests; raise a ValueError, with the name of the `argument`, if the model refuses some."""
    requests = encoder.encode_all(0, items)
    if refused := rejections(requests):
        item = items[refused[0].index]
        assert item.origin
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ValueError(f"{argument}[{item.origin.line - 1}]: {refused[0].reason}{more}")
    return [one for one in requests if isinstance(one, Request)]
