"""The main job: read, generate, write, report."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lopa_dist.config import Config
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Request
from lopa_dist.jobs.metrics import build_report
from lopa_dist.jobs.progress import ProgressDisplay
from lopa_dist.jobs.prompts import Encoder, Rejection
from lopa_dist.jobs.report import report_markdown
from lopa_dist.jobs.results import ResultWriter, error_line, generation_line
from lopa_dist.jobs.wandb_log import WandbLog
from lopa_dist.models import checkpoint
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.parallel.launcher import World, connect
from lopa_dist.tasks.arithmetic import Arithmetic
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.task import Task

log = logging.getLogger("lopa_dist")


def make_task(config: Config) -> Task:
    """The task that the configuration names."""
    task = config.task
    if task.name == "arithmetic":
        assert task.limit is not None  # checked by TaskConfig
        return Arithmetic(task.limit, "train" if task.split == "train" else "held_out", task.problem_seed)
    assert task.input is not None
    return Batch(task.input, task.limit)


def choose_device(config: Config, world: World) -> torch.device:
    """The GPU of this rank, or the CPU with its share of the threads."""
    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        return device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.parallel.threads or max(1, cores // world.local_size))
    return torch.device(name)


def versions() -> dict[str, str]:
    """What ran."""
    packages = ("lopa_dist", "torch", "transformers", "hydra-core", "wandb")
    return {"python": platform.python_version()} | {p: version(p) for p in packages}


@dataclass
class Outcome:
    """What generation produced on this rank, for the report."""

    generations: list[Generation]
    correct: list[bool]
    errors: int


def run(config: Config, folder: Path, world: World) -> dict[str, Any]:
    """Run the job on this rank; rank 0 writes into `folder` and returns the report, the others return nothing."""
    began = time.perf_counter()
    if config.parallel.branch not in ("auto", world.size, str(world.size)):
        raise ValueError(
            f"parallel.branch={config.parallel.branch} with {world.size} ranks: all ranks share out the branches, so "
            f"use auto or start {config.parallel.branch} ranks"
        )
    device = choose_device(config, world)
    backend = config.parallel.backend
    comm = connect(world, backend, config.parallel.timeout_s, device)
    try:
        return generate_all(config, folder, world, comm, device, began)
    finally:
        comm.close()


def generate_all(
    config: Config, folder: Path, world: World, comm: Communicator, device: torch.device, began: float
) -> dict[str, Any]:
    """The job between joining and leaving the group."""
    task = make_task(config)
    items = list(task.items())
    source = checkpoint.find(config.model.path)
    default = "bf16" if device.type == "cuda" else "fp32"
    dtype = checkpoint.DTYPES[default if config.model.dtype == "auto" else config.model.dtype]
    model = checkpoint.load_model(source, dtype, device)
    tokenizer = checkpoint.load_tokenizer(source)
    encoder = Encoder(config, model.config, tokenizer)
    encoded = [encoder.encode(i, item) for i, item in enumerate(items)]
    requests = [r for r in encoded if isinstance(r, Request)]
    first = comm.rank == 0
    wandb_log = WandbLog(config, folder) if first else None
    observe = wandb_log.observe if wandb_log else (lambda statistics: None)
    engine = Engine(model, config.decode, comm, config.engine.max_sequences, config.engine.attention, observe)
    if first:
        parameters = sum(p.numel() for p in model.parameters())
        log.info(
            "%s: %d requests, model %s (%.1fM parameters, %s on %s), %d branches over %d ranks, into %s",
            task.name, len(items), config.model.path, parameters / 1e6, dtype, device,
            config.decode.max_branches, comm.size, folder,
        )  # fmt: skip
    comm.barrier()
    start = time.perf_counter()
    if not first:
        for _ in engine.generate(requests):
            pass
        comm.barrier()
        return {}

    writer = ResultWriter(folder)
    outcome = Outcome([], [], 0)
    display = ProgressDisplay(config.logging.progress, len(items), engine.statistics, config.logging.every_s)
    with display:
        for rejection in (r for r in encoded if isinstance(r, Rejection)):
            writer.write(error_line(items[rejection.index], rejection.index, rejection.message))
            outcome.errors += 1
            display.update(None)
        for generation in engine.generate(requests):
            item = items[generation.request.index]
            text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
            score = task.score(item, text)
            writer.write(generation_line(item, generation, text, score, config.logging.token_ids))
            outcome.generations.append(generation)
            if score is not None:
                outcome.correct.append(score.correct)
            display.update(generation, score.correct if score else None)
    decode_s = time.perf_counter() - start
    comm.barrier()
    writer.complete()
    backend = "solo" if comm.size == 1 else ("nccl" if device.type == "cuda" else "gloo")
    report = build_report(
        config, outcome.generations, outcome.correct, outcome.errors, engine.statistics, comm, world, backend,
        versions(), decode_s, time.perf_counter() - began,
    )  # fmt: skip
    write_report(config, folder, report, outcome, engine, wandb_log)
    return report


def write_report(
    config: Config,
    folder: Path,
    report: dict[str, Any],
    outcome: Outcome,
    engine: Engine,
    wandb_log: WandbLog | None,
) -> None:
    """`report.json`, `report.md`, the plots, and W&B's last entry."""
    plots: list[str] = []
    if config.logging.plots:
        from lopa_dist.jobs.plots import run_plots  # matplotlib takes a second to import

        plots = run_plots(folder, outcome.generations, engine.statistics, config.decode.branches)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(report_markdown(report, plots))
    if wandb_log is not None:
        wandb_log.finish(report, engine.statistics, plots)
