"""Learning on the ranks of a tensor group: one rank's gradients, and drafts that leave every text as it was."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.learn import trainer as module
from lopa_dist.learn.groups import group_batches
from lopa_dist.learn.learning import Learning, answers_of
from lopa_dist.learn.trainer import Trainer
from lopa_dist.models.tensor_parallel import split
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.ranks import group, on_mesh
from tests.engine.test_loop import texts
from tests.learn.test_learning import GREEDY, REQUESTS, own_answers, small


def perturbed(model: Transformer, tensor: Communicator, ranks: Communicator) -> Learning:
    """Learning whose adapter is the same on all ranks, and changes something."""
    learning = Learning(model, 79, 4, ranks, tensor=tensor)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learning.adapter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    return learning


def gradient(trainer: Trainer, seed: int) -> tuple[Tensor, float]:
    """The gradient of all ranks that a step would follow, and its loss."""
    found: list[Tensor] = []
    trainer.follow = lambda flat, *_: found.append(flat)  # type: ignore[assignment, method-assign]
    trainer.precision = nullcontext  # type: ignore[method-assign]
    model = trainer.model
    answers = [one for one in answers_of((r.prompt, r.prompt[::-1] * 3) for r in REQUESTS[:6]).learned if one.tokens]
    [batch] = group_batches(answers, trainer.masks, 10**6, np.random.default_rng(seed), model.config.pad_id)[:1]
    loss, _, _ = trainer.step(iter([batch]), 1.0, 0.0)
    return found[0], loss


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_the_gradients_are_one_rank_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, by_layer: bool
) -> None:
    """Also where a layer is run again for its gradients, as on a GPU."""
    forward = module.drafts_forward
    monkeypatch.setattr(module, "drafts_forward", lambda *given: forward(*given[:-1], by_layer))
    model = small(tmp_path / "base", kind)
    expected, loss = gradient(perturbed(copy.deepcopy(model), Solo(), Solo()).trainer, 0)
    assert float(expected.norm()) > 0

    def work(comm: Communicator, tensor: Communicator) -> tuple[Tensor, float]:
        own = copy.deepcopy(model)
        split(own, tensor)
        return gradient(perturbed(own, tensor, tensor).trainer, 0)

    for found, loss_of_rank in on_mesh(1, 2, work):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
        assert loss_of_rank == pytest.approx(loss, rel=1e-4)


def test_two_tensor_groups_learn_together_and_change_no_text(tmp_path: Path) -> None:
    model = small(tmp_path / "base")
    plain, answers = texts(model, GREEDY, REQUESTS), own_answers(model)
    drafting = replace(GREEDY, drafts=6, draft_from="masks")
    everyone = group(4)

    def work(comm: Communicator, tensor: Communicator) -> tuple[list[Tensor], int, int, float]:
        own = copy.deepcopy(model)
        split(own, tensor)
        ranks = everyone[2 * comm.rank + tensor.rank]
        learning = Learning(own, 79, 8, ranks, tensor=tensor)
        steps = iter(range(24))
        lesson = learning.lesson(answers, 600, lambda: next(steps, None) is None, part=(comm.rank, comm.size))
        learning.adopt()
        engine = Engine(own, drafting, Solo(), EngineConfig(8), tensor=tensor)
        found = {g.request.index: g for g in engine.generate(REQUESTS)}
        assert {index: g.tokens for index, g in found.items()} == {i: tokens for i, (tokens, _) in plain.items()}
        again = Learning(own, 79, 8, ranks, tensor=tensor)  # of a model that drafts with what it learned
        for mine, theirs in zip(again.adapter.parameters(), learning.adapter.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        if ranks.rank == 0:
            learning.save(tmp_path / "drafts", "base", "of base")
        parameters = [parameter.detach().clone() for parameter in learning.adapter.parameters()]
        return parameters, lesson.rows, sum(g.forwards for g in found.values()), lesson.after.chains

    [first, *others] = on_mesh(2, 2, work)
    assert first[2] < 0.8 * sum(forwards for _, forwards in plain.values())
    for parameters, *figures in others:
        assert figures == list(first[1:])
        for own, of_first in zip(parameters, first[0], strict=True):
            assert torch.equal(own, of_first)
    whole = Learning(small(tmp_path / "other"), 79, 8)
    assert whole.load(tmp_path / "drafts", "of base")
    for own, of_first in zip(whole.adapter.parameters(), first[0], strict=True):
        assert torch.equal(own, of_first)
    held_out = whole.trainer.measure(list(answers.held_out))
    assert first[3] == held_out.chains, "each answer is counted once"
