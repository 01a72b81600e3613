"""Train an embedded model: ``python -m training.train [train.data=lists train.minutes=60 ...]``.

The objective is masked diffusion in D2F's style (see `noise`), or strictly causal diffusion (`train.objective=causal`,
see `causal`). Muon trains the layers' matrices, and AdamW everything else. The learning rate is constant at first and
then falls to zero, which makes averaging weights unnecessary. A run can be resumed: start it again with the same
`train.folder`.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.nn.functional as F
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.progress import Progress, TextColumn
from torch import Tensor

from lopa_dist.atomic import atomic
from lopa_dist.checks import require
from lopa_dist.kernels.rope import rope_table
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks.word_problems import Split
from training import causal, checkpoint, noise, own_answers, tokenizer
from training.attention import dense
from training.list_examples import ListExamples
from training.own_answers import OwnAnswers
from training.start import CAUSAL_DISTANCES, DISTANCES, prepare_to_copy
from training.vocabularies import list_words


@dataclass
class Shape:
    """The size of the model; the defaults give 2.6M parameters."""

    hidden_size: int = 192
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 512


@dataclass
class TrainConfig:
    """The recipe. The schedule follows progress: the used share of `steps` or of `minutes`, whichever is larger."""

    data: str = "word_problems"  # or lists
    objective: str = "masked"  # or causal: next tokens, and drafts from masks
    copying: bool = False  # begin with weights from which the model soon learns to copy (`start`)
    folder: str = "outputs/embedded"
    steps: int = 20_000
    minutes: float = 60.0
    tokens: int = 8192  # per step
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    warmup: int = 100  # steps in which the learning rate rises
    hold: float = 0.4  # share of the run before the learning rate begins to fall
    drills: tuple[float, float] = (0.3, 0.1)  # word problems: share of drills at the start, and from 60 % of the run on
    report_every: int = 100
    save_every: int = 500
    seed: int = 0
    device: str = "auto"
    compile: bool = True
    threads: int = 0  # 0: all cores
    shape: Shape = field(default_factory=Shape)


@dataclass
class App:
    """The root of Hydra's configuration; its keys are `train.*`."""

    train: TrainConfig = field(default_factory=TrainConfig)


def model_config(shape: Shape, words: Any, family: str = "Dream") -> ModelConfig:
    """Return the model's configuration, for a shape and the tokenizer `words`.

    The size of the vocabulary is rounded up to a multiple of 16.
    """
    return ModelConfig(
        family=family,
        vocab_size=-(-len(words) // 16) * 16,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.hidden_size // shape.heads,
        intermediate_size=shape.intermediate_size,
        rms_eps=1e-6,
        rope_theta=10_000.0,
        qkv_bias=True,
        tied=False,
        shift=True,
        mask_id=words.mask_token_id,
        eos_ids=(words.eos_token_id,),
        pad_id=words.pad_token_id,
        max_positions=512,
    )


class Loss(torch.nn.Module):
    """Computes the weighted cross-entropy of the shifted predictions, and how many of the counted ones are right."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, hi: Tensor, numbers: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, right, counted) of a `TrainingBatch`; `cos` and `sin` [L, 1, D] are tables of the positions.

        The tables are arguments because compiled code would compute them again for every head of every layer, which
        took a third of a step on a CPU.
        """
        rows, length = tokens.shape
        hidden_keys = torch.arange(length, device=tokens.device, dtype=torch.int32) >= hi[..., None].int()
        attend = dense(self.model.config, hidden_keys)
        rope = cos.repeat(rows, 1, 1), sin.repeat(rows, 1, 1)
        hidden = self.model.rotated(tokens.reshape(-1), rope, attend).view(rows, length, -1)[:, :-1]
        logits = F.linear(hidden, self.model.head_weight).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:]
        loss = (losses.view_as(weight) * weight).sum() / weight.sum()
        right = (logits.argmax(-1) == targets[:, 1:]) & numbers[:, 1:]
        return loss, right.sum(), numbers[:, 1:].sum()


Batch = noise.TrainingBatch | causal.CausalBatch


def tokenizer_of(config: TrainConfig) -> Any:
    """Return the tokenizer for the kind of data, `config.data`."""
    return tokenizer.build(list_words() if config.data == "lists" else None)


def source_of(config: TrainConfig, words: Any, split: Split, seed: int) -> noise.Source:
    """Return a source of examples for the kind of data, `config.data`; held-out examples are never drills."""
    if config.data == "lists":
        return ListExamples(words, split, seed)
    return noise.Examples(words, split, seed, config.drills if split == "train" else (0.0, 0.0))


def lengths_of(config: TrainConfig, source: noise.Source) -> tuple[int, ...]:
    """Return the fixed lengths that sequences may have; all sequences in a batch have the same one."""
    return source.lengths if config.objective == "masked" else source.causal_lengths


class Batches:
    """Batches that a background thread makes, up to four ahead of the training step."""

    def __init__(self, source: noise.Source, config: TrainConfig, ids: ModelConfig, seed: int) -> None:
        self.source, self.config, self.ids = source, config, ids
        self.rng = np.random.default_rng(seed)
        self.progress = 0.0  # of the training, as `Source.draw` takes it
        self.lengths = lengths_of(config, source)
        self.pools: dict[int, list[noise.TrainingExample]] = {length: [] for length in self.lengths}
        self.queue: queue.Queue[Batch | Exception] = queue.Queue(3)
        threading.Thread(target=self._fill, daemon=True).start()

    def make(self) -> Batch:
        """Collect examples until one of the fixed lengths has a full batch, and return this batch."""
        while True:
            example = self.source.draw(self.progress)
            rows = len(example.tokens)
            if self.config.objective == "causal":
                rows = causal.rows_of(example, self.ids.pad_id)
            length = next(n for n in self.lengths if rows <= n)
            pool = self.pools[length]
            pool.append(example)
            if len(pool) == max(1, self.config.tokens // length):
                self.pools[length] = []
                source, ids = self.source, self.ids
                if self.config.objective == "causal":
                    draft = causal.DRAFTS[self.progress >= own_answers.FROM]
                    return causal.causal_batch(pool, length, ids.mask_id, ids.pad_id, source.period, self.rng, draft)
                return noise.masked_batch(
                    pool, length, ids.mask_id, ids.pad_id, source.period, self.rng, source.right, source.near
                )

    def next(self) -> Batch:
        """Return the next batch, or raise what went wrong when it was made."""
        batch = self.queue.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _fill(self) -> None:
        while True:
            try:
                batch: Batch | Exception = self.make()
            except Exception as error:  # the training step waits for a batch
                batch = RuntimeError(f"no batch could be made: {error!r}")
                batch.__cause__ = error
            self.queue.put(batch)


def optimizers(model: Transformer, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon for the layers' matrices, AdamW for embeddings, head, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(progress: float, step: int, config: TrainConfig) -> float:
    """Return the factor on the learning rates: it rises for `warmup` steps, stays, and then falls linearly to zero."""
    warm = min(1.0, (step + 1) / config.warmup)
    return warm * min(1.0, max(0.0, 1 - progress) / (1 - config.hold))


def new_model(config: TrainConfig, ids: ModelConfig, device: str) -> Transformer:
    """Return a model with its initial weights."""
    model = Transformer(ids).to(device)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02 if "embed" in name or "lm_head" in name else p.shape[1] ** -0.5)
    if config.copying:
        prepare_to_copy(model, CAUSAL_DISTANCES if config.objective == "causal" else DISTANCES)
    return model


@dataclass
class Run:
    """A training run that another process can resume.

    `seconds` counts all processes of the run. Its state is in `folder`, with the log, the checkpoint and the report.
    """

    folder: Path
    model: Transformer
    steppers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0

    @property
    def log(self) -> Path:
        """The file that gets a line every `report_every` steps."""
        return self.folder / "train.jsonl"

    def save(self) -> None:
        """Write the state to `folder`."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [stepper.state_dict() for stepper in self.steppers],
            "step": self.step,
            "seconds": self.seconds,
        }
        with atomic(self.folder / "state.pt") as file:
            torch.save(state, file)

    def resume(self) -> None:
        """Read the state, if there is one; drop the log of later steps, because they are run again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "state.pt"
        if not file.exists():
            return
        saved = torch.load(file, map_location=self.model.head_weight.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        for stepper, state in zip(self.steppers, saved["optimizers"], strict=True):
            stepper.load_state_dict(state)
        if self.log.exists():
            lines = [line for line in self.log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            self.log.write_text("".join(line + "\n" for line in lines))


def check(config: TrainConfig) -> None:
    """Refuse a recipe with an unknown kind of data or objective.

    Raises:
        ValueError: the message names the key, its value, and the values that it may have.
    """
    require("train.data", config.data, ("word_problems", "lists"))
    require("train.objective", config.objective, ("masked", "causal"))


def train(config: TrainConfig) -> Path:
    """Train a model by the recipe, and return the folder of the finished checkpoint."""
    check(config)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(config.seed)
    words = tokenizer_of(config)
    ids = model_config(config.shape, words, "lopa_causal" if config.objective == "causal" else "Dream")
    model = new_model(config, ids, device)
    run = Run(Path(config.folder), model, optimizers(model, config))
    run.resume()
    objective = Loss if config.objective == "masked" else causal.CausalLoss
    held_out_loss = objective(model)  # never compiled, because it runs rarely
    loss_of: Any = torch.compile(held_out_loss, dynamic=False) if config.compile else held_out_loss
    tables = {
        n: rope_table(torch.arange(n, device=device), ids.head_dim, ids.rope_theta, torch.float32)
        for n in lengths_of(config, source_of(config, words, "train", 0))
    }
    source = source_of(config, words, "train", config.seed + run.step)
    own = None
    if config.objective == "causal" and isinstance(source, noise.Examples):
        own = OwnAnswers(source, model, config.seed + run.step)
    batches = Batches(own or source, config, ids, config.seed + run.step)
    held_out = Batches(source_of(config, words, "held_out", 1), config, ids, 1)
    held_out.progress = 1.0
    began = time.monotonic() - run.seconds

    def forward(batch: Batch, loss_of: Any) -> tuple[Tensor, Tensor, Tensor]:
        arrays = (getattr(batch, field.name) for field in fields(batch))
        tensors = [torch.from_numpy(a).to(device, non_blocking=True) for a in arrays]
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss_of(*tensors, *tables[batch.inputs.shape[1]])

    def held_out_figures() -> tuple[float, float]:
        """Return the mean loss of two held-out batches, and the share of right predictions among the counted ones."""
        with torch.no_grad():
            results = [forward(held_out.next(), held_out_loss) for _ in range(2)]
        losses, right, counted = zip(*results, strict=True)
        return sum(map(float, losses)) / len(losses), sum(map(int, right)) / max(1, sum(map(int, counted)))

    tokens, mean_loss, right_own, interval = 0, 0.0, 0.0, time.monotonic()
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[status]}"))
    with Progress(*columns) as display, run.log.open("a") as log:
        bar = display.add_task("training", total=1.0, status="")
        while (progress := max(run.step / config.steps, (time.monotonic() - began) / 60 / config.minutes)) < 1:
            factor = learning_rate(progress, run.step, config)
            for stepper, rate in zip(run.steppers, (config.muon_lr, config.adam_lr), strict=True):
                stepper.param_groups[0]["lr"] = rate * factor
            batches.progress = progress
            if own and progress >= own_answers.FROM and run.step % own_answers.EVERY == 0:
                right_own = own.write(own_answers.COUNT)
            batch = batches.next()
            loss, _, _ = forward(batch, loss_of)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in run.steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
            run.step += 1
            run.seconds = time.monotonic() - began
            tokens += batch.inputs.size
            mean_loss += float(loss.detach())
            if run.step % config.report_every == 0:
                loss_there, right = held_out_figures()
                entry = {
                    "step": run.step,
                    "progress": round(progress, 4),
                    "loss": round(mean_loss / config.report_every, 4),
                    "held_out_loss": round(loss_there, 4),
                    "held_out_numbers": round(right, 4),
                    **({"own_right": round(right_own, 4)} if own else {}),
                    "tokens_per_s": round(tokens / (time.monotonic() - interval)),
                    "seconds": round(run.seconds, 1),
                }
                log.write(json.dumps(entry) + "\n")
                log.flush()
                tokens, mean_loss, interval = 0, 0.0, time.monotonic()
                status = f"loss {entry['loss']:.3f}  held-out right {right:.1%}  {entry['tokens_per_s']} tokens/s"
                display.update(bar, completed=progress, status=status)
            if run.step % config.save_every == 0:
                run.save()
                checkpoint.save(run.folder / "checkpoint", ids, model.state_dict(), words)
    run.save()
    checkpoint.save(run.folder / "checkpoint", ids, model.state_dict(), words)
    report = {"config": asdict(config), "steps": run.step, "seconds": run.seconds}
    report["parameters"] = sum(p.numel() for p in model.parameters())
    report["log"] = [json.loads(line) for line in run.log.read_text().splitlines()]
    (run.folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return run.folder / "checkpoint"


@hydra.main(version_base="1.3", config_name="train", config_path=None)
def main(config: Any) -> None:
    """Train a model, with the configuration that Hydra composes."""
    app = OmegaConf.to_object(config)
    assert isinstance(app, App)
    print(f"checkpoint: {train(app.train)}")


ConfigStore.instance().store("train", App)

if __name__ == "__main__":
    main()
