"""Learning: what comes of it drafts better, is read by PEFT, and leaves every text as it was."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.work import Work
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.learn.groups import Answer, group_batches
from lopa_dist.learn.learning import Answers, Learning, answers_of, check_learnable, is_held_out
from lopa_dist.learn.trainer import ROWS, LearningFailed
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import attaching, load_model
from lopa_dist.models.config import Experts
from lopa_dist.models.files import CheckpointError
from lopa_dist.models.tokenizer import unused_token
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import random_requests, texts
from tests.models.small_checkpoints import CAUSAL_KINDS, reference, weights_of, write

CPU = torch.device("cpu")
GREEDY = DecodeConfig(context="causal", drafts=0, max_new_tokens=24)
REQUESTS = [replace(one, max_new_tokens=24) for one in random_requests(3, 40, 24)]


def small(folder: Path, name: str = "qwen2") -> Transformer:
    """A small autoregressive model, whose head and embeddings are tied."""
    kind = CAUSAL_KINDS[name]
    return load_model(write(folder, kind, weights_of(kind, reference(kind))), torch.float32, CPU)


def own_answers(model: Transformer) -> Answers:
    found = texts(model, GREEDY, REQUESTS)
    return answers_of((request.prompt, found[request.index][0]) for request in REQUESTS)


def test_learned_drafts_are_accepted_and_change_no_text(tmp_path: Path) -> None:
    model = small(tmp_path / "base")
    model.config = replace(model.config, pad_id=-1)  # as in some published files, and with no embedding
    plain, answers = texts(model, GREEDY, REQUESTS), own_answers(model)
    learning = Learning(model, 79, 8)
    steps = iter(range(60))
    lesson = learning.lesson(answers, 600, stop=lambda: next(steps, None) is None)
    assert lesson.steps == 61
    assert lesson.losses[-1] < lesson.losses[0] / 2
    learning.adopt()
    drafting = replace(GREEDY, drafts=6, draft_from="masks")
    learned = texts(model, drafting, REQUESTS)
    assert {i: tokens for i, (tokens, _) in learned.items()} == {i: tokens for i, (tokens, _) in plain.items()}
    assert sum(forwards for _, forwards in learned.values()) < 0.8 * sum(forwards for _, forwards in plain.values())
    assert texts(model, GREEDY, REQUESTS) == plain  # the head of a tied model does not move with the mask's embedding

    learning.save(tmp_path / "drafts", "base", "of base")
    adapter = load_adapter(tmp_path / "drafts", "masks")
    again = load_model(tmp_path / "base", torch.float32, CPU, adapter)
    assert texts(again, drafting, REQUESTS) == learned
    other = Learning(small(tmp_path / "other"), 79, 8)
    with pytest.raises(LearningFailed, match="is of another checkpoint"):
        other.load(tmp_path / "drafts", "of another")
    with pytest.raises(LearningFailed, match=r"has rank 8, and not learn\.rank=4"):
        Learning(small(tmp_path / "ranked"), 79, 4).load(tmp_path / "drafts", "of base")
    assert not other.load(tmp_path / "nothing", "of base")
    assert other.load(tmp_path / "drafts", "of base")
    for own, saved in zip(other.adapter.parameters(), learning.adapter.parameters(), strict=True):
        assert torch.equal(own, saved)


def test_ranks_train_one_adapter_and_fail_together(tmp_path: Path) -> None:
    kind = CAUSAL_KINDS["qwen2"]
    folder = write(tmp_path / "base", kind, weights_of(kind, reference(kind)))
    answers = own_answers(load_model(folder, torch.float32, CPU))

    met: list[str] = []

    def work(comm: Communicator) -> tuple[list[torch.Tensor], int, str]:
        own = Answers()
        for one in list(answers.learned)[comm.rank :: 3]:  # the third rank has a few, and none to measure with
            own.add(one.prompt, one.tokens[: 24 if comm.rank < 2 else 3])
        learning = Learning(load_model(folder, torch.float32, CPU), 79, 4, comm, meet=met.append)
        steps = iter(range(4))
        lesson = learning.lesson(own, 600, stop=lambda: comm.rank == 1 and next(steps, None) is None)
        found = [parameter.detach().clone() for parameter in learning.adapter.parameters()]
        if comm.rank == 2:
            learning.trainer.loss = None  # type: ignore[assignment]
        with pytest.raises(LearningFailed) as failed:
            learning.lesson(own, 600)
        return found, lesson.rows, str(failed.value)

    [first, *others] = on_ranks(3, work)
    assert sorted(met) == [f"measurement {n}" for n in (1, 2, 3) for _ in range(3)]
    assert "another rank failed" in first[2]
    assert "not callable" in others[1][2]
    for found, rows, _ in others:
        assert rows == first[1]
        for own, of_first in zip(found, first[0], strict=True):
            assert torch.equal(own, of_first)


def test_peft_reads_what_was_learned(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e .[dev]")
    model = small(tmp_path / "base")
    learning = Learning(model, 79, 4)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learning.adapter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random))
    learning.save(tmp_path / "drafts", "base", "revision")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "drafts").merge_and_unload()
    embedding = merged.get_input_embeddings().weight[79]
    torch.testing.assert_close(embedding, learning.adapter.mask.detach())
    state = merged.state_dict()
    for name, (a, b) in learning.adapter.pairs().items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        torch.testing.assert_close(state[f"{name}.weight"], weight + b @ a)


def test_a_fault_is_told_and_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(tmp_path / "base")
    answers = own_answers(model)
    learning = Learning(model, 79, 4)

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(learning.trainer, "loss", no_memory)
    with pytest.raises(LearningFailed, match="no room"):
        learning.lesson(answers, 600)
    monkeypatch.undo()
    monkeypatch.setattr(learning.trainer, "follow", no_memory)
    with pytest.raises(LearningFailed, match="no room"):
        learning.lesson(answers, 600, stop=lambda: True)  # in the measurement after the only step
    assert all(parameter.grad is None for parameter in learning.adapter.parameters())
    monkeypatch.undo()
    nan = torch.tensor(float("nan"), requires_grad=True)
    monkeypatch.setattr(learning.trainer, "loss", lambda batch: (nan * 1, torch.tensor(1.0)))
    before = [parameter.detach().clone() for parameter in learning.adapter.parameters()]
    with pytest.raises(LearningFailed, match="not numbers"):
        learning.lesson(answers, 600)
    for parameter, was in zip(learning.adapter.parameters(), before, strict=True):
        assert torch.equal(parameter, was)


def test_no_answers_are_nothing_to_learn_from(tmp_path: Path) -> None:
    learning = Learning(small(tmp_path / "base"), 79, 4)
    with pytest.raises(LearningFailed, match="no answer to learn from has two tokens or more"):
        learning.lesson(Answers(), 600)


def test_what_cannot_be_learned_is_refused(tmp_path: Path) -> None:
    kind = CAUSAL_KINDS["qwen3"]
    folder = write(tmp_path / "base", kind, weights_of(kind, reference(kind)))
    model = load_model(folder, torch.float32, CPU)
    check_learnable(model)
    model.config = replace(model.config, experts=Experts(4, 2, 8, "softmax", False))
    with pytest.raises(ValueError, match="drafts of a mixture of experts cannot be learned"):
        check_learnable(model)
    eight = load_model(folder, torch.float32, CPU, quantization="int8")
    with pytest.raises(ValueError, match="quantization=none"):
        check_learnable(eight)


def test_an_adapter_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    builder = EngineBuilder(ModelOptions(path="causal", dtype="fp32"), CPU)
    model = builder.load()
    learning = Learning(model, builder.shape.mask_id, 4)
    learning.save(tmp_path / "own", "causal", builder.revision)
    learning.save(tmp_path / "strange", "causal", "0123456789abcdef")
    with safe_open(tmp_path / "own" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["base_revision"] == builder.revision

    def with_adapter(name: str, path: str = "causal") -> EngineBuilder:
        options = ModelOptions(path=path, dtype="fp32", lora=str(tmp_path / name), lora_rows="masks")
        return EngineBuilder(options, CPU)

    with_adapter("own").load()
    with pytest.raises(CheckpointError, match="learned on another checkpoint"):
        with_adapter("strange").load()
    config = tmp_path / "own" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"trainable_token_indices": [5]}))
    with pytest.raises(CheckpointError, match="for another checkpoint"):
        with_adapter("own")


def test_batches_have_every_position_of_an_answer() -> None:
    answers = [Answer([1] * 3, list(range(length))) for length in (2, 9, 30, 31, 5)]
    batches = group_batches(answers, 4, 200, np.random.default_rng(0), 0)
    seen = [
        (tuple(row[row > 0][:3]), int(start)) for batch in batches for row, starts, counts in
        zip(batch.tokens, batch.starts, batch.counts, strict=True) for start, count in zip(starts, counts, strict=True)
        if count
    ]  # fmt: skip
    assert len(seen) == sum(len(answer.tokens) - 1 for answer in answers)
    for batch in batches:
        assert batch.starts.size * batch.masks <= 200
    assert sum(batch.rows for batch in batches) == sum(
        min(4, len(answer.tokens) - 1 - s) for answer in answers for s in range(len(answer.tokens) - 1)
    )


def test_batches_of_long_prompts_are_bounded_by_their_tokens() -> None:
    answers = [Answer([1] * prompt, [1, 2, 3]) for prompt in (700, 10, 20, 700, 690, 2000, 10)]
    batches = group_batches(answers, 4, 10_000, np.random.default_rng(0), 0, tokens=1500)
    assert sum(len(batch.tokens) for batch in batches) == len(answers)
    assert all(batch.tokens.size <= 1500 or len(batch.tokens) == 1 for batch in batches)
    assert max(len(batch.tokens) for batch in batches) > 1


def test_what_is_held_out_follows_from_the_prompt() -> None:
    random_prompts = [[i, 7 * i, i * i] for i in range(2000)]
    assert 60 < sum(map(is_held_out, random_prompts)) < 140


def test_a_mask_is_saved_as_a_token_that_no_text_has() -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "<|reserved_special_token_7|>": 2, "c": 3}

    words: Any = Words()
    assert unused_token(words, 6) == 5
    assert unused_token(words, 4) == 2
    assert unused_token(words, 2) == 2


def test_an_engine_takes_an_adapter_and_keeps_its_table(tmp_path: Path) -> None:
    builder = EngineBuilder(ModelOptions(path="causal", dtype="fp32"), CPU)
    engine = builder.engine(replace(GREEDY, drafts=4), EngineConfig(4))
    assert engine.drafter
    engine.drafter.remember([1, 2, 3, 4])
    engine.drafter.admit(0, [1, 2], Work())
    entries = engine.drafter.proposed(0, [3])
    assert {token for token, _ in entries} == {4}
    Learning(builder.load(), builder.shape.mask_id, 4).adopt()
    engine.take_adapter()
    engine.drafter.admit(0, [1, 2], Work())
    assert engine.drafter.proposed(0, [3]) == entries


def test_an_adapter_with_some_projections_keeps_its_rank_in_all(tmp_path: Path) -> None:
    """Learned further with another rank asked for, it is one that can be read."""
    model = small(tmp_path / "base")
    weight = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    assert isinstance(weight, torch.Tensor)
    pair = torch.ones(3, weight.shape[1]), torch.zeros(len(weight), 3)
    attaching(model, {"model.layers.0.self_attn.q_proj.weight": pair}, Solo(), torch.zeros(weight.shape[1]))()
    learning = Learning(model, 79, 8)
    assert {len(a) for a in learning.adapter.a} == {3}
    learning.save(tmp_path / "drafts", "base", "revision")
    assert len(load_adapter(tmp_path / "drafts", "masks").pairs) == len(learning.adapter.names)


@pytest.mark.parametrize("spoiled", ["a pair", "the mask"])
def test_numbers_that_are_not_finite_are_not_taken(tmp_path: Path, spoiled: str) -> None:
    """With them, every answer would be an error."""
    learning = Learning(small(tmp_path / "base"), 79, 4)
    learning.adopt()
    tensor = learning.adapter.a[1] if spoiled == "a pair" else learning.adapter.mask
    tensor.data.view(-1)[3] = torch.nan
    with pytest.raises(LearningFailed, match="NaN or infinity"):
        learning.adopt()
    learning.save(tmp_path / "drafts", "base", "revision")
    with pytest.raises(CheckpointError, match="1 tensors have NaN or infinity: "):
        load_adapter(tmp_path / "drafts", "masks")
    with pytest.raises(LearningFailed, match="NaN or infinity"):
        learning.load(tmp_path / "drafts", "revision")


def test_the_umask_says_who_may_read_what_was_learned(tmp_path: Path) -> None:
    learning = Learning(small(tmp_path / "base"), 79, 4)
    before = os.umask(0o027)
    try:
        learning.save(tmp_path / "drafts", "base", "revision")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "drafts").iterdir()} == {0o640}


@pytest.mark.parametrize(("free", "by_layer"), [(64 << 30, False), (1 << 20, True)])
def test_layers_keep_only_their_inputs_where_a_cpu_s_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, by_layer: bool
) -> None:
    """A model of 0.5B parameters took 11 GB for answers of 24 tokens; and steps have fewer masks, if need be."""
    monkeypatch.setattr("lopa_dist.learn.trainer.memory_left", lambda ranks: free)
    model = small(tmp_path / "base")
    learning, answers = Learning(model, 79, 8), own_answers(model)
    steps = iter(range(2))
    lesson = learning.lesson(answers, 600, stop=lambda: next(steps, None) is None)
    assert learning.trainer is not None
    assert learning.trainer.by_layer == by_layer
    masks = learning.trainer.rows_of_step(64)
    assert masks == (4 * learning.trainer.masks if by_layer else ROWS)
    assert all(math.isfinite(loss) for loss in lesson.losses)
