"""The causal objective: what rows see, what they predict, and that a training step teaches it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lopa_dist.models.transformer import Transformer
from training import tokenizer
from training.attention import dense
from training.causal import GROUPS, CausalBatch, causal_batch, hidden_rows, rows_of
from training.list_examples import ListExamples
from training.noise import Examples, TrainingExample
from training.train import Shape, TrainConfig, model_config, train
from training.vocabularies import list_words


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return tokenizer.build()


@pytest.fixture(scope="module")
def model(words: PreTrainedTokenizerFast) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model_config(Shape(32, 2, 4, 2, 64), words, "lopa_causal"))


@pytest.fixture(scope="module")
def laid_out(words: PreTrainedTokenizerFast, model: Transformer) -> tuple[list[TrainingExample], CausalBatch]:
    """Forty stories and drills in the longest rows."""
    source, ids = Examples(words, "train", 0, (0.3, 0.3)), model.config
    examples = [source.draw(0.0) for _ in range(40)]
    rng = np.random.default_rng(0)
    return examples, causal_batch(examples, source.causal_lengths[-1], ids.mask_id, ids.pad_id, source.period, rng)


@torch.no_grad()
def logits(model: Transformer, batch: CausalBatch, row: int, inputs: Tensor | None = None) -> Tensor:
    """Of one sequence in the layout of training, ``[L, vocabulary]``."""
    tokens, positions, last, groups = (
        torch.from_numpy(a[row : row + 1]) for a in (batch.inputs, batch.positions, batch.last, batch.groups)
    )
    attend = dense(model.config, hidden_rows(positions, last, groups))
    return model(tokens[0] if inputs is None else inputs, positions[0], attend) @ model.head_weight.T


@torch.no_grad()
def causal_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """Of a sequence by itself, under the ordinary causal mask."""
    place = torch.arange(len(tokens))
    return model(tokens, place, dense(model.config, (place > place[:, None])[None])) @ model.head_weight.T


def groups_of(batch: CausalBatch, row: int) -> list[np.ndarray]:
    """The rows of each group of a sequence."""
    return [np.flatnonzero(batch.groups[row] == g) for g in range(1, batch.groups[row].max() + 1)]


def test_a_clean_row_depends_on_no_group(
    model: Transformer, laid_out: tuple[list[TrainingExample], CausalBatch]
) -> None:
    _, batch = laid_out
    for row in range(4):
        clean = torch.from_numpy((batch.groups[row] == 0) & (batch.weights[row] > 0)).nonzero()[:, 0]
        count = int(clean[-1]) + 1
        inputs = torch.from_numpy(batch.inputs[row])
        other = torch.where(torch.from_numpy(batch.groups[row] > 0), 77, inputs)
        found, changed = logits(model, batch, row), logits(model, batch, row, other)
        assert torch.equal(found[:count], changed[:count])
        torch.testing.assert_close(found[:count], causal_logits(model, inputs[:count]))


def test_a_group_sees_what_a_decoder_shows_it(
    model: Transformer, laid_out: tuple[list[TrainingExample], CausalBatch]
) -> None:
    """Its logits are those of masks after the tokens up to its own, in a sequence of nothing else."""
    examples, batch = laid_out
    seen = 0
    for row in [i for i, e in enumerate(examples) if not e.drill][:3]:
        found = logits(model, batch, row)
        for rows in groups_of(batch, row):
            s = int(batch.last[row, rows[0]])
            masks = [model.config.mask_id] * len(rows)
            alone = causal_logits(model, torch.tensor(examples[row].tokens[: s + 1] + masks))[s + 1 :]
            torch.testing.assert_close(found[rows], alone)
            seen += 1
    assert seen > 10


def test_rows_predict_the_tokens_after_them(
    model: Transformer, laid_out: tuple[list[TrainingExample], CausalBatch]
) -> None:
    """Every next token of an answer up to its end, from the prompt's last token on; in a drill, its results alone."""
    examples, batch = laid_out
    for row, example in enumerate(examples):
        tokens = np.array(example.tokens)
        weighted = batch.weights[row] > 0
        assert np.array_equal(batch.targets[row, weighted], tokens[batch.positions[row, weighted] + 1])
        end = example.tokens.index(model.config.pad_id, example.prompt)
        clean = np.flatnonzero(weighted & (batch.groups[row] == 0))
        if example.drill:
            assert not batch.groups[row].any()
            assert [example.fact[i + 1] in range(5) for i in range(example.prompt - 1, end)] == [
                i in clean for i in range(example.prompt - 1, end)
            ]
            continue
        assert clean.tolist() == list(range(example.prompt - 1, end))
        assert len(groups_of(batch, row)) >= 3
        for rows in groups_of(batch, row):
            assert len(rows) <= max(GROUPS)
            assert (batch.inputs[row, rows] == model.config.mask_id).all()
            s = batch.last[row, rows[0]]
            assert batch.positions[row, rows].tolist() == list(range(s + 1, s + 1 + len(rows)))
            assert example.prompt - 1 <= s
    assert 5 < sum(e.drill for e in examples) < 35


def test_every_problem_has_room(words: PreTrainedTokenizerFast, model: Transformer) -> None:
    """The longest question and answer, with their groups, fit the longest rows."""
    for source in (Examples(words, "train", 1, (0.3, 0.3)), ListExamples(tokenizer.build(list_words()), "train", 1)):
        rows = [rows_of(source.draw(1.0), model.config.pad_id) for _ in range(500)]
        assert max(rows) <= source.causal_lengths[-1]


def test_it_learns(tmp_path: Path) -> None:
    config = TrainConfig(
        objective="causal", folder=str(tmp_path), steps=40, tokens=200, warmup=5, report_every=20, device="cpu",
        compile=False, threads=1, shape=Shape(32, 2, 2, 2, 64),
    )  # fmt: skip
    train(config)
    first, last = (json.loads(line)["loss"] for line in (tmp_path / "train.jsonl").read_text().splitlines())
    assert last < first - 0.5


def test_of_lists_all_tokens_of_the_answer_count() -> None:
    words = tokenizer.build(list_words())
    source, ids = ListExamples(words, "train", 0), model_config(Shape(), tokenizer.build(list_words()), "lopa_causal")
    examples = [source.draw(1.0) for _ in range(20)]
    rng, length = np.random.default_rng(0), source.causal_lengths[-1]
    batch = causal_batch(examples, length, ids.mask_id, ids.pad_id, source.period, rng)
    for row, example in enumerate(examples):
        end = example.tokens.index(ids.pad_id, example.prompt)
        assert np.flatnonzero(batch.numbers[row]).tolist() == list(range(example.prompt - 1, end))
        assert len(groups_of(batch, row)) >= 1
