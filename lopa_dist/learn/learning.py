"""What a model's masks learn in one job: an adapter, the lessons that train it, and how it gets to the engines."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lopa_dist.engine.request import WRITTEN, Generation, Request
from lopa_dist.learn.drafts_adapter import DraftsAdapter
from lopa_dist.learn.groups import Answer
from lopa_dist.learn.trainer import MASKS, FailedElsewhere, LearningFailed, Lesson, Trainer
from lopa_dist.models.adapter import finite, load_adapter, save_adapter
from lopa_dist.models.checkpoint import attaching
from lopa_dist.models.families import checkpoint_name
from lopa_dist.models.files import same_revision
from lopa_dist.models.quantize import QuantizedLinear
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.parallel.step_watch import Watched, unwatched

T = TypeVar("T")
HELD_OUT = 20  # one in this many prompts is held out to measure with
MOST_ANSWERS = 8192  # most answers that a rank keeps of each kind, the latest ones
MOST_TOKENS = 1 << 22  # most tokens of all of them, prompts included


def check_learnable(model: Transformer) -> None:
    """Raise a ValueError if a model's drafts cannot be learned."""
    if model.config.experts is not None:
        raise ValueError("drafts of a mixture of experts cannot be learned: its products have no gradients here")
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError(
            "model.quantization: drafts cannot be learned with quantized weights; learn with quantization=none"
        )


class Answers:
    """The answers to learn from, and those that are held out to measure with."""

    def __init__(self) -> None:
        self.learned: deque[Answer] = deque()
        self.held_out: deque[Answer] = deque()
        self.tokens = 0

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Add an answer, with its end-of-text if the model wrote one; drop the oldest ones if there are too many."""
        answer = Answer(list(prompt), list(tokens))
        kept = self.held_out if is_held_out(prompt) else self.learned
        kept.append(answer)
        self.tokens += len(answer.prompt) + len(answer.tokens)
        while len(kept) > 1 and (self.tokens > MOST_TOKENS or len(kept) > MOST_ANSWERS):
            oldest = kept.popleft()
            self.tokens -= len(oldest.prompt) + len(oldest.tokens)

    def take(self, generation: Generation, eos: int) -> None:
        """Add a request's answer, if it finished with a text."""
        if generation.finish_reason in WRITTEN:
            request, reason = generation.request, generation.finish_reason
            self.add(request.prompt, with_end(generation.tokens, reason, request, eos))

    def __len__(self) -> int:
        return len(self.learned) + len(self.held_out)


def with_end(tokens: Sequence[int], finish_reason: str, request: Request, eos: int) -> list[int]:
    """Return an answer's tokens, with the end-of-text after them if the model ended the answer with one.

    It is left out if the request has stop strings, because one of these may have ended the answer.
    """
    return [*tokens, *([eos] * (finish_reason == "stop" and not request.stop))]


def is_held_out(prompt: Sequence[int]) -> bool:
    """Return whether a prompt is held out to measure with."""
    return zlib.crc32(np.array(prompt, np.int64).tobytes()) % HELD_OUT == 0


class Learning:
    """A model's adapter on this rank, which all ranks of a job train together.

    Args:
        model: on its device; the adapter starts from what its masks draft with now.
        mask_id: the token under which the mask's embedding is saved.
        rank: of the adapter's matrices.
        ranks: all ranks of the job.
        watched: a context for what ranks wait for together.
        masks: masks per group: as many as drafts that a chain may have.
        tensor: the group that the model is split over.
        meet: as in `Trainer`.

    Raises:
        LearningFailed: some rank cannot set it up, for instance for lack of memory.
    """

    def __init__(
        self,
        model: Transformer,
        mask_id: int,
        rank: int,
        ranks: Communicator | None = None,
        watched: Watched = unwatched,
        masks: int = MASKS,
        tensor: Communicator | None = None,
        meet: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.model, self.mask_id, self.ranks = model, mask_id, ranks or Solo()
        self.watched = watched

        def begin() -> None:
            self.adapter = DraftsAdapter(model, rank, tensor=tensor)
            self.trainer = Trainer(model, self.adapter, self.ranks, masks, watched, meet)

        self.together(begin)
        self.share()

    def together(self, act: Callable[[], T]) -> T:
        """Run `act` on all ranks and return its result; if it fails on one, it counts as failed on all.

        Raises:
            LearningFailed: with the error of this rank, if it has one.
        """
        result = list[T]()
        error: Exception | None = None
        try:
            result.append(act())
        except Exception as failure:
            error = failure
        with self.watched(True):
            failed = float(self.ranks.sum(torch.tensor([float(error is not None)], device=self.device)))
        if failed:
            raise (LearningFailed(str(error)) if error else FailedElsewhere()) from error
        return result[0]

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return self.model.head_weight.device

    def share(self) -> None:
        """Give all ranks rank 0's adapter: replicas may differ, but the ranks of a replica must draft alike."""
        for parameter in self.adapter.parameters():
            with self.watched(True):
                parameter.data.copy_(self.ranks.broadcast(parameter.data.contiguous(), 0, counted=False))

    def lesson(
        self,
        answers: Answers,
        seconds: float,
        stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[float, float], None] = lambda share, loss: None,
        part: tuple[int, int] = (0, 1),
        leave: Callable[[], bool] = lambda: False,
    ) -> Lesson:
        """Learn for a while, all ranks together; the other arguments are those of `Trainer.learn`.

        Args:
            part: ``(i, n)``: of ranks with the same answers, this one takes the i-th of n parts.

        Raises:
            LearningFailed: on all ranks alike.
        """
        index, count = part
        learned, held_out = list(answers.learned)[index::count], list(answers.held_out)[index::count]
        lesson = self.trainer.learn(learned, held_out, seconds, stop, on_step, leave)
        self.share()
        return lesson

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the model's masks draft with the adapter as it is; engines must take it, too (`Engine.take_adapter`).

        Raises:
            LearningFailed: the adapter has NaN or infinity, or a rank has no memory for it. Then no rank drafts with
                it, because the ranks of a replica must draft alike.
        """
        weight = self.model.model.embed_tokens.weight

        def prepare() -> Callable[[], None]:
            pairs = {
                f"{name}.weight": (a.to(weight.dtype, copy=True), b.to(weight.dtype, copy=True))
                for name, (a, b) in self.adapter.pairs().items()
            }
            if not all(finite(x) for pair in pairs.values() for x in pair) or not finite(self.adapter.mask):
                raise ValueError("the adapter has NaN or infinity")
            return attaching(self.model, pairs, self.adapter.tensor, self.adapter.mask.detach())

        attach = self.together(prepare)
        attach()

    def save(self, folder: Path, base: str, revision: str) -> None:
        """Write the adapter in PEFT's form; the arguments are those of `save_adapter`."""
        family = self.model.config.family
        pairs = {checkpoint_name(family, f"{name}.weight"): pair for name, pair in self.adapter.pairs().items()}
        save_adapter(folder, pairs, self.mask_id, self.adapter.mask, base, revision)

    @torch.no_grad()
    def load(self, folder: Path, revision: str) -> bool:
        """Go on with an adapter that was saved for this checkpoint; return whether rank 0 found one.

        Args:
            folder: on rank 0; it need not exist.
            revision: the checkpoint's.

        Raises:
            LearningFailed: the saved adapter does not fit; on rank 0, the message says why.
        """
        found = self.together(lambda: self.ranks.rank == 0 and self.read(folder, revision))
        with self.watched(True):
            found = bool(self.ranks.sum(torch.tensor([float(found)], device=self.device)) > 0)
        if found:
            self.share()
        return found

    def read(self, folder: Path, revision: str) -> bool:
        """Read the adapter in a folder; return whether there is one.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged, of another checkpoint, or of another rank.
        """
        if not (folder / "adapter_model.safetensors").exists():
            return False
        saved = load_adapter(folder, "masks")
        if not same_revision(saved.base_revision, revision):
            raise ValueError(f"{folder} is of another checkpoint")
        family = self.model.config.family
        own = self.adapter.pairs()
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (a, b) in own.items():
            pair = saved.pairs.get(checkpoint_name(family, f"{name}.weight"))
            if pair is not None and len(pair[0]) != len(a):
                raise ValueError(f"{folder} has rank {len(pair[0])}, and not learn.rank={len(a)}")
            if pair is None or pair[0].shape != a.shape or pair[1].shape != b.shape:
                raise ValueError(f"{folder} has other modules than this model")
            pairs[name] = pair[0], pair[1] * saved.scale
        mask = self.adapter.mask
        if saved.mask_id != self.mask_id or saved.mask is None or saved.mask.shape != mask.shape:
            raise ValueError(f"{folder} has another mask")
        for name, a, b in zip(self.adapter.names, self.adapter.a, self.adapter.b, strict=True):
            a.copy_(pairs[name][0])
            b.copy_(pairs[name][1])
        mask.copy_(saved.mask)
        return True


def answers_of(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Answers:
    """Return `Answers` of prompts and answers, both as tokens."""
    answers = Answers()
    for prompt, tokens in pairs:
        answers.add(prompt, tokens)
    return answers
