"""Training of drafts: batches of groups, gradients summed over all ranks, and a schedule that follows the clock.

Matrices are trained with Muon, by which chains are accepted further than by AdamW after the same time (docs/tried.md),
and the mask's embedding with AdamW.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from lopa_dist.engine.memory import free_bytes
from lopa_dist.learn.drafts_adapter import DraftsAdapter
from lopa_dist.learn.groups import Answer, GroupBatch, group_batches
from lopa_dist.learn.memory import WHOLE, bytes_of_step, rows_that_fit, text_tokens
from lopa_dist.learn.network import clean_forward, drafts_forward
from lopa_dist.learn.predictions import Reached, losses_of, reach, reached, targets_of, tokens_of
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.parallel.failures import in_words
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.node_memory import memory_left
from lopa_dist.parallel.step_watch import Watched, unwatched
from lopa_dist.staging import to_device

MASKS = 8  # per group
ROWS = 4096  # masks per step, on all ranks together
MUON_LR, ADAM_LR = 0.02, 0.002
WARM_UP = 30  # steps
HOLD = 0.4  # share of a lesson's time before the learning rate begins to fall
MOST_BROKEN = 5  # consecutive steps whose gradients are not numbers


class LearningFailed(RuntimeError):
    """Drafts could not be learned, on any rank; the message is this rank's error, if it has one."""


class FailedElsewhere(LearningFailed):
    """Another rank failed, and knows why."""

    def __init__(self, message: str = "another rank failed") -> None:
        super().__init__(message)


@dataclass
class Lesson:
    """What a period of learning brought."""

    before: Reached  # on held-out answers
    after: Reached
    steps: int = 0
    rows: int = 0  # masks that were trained
    seconds: float = 0.0
    processor_s: float = 0.0
    left: bool = False  # whether the last measurement was broken off, so that `after` says nothing
    losses: list[float] = field(default_factory=list)  # of each step


class Trainer:
    """Trains an adapter on answers. All ranks make the same calls, each with its own answers.

    Args:
        model: on its device; its weights stay as they are.
        adapter: the one to train, equal on all ranks.
        ranks: all ranks of the job, which all take part.
        masks: masks per group.
        watched: a context for what ranks wait for together.
        meet: waits until all ranks have come to the place that its argument names; no name comes twice.

    The tensor ranks that a model is split over (`DraftsAdapter.tensor`) have the same answers, and share their work.
    """

    def __init__(
        self,
        model: Transformer,
        adapter: DraftsAdapter,
        ranks: Communicator,
        masks: int = MASKS,
        watched: Watched = unwatched,
        meet: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.model, self.adapter, self.ranks, self.masks = model, adapter, ranks, masks
        self.watched, self.meet = watched, meet
        self.device, self.tensor = model.head_weight.device, adapter.tensor
        first = self.tensor.broadcast(torch.tensor([ranks.rank], device=self.device), 0, counted=False)
        self.rng = np.random.default_rng([0, int(first)])  # the same on all ranks of a tensor group
        matrices = [p for p in adapter.parameters() if p.ndim == 2]
        others = [p for p in adapter.parameters() if p.ndim != 2]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0), MUON_LR),
            (torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0), ADAM_LR),
        ]
        self.by_layer = False  # whether layers keep only their inputs for the backward pass
        self.steps = self.measurements = 0
        self.failure = ""  # of this rank, which the others hear of in the next sum

    def learn(
        self,
        answers: list[Answer],
        held_out: list[Answer],
        seconds: float,
        stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[float, float], None] = lambda share, loss: None,
        leave: Callable[[], bool] = lambda: False,
    ) -> Lesson:
        """Train for a while, and return what that brought.

        Args:
            answers: this rank's share.
            held_out: this rank's share of the answers to measure with, which are not trained on.
            seconds: the time for the first measurement and the steps, by this rank's clock; the ranks end together.
            stop: whether to end now; asked once per step.
            on_step: gets the share of the time that is over, and the step's loss; not called after the last step.
            leave: whether to break off a measurement, on all ranks. What was learned is then taken to be worth nothing.

        Raises:
            LearningFailed: something failed on any rank, or no rank has answers. The adapter may then be in any state.
        """
        began, processor = time.perf_counter(), time.process_time()
        before = self.measure(held_out, leave)
        known = before or Reached(np.zeros(self.masks), np.zeros(self.masks), 0.0)
        lesson = Lesson(known, known)
        batches, broken, share = self.endless(answers), 0, 0.0 if before else 1.0
        while share < 1:
            factor = min(1.0, (self.steps + 1) / WARM_UP) * min(1.0, (1 - share) / (1 - HOLD))
            spent = (time.perf_counter() - began) / seconds
            loss, rows, share = self.step(batches, factor, 1.0 if stop() else spent)
            if not rows:
                raise LearningFailed("no answer to learn from has two tokens or more")
            self.steps += 1
            lesson.steps, lesson.rows = lesson.steps + 1, lesson.rows + rows
            lesson.losses.append(loss)
            broken = 0 if math.isfinite(loss) else broken + 1
            if broken == MOST_BROKEN:
                raise LearningFailed(f"the gradients of {broken} steps in turn were not numbers")
            if share < 1:  # a lesson that is stopped ends with 1, too, long before its time is over
                on_step(share, loss)
        after = self.measure(held_out, leave) if before else None
        lesson.after, lesson.left = after or known, not after
        lesson.seconds, lesson.processor_s = time.perf_counter() - began, time.process_time() - processor
        return lesson

    def endless(self, answers: list[Answer]) -> Iterator[GroupBatch | None]:
        """Yield batches of all answers, over and over; None if there are none."""
        while True:
            batches = self.batches(answers, self.rng)
            yield from batches if batches else (None,)

    def batches(self, answers: list[Answer], rng: np.random.Generator) -> list[GroupBatch]:
        """Return all answers in batches, except those that are too short to draft in."""
        usable = [answer for answer in answers if len(answer.tokens) > 1]
        longest = max((len(one.prompt) + len(one.tokens) for one in usable), default=1)
        rows = self.rows_of_step(longest)
        most = text_tokens(rows, longest)
        return group_batches(usable, self.masks, rows, rng, self.model.config.eos_ids[0], tokens=most)

    def rows_of_step(self, longest: int) -> int:
        """Return how many masks this rank has per step, for texts of at most `longest` tokens, and set `by_layer`."""
        at_once = self.ranks.size // self.tensor.size
        most, least = max(ROWS // at_once, 4 * self.masks), 4 * self.masks
        on_gpu = free_bytes(self.device)
        free = memory_left(detect().local_size) if on_gpu is None else on_gpu
        free = int(self.tensor.all_gather(torch.tensor([free], device=self.device)).min())
        rank, element = len(self.adapter.a[0]), self.model.head_weight.element_size()
        config = self.model.config
        whole = bytes_of_step(config, most, longest, element, by_layer=False)
        self.by_layer = on_gpu is not None or whole > WHOLE * free
        return rows_that_fit(config, free, rank, longest, element, most, least)

    def step(self, batches: Iterator[GroupBatch | None], factor: float, share: float) -> tuple[float, int, float]:
        """Make one step on all ranks.

        Args:
            batches: this rank's.
            factor: of the learning rates, the same on all ranks.
            share: of the time that is over, by this rank's clock.

        Returns:
            The mean loss and the number of masks of all ranks, and the share of the time by rank 0's clock, or 1 if it
            is over on any rank.
        """
        parameters = list(self.adapter.parameters())
        loss, weight, rows = 0.0, 0.0, 0
        gradients: Tensor | None = None
        total: Tensor | None = None
        try:
            batch = None if self.failure else next(batches)
            if batch is not None:
                total, of_masks = self.loss(batch)
                total.backward()
                loss, weight, rows = float(total.detach()), float(of_masks), batch.rows
                gradients = self.gradients(parameters)
        except Exception as error:  # the other ranks wait, whatever happened here
            self.failure = in_words(error)
        total = None  # and with it all that the backward pass needed
        self.forget_gradients()
        if gradients is None:
            gradients = torch.zeros(sum(p.numel() for p in parameters), device=self.device)
        if self.tensor.rank:
            loss, weight, rows = 0.0, 0.0, 0
        own = [bool(self.failure), share >= 1, loss, weight, rows, 0.0 if self.ranks.rank else share]
        said = torch.tensor(own, device=self.device, dtype=torch.float32)
        with self.watched(True):
            flat = self.ranks.sum(torch.cat([gradients, said]))
        gradient, (failed, over, loss, weight, all_rows, share) = flat[: -len(own)], flat[-len(own) :].tolist()
        if failed:
            raise self.failed()
        if not (weight and math.isfinite(loss) and bool(gradient.isfinite().all())):
            return math.nan, int(all_rows), 1.0 if over else share
        try:
            self.follow(gradient / weight, parameters, factor)
        except Exception as error:  # the other ranks may have followed, and wait in the next sum
            self.failure = in_words(error)
        return loss / max(weight, 1.0), int(all_rows), 1.0 if over else share

    def failed(self) -> LearningFailed:
        """Return the error for a failure on any rank, and forget that of this rank."""
        own, self.failure = self.failure, ""
        self.forget_gradients()
        return LearningFailed(own) if own else FailedElsewhere()

    def gradients(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return this rank's gradients, flattened.

        Gradients that every tensor rank computes in full count only on the group's first rank.
        """
        again = {id(p) for p in self.adapter.same_everywhere()} if self.tensor.rank else set()
        found = [torch.zeros_like(p) if p.grad is None or id(p) in again else p.grad for p in parameters]
        return torch.cat([gradient.flatten() for gradient in found])

    def forget_gradients(self) -> None:
        """Free the gradients."""
        for optimizer, _ in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def follow(self, flat: Tensor, parameters: list[nn.Parameter], factor: float) -> None:
        """Step the optimizers along the gradients ``[parameters]`` of all ranks."""
        flat = flat * min(1.0, 1.0 / (float(flat.norm()) + 1e-6))
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer, rate in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
        self.forget_gradients()

    def loss(self, batch: GroupBatch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of a batch's losses, and the sum of the weights."""
        hidden, target, real = self.predicted(batch)
        losses = losses_of(hidden, self.model.head_weight, target, self.tensor)
        weights = reach(losses, real)
        return (losses * weights).sum(), weights.sum()

    def predicted(self, batch: GroupBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states ``[M, d]`` of masks that predict, their targets ``[M]``, and which masks predict."""
        tokens, starts, counts = (to_device(x, self.device) for x in (batch.tokens, batch.starts, batch.counts))
        with self.precision():
            clean = clean_forward(self.model, tokens)
            hidden = drafts_forward(self.model, self.adapter, clean, tokens, starts, self.masks, self.by_layer)
        targets = targets_of(tokens, starts, counts, self.masks)
        return hidden[targets.real], targets.tokens, targets.real

    def precision(self) -> AbstractContextManager[object]:
        """Return the context of a forward: in bf16 on CPUs with bf16 products, else in the weights' precision."""
        if self.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def measure(self, answers: list[Answer], leave: Callable[[], bool] = lambda: False) -> Reached | None:
        """Return how far chains of drafts would be accepted in the answers of all ranks, after every position.

        None is returned on all ranks if `leave()`, asked before each batch, was true on any of them.

        Raises:
            LearningFailed: something failed on any rank.
        """
        total, left = np.zeros((3, self.masks)), False
        try:
            for batch in () if self.failure else self.batches(answers, np.random.default_rng(0)):
                asked = torch.tensor([float(leave())], device=self.device)
                if left := bool(self.tensor.sum(asked) > 0):  # tensor ranks run each batch together
                    break
                hidden, target, real = self.predicted(batch)
                found = reached(tokens_of(hidden, self.model.head_weight, self.tensor) == target, real)
                total += np.stack([found.tried, found.accepted, np.full(self.masks, found.chains)])
        except Exception as error:  # the other ranks wait, whatever happened here
            self.failure = in_words(error)
        own = [*(total * (self.tensor.rank == 0)).flatten(), float(left), float(bool(self.failure))]
        self.measurements += 1
        self.meet(f"measurement {self.measurements}")  # a rank may have many more answers to measure with
        with self.watched(True):
            sums = self.ranks.sum(torch.tensor(own, dtype=torch.float64).to(self.device))
        *figures, left_anywhere, failed = sums.tolist()
        if failed:
            raise self.failed()
        if left_anywhere:
            return None
        tried, accepted, chains = np.array(figures).reshape(3, -1)
        return Reached(tried, accepted, float(chains[0]))
