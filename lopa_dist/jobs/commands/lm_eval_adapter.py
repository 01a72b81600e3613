"""lopa_dist as a model of lm-evaluation-harness: `lopa-dist lm-eval --model_args path=... --tasks gsm8k`.

lm-evaluation-harness has no way to find models of other packages by itself, so this module registers `lopa_dist` and
then runs the harness's own command line; every option of it works. `--model_args` takes `path`, `lora`, `pattern`,
`dtype`, `device`, `quantization`, `attention`, `max_sequences`, `prefix_cache`, `seed`, `samples` (masks of an answer
whose likelihood a task asks for) and every key of the `decode` section; `--batch_size` has no effect, as no text
depends on it. One process, one device.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from inspect import getfullargspec
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lopa_dist.config import AUTO_CHOICES, AUTO_NUMBERS, Config, DecodeOptions, ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.likelihood import SAMPLES, Given, Likelihood, Scorer
from lopa_dist.engine.request import Request, request_key
from lopa_dist.jobs.run.prompts import common_prefix, pair_of
from lopa_dist.jobs.run.results import NOT_NUMBERS, finished_text
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.device import choose_device
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.parallel.launcher import LaunchError, detect

log = logging.getLogger("lopa_dist")
NAME = "lopa_dist"
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
AT_ONCE = 64  # continuations between two updates of the progress bar


@register_model(NAME)
class LopaDist(LM):  # type: ignore[misc]  # the harness is not typed
    """Generates and scores with the engine of a `lopa-dist` job, on one process.

    Raises:
        ValueError: unknown or bad arguments.
        LaunchError: started as one of several ranks.
    """

    def __init__(
        self,
        path: str = "embedded",
        lora: str | None = None,
        pattern: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        quantization: str = "none",
        attention: str = "auto",
        max_sequences: int = 16,
        prefix_cache: str = "exact",
        seed: int = 0,
        samples: int = SAMPLES,
        *,
        batch_size: int | str | None = None,  # the harness always gives it
        max_batch_size: int | None = None,
        **decode: Any,
    ) -> None:
        super().__init__()
        known = [field.name for field in fields(DecodeConfig)]
        unknown = sorted(set(decode) - set(known))
        if unknown:
            own = getfullargspec(LopaDist.__init__).args[1:]
            raise ValueError(f"--model_args {', '.join(unknown)}: unknown; known: {', '.join([*own, *known])}")
        world = detect()
        if world.size > 1:
            raise LaunchError(f"lm-eval with {world.size} ranks: run it as one process")
        if device == "cuda:0" and not torch.cuda.is_available():  # what the harness says where the user says nothing
            device = "auto"
        self.options = ModelOptions(path, lora, pattern=pattern, dtype=dtype, device=device, quantization=quantization)
        self.engine = EngineConfig(max_sequences, attention=attention, prefix_cache=prefix_cache)
        self.seed, self.samples = seed, samples
        config = Config(model=self.options)
        self._device = choose_device(config, world)
        self.builder = EngineBuilder(self.options, self._device)
        self.builder.load()
        auto = dict.fromkeys((*AUTO_CHOICES, *AUTO_NUMBERS), "auto")  # as the model was trained
        self.decode = resolve_decode(DecodeOptions(**{**auto, **decode}), self.builder.pattern)
        self.tokenizer = self.builder.tokenizer
        self.templated = False  # contexts then hold the template's special tokens already
        self.tokens = self.forwards = 0

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of every request, up to its stop strings."""
        asked = [self.generation_arguments(dict(request.args[1])) for request in requests]
        groups: dict[Sampling, list[Request]] = defaultdict(list)
        encoded = [
            self.encode(index, str(request.args[0]), most)
            for index, (request, (_, most, _)) in enumerate(zip(requests, asked, strict=True))
        ]
        for request, (_, _, rules) in zip(with_prefixes(encoded, [r.task_name for r in requests]), asked, strict=True):
            groups[rules].append(request)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="lopa_dist generate_until") as bar:
            for rules, group in groups.items():
                longest = max(request.max_new_tokens for request in group)
                config = replace(self.decode, max_new_tokens=longest, **asdict(rules))
                engine = self.builder.engine(config, self.engine)
                for generation in engine.generate(group):
                    index = generation.request.index
                    if generation.finish_reason == "error":
                        log.warning("WARNING: the answer to %s is empty: %s", requests[index].task_name, NOT_NUMBERS)
                    generation, texts[index] = finished_text(self.tokenizer, generation, asked[index][0])
                    self.tokens += len(generation.tokens)
                    self.forwards += generation.forwards
                    self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
                    bar.update()
        log.info("%d tokens in %d forwards: TPF %.2f", self.tokens, self.forwards, self.tokens / max(1, self.forwards))
        return texts

    def generation_arguments(self, given: dict[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
        """Stop strings, most tokens and sampling of a task; what it leaves out is as in the model arguments."""
        unknown = sorted(set(given) - set(GENERATION))
        if unknown:
            raise ValueError(f"generation arguments {', '.join(unknown)}: lopa_dist knows {', '.join(GENERATION)}")
        until = given.get("until") or []
        temperature = float(given.get("temperature") or self.decode.temperature)
        if given.get("do_sample") is False or given.get("temperature") == 0:
            temperature = 0.0
        most = int(given.get("max_gen_toks") or self.decode.max_new_tokens)
        top_p, top_k = float(given.get("top_p") or self.decode.top_p), int(given.get("top_k") or self.decode.top_k)
        rules = Sampling(self.decode.confidence, temperature, top_p, top_k)
        return (until,) if isinstance(until, str) else tuple(until), most, rules

    def encode(self, index: int, context: str, most: int) -> Request:
        """One context as a request; a ValueError where it is empty or longer than the model allows."""
        ids = self.tokenizer(context, add_special_tokens=not self.templated).input_ids
        room = self.builder.shape.max_positions - most
        if not 0 < len(ids) <= room:
            raise ValueError(
                f"request {index}: the prompt has {len(ids)} tokens and {most} are to be generated, but the model has "
                f"{self.builder.shape.max_positions} positions; lower --num_fewshot, or max_gen_toks in --gen_kwargs"
            )
        return Request(index, ids, most, request_key(self.seed, str(index)))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the tokenizer's template writes them."""
        self.templated = True
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, for the harness's records."""
        return str(self.tokenizer.chat_template) if self.tokenizer.chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """What the harness's caches are named after."""
        return self.options.path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results besides."""
        return {"model_path": self.options.path, "decode": asdict(self.decode), "seed": self.seed}

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log likelihood of every continuation (of a masked model, its bound), and whether it is the greedy one."""
        given = [self.given(*(str(text) for text in request.args)) for request in requests]
        found = [(one.loglikelihood, one.greedy) for one in self.scored(given, disable_tqdm)]
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, one)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of whole texts, in windows as long as the model allows."""
        sums = [0.0] * len(requests)
        windows: list[tuple[int, Given]] = []
        for number, request in enumerate(requests):
            tokens = self.tokenizer(str(request.args[0]), add_special_tokens=False).input_ids
            length = self.builder.shape.max_positions - 1
            pairs = map(make_disjoint_window, get_rolling_token_windows(tokens, self.first_token, length, 1))
            windows += ((number, Given.seeded(prompt, answer, self.seed)) for prompt, answer in pairs)
        found = self.scored([given for _, given in windows], disable_tqdm)
        for (number, _), one in zip(windows, found, strict=True):
            sums[number] += one.loglikelihood
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def scored(self, given: Sequence[Given], quiet: bool) -> list[Likelihood]:
        """The likelihoods of answers."""
        scorer, found = Scorer(self.builder.load(), self.decode, self.samples), list[Likelihood]()
        with tqdm(total=len(given), disable=quiet, desc="lopa_dist loglikelihood") as bar:
            for begin in range(0, len(given), AT_ONCE):
                found += scorer.score(given[begin : begin + AT_ONCE])
                bar.update(len(found) - bar.n)
        return found

    def given(self, context: str, continuation: str) -> Given:
        """A continuation that is to be scored; behind nothing, as the harness does, it stands behind one token."""
        special = not self.templated and bool(context)
        tokenize = partial(self.tokenizer, add_special_tokens=special)
        prompt, answer = pair_of(lambda text: list(tokenize(text).input_ids), context, continuation)
        prompt = prompt or [self.first_token]
        size, most = len(prompt) + len(answer), self.builder.shape.max_positions
        if size > most:
            raise ValueError(
                f"a context and its continuation have {size} tokens, but the model has {most} positions; lower "
                "--num_fewshot"
            )
        return Given.seeded(prompt, answer, self.seed)

    @property
    def first_token(self) -> int:
        """What a text without a context stands behind."""
        begin = self.tokenizer.bos_token_id
        return self.builder.shape.eos_ids[0] if begin is None else int(begin)


def with_prefixes(requests: Sequence[Request], tasks: Sequence[Any]) -> list[Request]:
    """The requests, each knowing how all of its task begin: with the same few-shot examples, in many tasks."""
    by_task: dict[Any, list[list[int]]] = defaultdict(list)
    for request, task in zip(requests, tasks, strict=True):
        by_task[task].append(list(request.prompt))
    # what the first and the last in order have in common, all have; a lone request shares nothing
    common = {task: common_prefix(min(prompts), max(prompts)) for task, prompts in by_task.items() if len(prompts) > 1}
    return [replace(request, prefix=common.get(task, 0)) for request, task in zip(requests, tasks, strict=True)]


def main(arguments: list[str]) -> None:
    """Run the harness's command line with `--model lopa_dist`, unless another model is named."""
    commands = [argument for argument in arguments[:1] if argument in ("run", "ls", "validate")]
    chosen = any(argument.split("=", 1)[0] in ("--model", "-M") for argument in arguments)
    model = [] if chosen or commands in (["ls"], ["validate"]) else ["--model", NAME]
    sys.argv = ["lopa-dist lm-eval", *commands, *model, *arguments[len(commands) :]]
    cli_evaluate()
