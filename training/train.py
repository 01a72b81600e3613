"""Train an embedded model: ``python -m training.train [train.data=lists train.minutes=60 ...]``.

Masked diffusion from scratch in D2F's style (see `noise`), or strictly causal diffusion (`train.objective=causal`, see
`causal`): Muon on the matrices, AdamW on the rest, the learning rate held and then decayed to zero, which does the work
of averaging weights. Resumable: run it again with the same `train.folder`.
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
from lopa_dist.tasks import list_problems
from lopa_dist.tasks.word_problems import Split
from training import causal, checkpoint, noise, own_answers, tokenizer
from training.attention import dense
from training.list_examples import ListExamples
from training.own_answers import OwnAnswers
from training.start import prepare_to_copy


@dataclass
class Shape:
    """Size of the model; the defaults give 2.6M parameters."""

    hidden_size: int = 192
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 512


@dataclass
class TrainConfig:
    """The recipe. Progress, and so the schedule, is the larger share used up of `steps` and `minutes`."""

    data: str = "word_problems"  # or lists
    objective: str = "masked"  # or causal: next tokens, and drafts from masks
    copying: bool = False  # begin with weights from which copying is found soon (`start`)
    folder: str = "outputs/embedded"
    steps: int = 20_000
    minutes: float = 60.0
    tokens: int = 8192  # per step
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    warmup: int = 100  # steps
    hold: float = 0.4  # share of the run before the learning rate begins to fall
    drills: tuple[float, float] = (0.3, 0.1)  # word problems: share of drills at the start and at the end
    report_every: int = 100
    save_every: int = 500
    seed: int = 0
    device: str = "auto"
    compile: bool = True
    threads: int = 0  # 0: all cores
    shape: Shape = field(default_factory=Shape)


@dataclass
class App:
    """Hydra's root: keys are `train.*`."""

    train: TrainConfig = field(default_factory=TrainConfig)


def model_config(shape: Shape, words: Any, family: str = "Dream") -> ModelConfig:
    """The configuration of a shape with this tokenizer; the vocabulary is rounded up to 16."""
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
    """Weighted cross-entropy of the shifted predictions, and how many of the counted ones are right."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, hi: Tensor, numbers: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tables [L, 1, D], the others a `TrainingBatch` [B, L]; gives (loss, right, counted).

        The tables are arguments because compiled code would compute them anew for every head of every layer, which
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
    """The tokenizer of the kind of data."""
    return tokenizer.build(list_problems.vocabulary() if config.data == "lists" else None)


def source_of(config: TrainConfig, words: Any, split: Split, seed: int) -> noise.Source:
    """The examples of the kind of data; held-out ones are never drills."""
    if config.data == "lists":
        return ListExamples(words, split, seed)
    return noise.Examples(words, split, seed, config.drills if split == "train" else (0.0, 0.0))


def lengths_of(config: TrainConfig, source: noise.Source) -> tuple[int, ...]:
    """The static lengths of the sequences in a batch."""
    return source.lengths if config.objective == "masked" else causal.LENGTHS


class Batches:
    """Batches made by a background thread, one ahead of the training step."""

    def __init__(self, source: noise.Source, config: TrainConfig, ids: ModelConfig, seed: int) -> None:
        self.source, self.config, self.ids = source, config, ids
        self.rng = np.random.default_rng(seed)
        self.progress = 0.0  # of the training, as the source takes it
        self.lengths = lengths_of(config, source)
        self.pools: dict[int, list[noise.TrainingExample]] = {length: [] for length in self.lengths}
        self.queue: queue.Queue[Batch] = queue.Queue(3)
        threading.Thread(target=self._fill, daemon=True).start()

    def make(self) -> Batch:
        """Collect examples until one of the static lengths has a full batch."""
        while True:
            example = self.source.draw(self.progress)
            rows = len(example.tokens)
            if self.config.objective == "causal":
                rows = causal.rows_of(example, self.ids.pad_id)
            length = next(n for n in self.lengths if rows <= n)
            pool = self.pools[length]
            pool.append(example)
            if len(pool) == self.config.tokens // length:
                self.pools[length] = []
                source, ids = self.source, self.ids
                if self.config.objective == "causal":
                    draft = causal.DRAFTS[self.progress >= own_answers.FROM]
                    return causal.causal_batch(pool, length, ids.mask_id, ids.pad_id, source.period, self.rng, draft)
                return noise.masked_batch(
                    pool, length, ids.mask_id, ids.pad_id, source.period, self.rng, source.right, source.near
                )

    def _fill(self) -> None:
        while True:
            self.queue.put(self.make())


def optimizers(model: Transformer, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, head, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(progress: float, step: int, config: TrainConfig) -> float:
    """Factor on the learning rates: warm-up, hold, then straight to zero."""
    warm = min(1.0, (step + 1) / config.warmup)
    return warm * min(1.0, max(0.0, 1 - progress) / (1 - config.hold))


def train(config: TrainConfig) -> Path:
    """Run the recipe; returns the folder of the finished checkpoint."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(config.seed)
    require("train.data", config.data, ("word_problems", "lists"))
    require("train.objective", config.objective, ("masked", "causal"))
    if config.objective == "causal" and config.data != "word_problems":
        raise ValueError(f"train.objective=causal does not go with train.data={config.data}: use word_problems")
    words = tokenizer_of(config)
    ids = model_config(config.shape, words, "lopa_causal" if config.objective == "causal" else "Dream")
    model = Transformer(ids).to(device)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02 if "embed" in name or "lm_head" in name else p.shape[1] ** -0.5)
    if config.copying:
        prepare_to_copy(model)
    steppers = optimizers(model, config)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    state_file, log_file = folder / "state.pt", folder / "train.jsonl"
    step, used = 0, 0.0
    if state_file.exists():
        saved = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        step, used = saved["step"], saved["seconds"]
        for stepper, state in zip(steppers, saved["optimizers"], strict=True):
            stepper.load_state_dict(state)
        if log_file.exists():  # steps behind the saved state are run again
            kept = [line for line in log_file.read_text().splitlines() if json.loads(line)["step"] <= step]
            log_file.write_text("".join(line + "\n" for line in kept))
    objective = Loss if config.objective == "masked" else causal.CausalLoss
    held_out_loss = objective(model)  # never compiled: it runs seldom
    loss_of: Any = torch.compile(held_out_loss, dynamic=False) if config.compile else held_out_loss
    tables = {
        n: rope_table(torch.arange(n, device=device), ids.head_dim, ids.rope_theta, torch.float32)
        for n in lengths_of(config, source_of(config, words, "train", 0))
    }
    source = source_of(config, words, "train", config.seed + step)
    own = None
    if config.objective == "causal":
        assert isinstance(source, noise.Examples)
        own = OwnAnswers(source, model, config.seed + step)
    batches = Batches(own or source, config, ids, config.seed + step)
    held_out = Batches(source_of(config, words, "held_out", 1), config, ids, 1)
    held_out.progress = 1.0
    began = time.monotonic() - used

    def save_state() -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [s.state_dict() for s in steppers],
            "step": step,
            "seconds": time.monotonic() - began,
        }
        with atomic(state_file) as file:
            torch.save(state, file)

    def run(batch: Batch, loss_of: Any) -> tuple[Tensor, Tensor, Tensor]:
        arrays = (getattr(batch, field.name) for field in fields(batch))
        tensors = [torch.from_numpy(a).to(device, non_blocking=True) for a in arrays]
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss_of(*tensors, *tables[batch.inputs.shape[1]])

    tokens, mean_loss, right_own, interval = 0, 0.0, 0.0, time.monotonic()
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[status]}"))
    with Progress(*columns) as display, log_file.open("a") as log:
        bar = display.add_task("training", total=1.0, status="")
        while True:
            elapsed = time.monotonic() - began
            progress = max(step / config.steps, elapsed / 60 / config.minutes)
            if progress >= 1:
                break
            factor = learning_rate(progress, step, config)
            steppers[0].param_groups[0]["lr"] = config.muon_lr * factor
            steppers[1].param_groups[0]["lr"] = config.adam_lr * factor
            batches.progress = progress
            if own and progress >= own_answers.FROM and step % own_answers.EVERY == 0:
                right_own = own.write(own_answers.COUNT)
            batch = batches.queue.get()
            loss, _, _ = run(batch, loss_of)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
            step += 1
            tokens += batch.inputs.size
            mean_loss += float(loss.detach())
            if step % config.report_every == 0:
                with torch.no_grad():
                    seen = [run(held_out.queue.get(), held_out_loss) for _ in range(2)]
                right = sum(int(r) for _, r, _ in seen) / max(1, sum(int(n) for *_, n in seen))
                entry = {
                    "step": step,
                    "progress": round(progress, 4),
                    "loss": round(mean_loss / config.report_every, 4),
                    "held_out_loss": round(sum(float(x) for x, *_ in seen) / len(seen), 4),
                    "held_out_numbers": round(right, 4),
                    **({"own_right": round(right_own, 4)} if own else {}),
                    "tokens_per_s": round(tokens / (time.monotonic() - interval)),
                    "seconds": round(time.monotonic() - began, 1),
                }
                log.write(json.dumps(entry) + "\n")
                log.flush()
                tokens, mean_loss, interval = 0, 0.0, time.monotonic()
                status = f"loss {entry['loss']:.3f}  held-out right {right:.1%}  {entry['tokens_per_s']} tokens/s"
                display.update(bar, completed=progress, status=status)
            if step % config.save_every == 0:
                save_state()
                checkpoint.save(folder / "checkpoint", ids, model.state_dict(), words)
    save_state()
    checkpoint.save(folder / "checkpoint", ids, model.state_dict(), words)
    report = {"config": asdict(config), "steps": step, "seconds": time.monotonic() - began}
    report["parameters"] = sum(p.numel() for p in model.parameters())
    report["log"] = [json.loads(line) for line in log_file.read_text().splitlines()]
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return folder / "checkpoint"


@hydra.main(version_base="1.3", config_name="train", config_path=None)
def main(config: Any) -> None:
    """Hydra's entry point."""
    app = OmegaConf.to_object(config)
    assert isinstance(app, App)
    print(f"checkpoint: {train(app.train)}")


ConfigStore.instance().store("train", App)

if __name__ == "__main__":
    main()
