"""The main job: read, generate, write, report."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lopa_dist import __version__
from lopa_dist.config import Config
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.batch_output import write_batch_output
from lopa_dist.jobs.metrics import Figures, build_report
from lopa_dist.jobs.progress import ProgressDisplay
from lopa_dist.jobs.prompts import Encoder, Rejection
from lopa_dist.jobs.report import report_markdown
from lopa_dist.jobs.results import ResultWriter, clear, error_line, generation_line, merge_results
from lopa_dist.jobs.stopping import finished_text
from lopa_dist.jobs.tasks import make_task
from lopa_dist.jobs.wandb_log import WandbLog
from lopa_dist.models import checkpoint
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import resolve
from lopa_dist.tasks.task import Item, Task

log = logging.getLogger("lopa_dist")


def choose_device(config: Config, world: World) -> torch.device:
    """The GPU of this rank, or the CPU with its share of the threads."""
    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"model.device={name}: this torch sees no GPU; use cpu")
        own = world.local_rank % torch.cuda.device_count()
        device = torch.device(name if ":" in name else f"cuda:{own}")
        torch.cuda.set_device(device)
        return device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.parallel.threads or max(1, cores // world.local_size))
    return torch.device(name)


def versions() -> dict[str, str]:
    """What ran."""
    packages = ("torch", "transformers", "hydra-core", "wandb")
    return {"python": platform.python_version(), "lopa_dist": __version__} | {p: version(p) for p in packages}


def run(config: Config, folder: Path, world: World) -> dict[str, Any]:
    """Run the job on this rank; rank 0 writes into `folder` and returns the report, the others return nothing."""
    began = time.perf_counter()
    device = choose_device(config, world)
    if config.task.input == "-" and world.size > 1:
        raise ValueError(f"task.input=- with {world.size} ranks: standard input reaches one rank only; write a file")
    task = make_task(config)
    items = list(task.items())
    parallel = config.parallel
    mesh = resolve(parallel.data, parallel.branch, world.size, len(items), config.decode.max_branches)
    group = Group(world, mesh, parallel.backend, parallel.timeout_s, device)
    with group.guard():
        folder = Path(group.agree(str(folder)))  # its name holds the time, and clocks tick between ranks
        return generate_all(config, folder, task, items, group, device, began)


def generate_all(
    config: Config, folder: Path, task: Task, items: list[Item], group: Group, device: torch.device, began: float
) -> dict[str, Any]:
    """The job between joining and leaving the group."""
    comm, world = group.comm, group.world
    source = checkpoint.find(config.model.path)
    default = "bf16" if device.type == "cuda" else "fp32"
    dtype = checkpoint.DTYPES[default if config.model.dtype == "auto" else config.model.dtype]
    tokenizer = checkpoint.load_tokenizer(source)
    model = checkpoint.load_model(source, dtype, device)
    encoder = Encoder(config, model.config, tokenizer)
    items = [encoder.choose(item) for item in items]
    encoded = [encoder.encode(i, item) for i, item in enumerate(items)]
    requests = [r for r in encoded if isinstance(r, Request)]
    first = world.rank == 0
    wandb_log = WandbLog(config, folder) if first else None
    observe = wandb_log.observe if wandb_log else (lambda statistics: None)
    share = -(-len(requests) // group.mesh.data)  # a replica takes no more than its share at once
    in_flight = max(1, min(config.engine.max_sequences, share))
    engine = Engine(model, config.decode, comm, in_flight, config.engine.attention, observe)
    if first:
        parameters = sum(p.numel() for p in model.parameters())
        log.info(
            "%s: %d requests, model %s (%.1fM parameters, %s on %s), %d branches, data %d x branch %d ranks, into %s",
            task.name, len(items), config.model.path, parameters / 1e6, dtype, device, config.decode.max_branches,
            group.mesh.data, group.mesh.branch, folder,
        )  # fmt: skip
    if first:
        clear(folder)
    group.ready()
    start = time.perf_counter()
    generations = engine.generate(requests, partial(group.take, total=len(requests)))
    if not group.leads:
        for _ in generations:
            pass
        group.total(comm.traffic.bytes)
        return {}

    writer = ResultWriter(folder, group.data_rank if group.mesh.data > 1 else None)
    figures: list[Figures] = []
    errors = 0
    progress = config.logging.progress if first else "never"
    with ProgressDisplay(progress, len(items), engine.statistics, config.logging.every_s) as display:
        if first:
            for rejection in (r for r in encoded if isinstance(r, Rejection)):
                writer.write(error_line(items[rejection.index], rejection.index, rejection.message))
                errors += 1
                display.update(group.tally(done=1))
        for generation in generations:
            item = items[generation.request.index]
            generation, text = finished_text(tokenizer, generation, item.stop)
            score = task.score(item, text)
            writer.write(generation_line(item, generation, text, score, config.logging.token_ids))
            figure = Figures.of(generation, score)
            figures.append(figure)
            judged = {} if figure.correct is None else {"judged": 1, "right": int(figure.correct)}
            display.update(group.tally(done=1, tokens=figure.tokens, forwards=figure.forwards, **judged))
        writer.close()
        if not first:  # through a file: the store takes small values only
            mine = {"figures": [asdict(f) for f in figures], "statistics": engine.statistics.totals()}
            (folder / f"figures.{group.data_rank}.json").write_text(json.dumps(mine))
        traffic = group.total(comm.traffic.bytes)
        if first:
            display.update(group.tally())
    if not first:
        return {}
    decode_s = time.perf_counter() - start
    merge_results(folder, group.mesh.data, len(items))
    write_batch_output(folder, items, config.model.path)
    for replica in range(1, group.mesh.data):
        file = folder / f"figures.{replica}.json"
        other = json.loads(file.read_text())
        engine.statistics.absorb(other["statistics"])
        figures += [Figures(**f) for f in other["figures"]]
        file.unlink()
    report = build_report(
        config, figures, errors, engine.statistics, traffic, group, versions(), decode_s, time.perf_counter() - began
    )
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plots: list[str] = []
    if config.logging.plots:
        from lopa_dist.jobs.plots import run_plots  # matplotlib takes a second to import

        plots = run_plots(folder, [f.seconds for f in figures], engine.statistics, config.decode.branches)
    (folder / "report.md").write_text(report_markdown(report, plots))
    if wandb_log is not None:
        wandb_log.finish(report, engine.statistics, plots)
    return report
