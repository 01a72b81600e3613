"""Measure what a large job takes apart from the model: start, memory, requests per second, resuming, end, and merging.

    python -m benchmarks.large_job                          # 100,000 requests on 1 rank, then on 2 data ranks
    python -m benchmarks.large_job --requests 1000000 --ranks 1

The model is a stub: one tiny layer, and answers of one block. The job is a real one, in its own processes. The job
starts with all requests, and is killed after `--real` of them. Then a made-up journal is added, which says that all but
the last `--real` requests are done, and the job is started again. The second attempt resumes, generates the remaining
answers, and ends like a job that answered all requests.

Finally, the results of the first rank count are dealt out to 64 shards, for `lopa-dist merge`. Memory is the peak of
rank 0, less its peak in the same job with 16 requests, divided by the requests. The results are in
benchmarks/results/large_job.json, by requests and ranks. This program runs only on Linux, because it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.branch_scaling import TORCHRUN
from benchmarks.results import replace_rows, show
from lopa_dist.composing import composed
from lopa_dist.config import Config
from lopa_dist.engine.request import Request
from lopa_dist.engine.work import Work
from lopa_dist.jobs.folder.batch_output import LINES, line_of
from lopa_dist.jobs.folder.merged import Merged
from lopa_dist.jobs.folder.packed import Columns
from lopa_dist.jobs.folder.shard_figures import write_figures
from lopa_dist.jobs.run.job_input import request_id
from lopa_dist.jobs.run.prompts import Encoder
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.show.report import read_report, write_report
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.task import Item
from training import checkpoint

ROOT = Path(__file__).parent.parent
SHARDS = 64
FEW = 16  # requests of the small job whose memory is subtracted
DECODE = (
    "context=d2f", "verify=confidence", "branches=0", "drafts=0", "tau_conf=0", "block_size=8", "max_new_tokens=8",
)  # fmt: skip


class Process:
    """A running command, and its rank 0, whose memory is read from outside."""

    def __init__(self, command: list[str], ranks: int, log: Path) -> None:
        self.ranks, self.log, self.began = ranks, log, time.perf_counter()
        with log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        self.first = self.process.pid if ranks == 1 else None

    @property
    def age(self) -> float:
        """Seconds since the start of the command."""
        return time.perf_counter() - self.began

    def peak(self) -> int:
        """Return the most bytes that rank 0 ever held; 0 if it is not running."""
        if self.first is None:
            self.first = rank_0(self.process.pid)
        try:
            lines = Path(f"/proc/{self.first}/status").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return 1024 * int(dict(line.split(":", 1) for line in lines).get("VmHWM", "0 kB").split()[0])

    def running(self) -> bool:
        """Return whether the command is still running.

        Raises:
            RuntimeError: the command failed; the message is its output.
        """
        status = self.process.poll()
        if status:
            raise RuntimeError(self.log.read_text())
        return status is None

    def kill(self) -> None:
        """Kill all processes of the command at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def rank_0(parent: int) -> int | None:
    """Return the process id of rank 0, a child of the launcher `parent`; None if there is none."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    for child in children.read_text().split() if children.exists() else []:
        if b"\0RANK=0\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    return None


def options(place: Path, requests: int) -> list[str]:
    """Return the job's arguments; its model and input are in the folder `place`."""
    return [
        f"model.path={place / 'model'}", "model.dtype=fp32", "model.chat_template=never", "task=batch",
        f"task.input={place / 'input.jsonl'}", f"task.limit={requests}",
        "engine.max_sequences=64", "logging.wandb.mode=disabled", "parallel.threads=1",
        *(f"decode.{setting}" for setting in DECODE),
    ]  # fmt: skip


def start(place: Path, requests: int, ranks: int, folder: Path) -> Process:
    """Start the job in the run folder `folder`, as a user does, and return its process."""
    launcher = [] if ranks == 1 else [*TORCHRUN, str(ranks)]
    command = [sys.executable, *launcher, "-m", "lopa_dist", *options(place, requests), f"hydra.run.dir={folder}"]
    folder.mkdir(exist_ok=True)
    return Process(command, ranks, folder.with_suffix(".log"))


@dataclass
class Watched:
    """What can be seen of an attempt from outside; times are seconds since its start."""

    count: int = 0  # lines in the attempt's journal: finished requests, and at the end one line for each rank
    first: float = 0.0  # when the first answers were in the journal
    last: float = 0.0  # when the last answers were in the journal
    ended: float = 0.0
    peak: int = 0  # the most bytes that rank 0 held


def watched(job: Process, folder: Path, attempt: int, until: float = float("inf")) -> Watched:
    """Follow an attempt to its end, or kill it as soon as `until` requests are finished; return what was seen."""
    found = Watched()
    sizes = dict.fromkeys((folder / "journal" / f"{attempt:03d}-{i}.jsonl" for i in range(job.ranks)), 0)
    while job.running():
        found.peak = max(found.peak, job.peak())
        for part, size in sizes.items():
            if not part.exists():
                continue
            with part.open("rb") as file:
                file.seek(size)
                lines = file.read().count(b"\n")
                sizes[part] = file.tell()
            if lines:
                found.count += lines
                found.first, found.last = found.first or job.age, job.age
        if found.count >= until:
            job.kill()
            break
        time.sleep(0.05)
    found.ended = job.age
    return found


def stub(folder: Path) -> None:
    """Write the checkpoint of a random model with one tiny layer and the embedded model's tokenizer."""
    words = load_tokenizer(EMBEDDED)
    mask, eos = words.convert_tokens_to_ids(words.mask_token), words.eos_token_id
    shape = ModelConfig(
        family="Dream", vocab_size=len(words), hidden_size=16, layers=1, heads=1, kv_heads=1, head_dim=16,
        intermediate_size=16, rms_eps=1e-6, rope_theta=10_000.0, qkv_bias=True, tied=False, shift=True, mask_id=mask,
        eos_ids=(eos,), pad_id=eos, max_positions=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Transformer(shape)
    weights = {name: torch.randn(w.shape) * 0.3 for name, w in model.state_dict().items()}
    checkpoint.save(folder, shape, weights, words)


def prompts(count: int) -> Iterator[str]:
    """Yield the lines of an input file with `count` prompts."""
    for n in range(count):
        prompt = f"Ann has {n % 90} books . Tom has {n // 90 % 90} books . How many books does Ann have now ?"
        yield json.dumps({"custom_id": f"request-{n:07}", "prompt": prompt}) + "\n"


def encoded(config: Config) -> Iterator[tuple[int, Item, Request]]:
    """Yield the index, the item and the request of each input line, as the job makes them."""
    builder = EngineBuilder(config.model, torch.device("cpu"))
    encoder, items, first = Encoder(config, builder.shape, builder.tokenizer), iter(make_task(config.task).items()), 0
    while some := list(islice(items, 1000)):
        for item, request in zip(some, encoder.encode_all(first, some), strict=True):
            assert isinstance(request, Request)
            yield request.index, item, request
        first += len(some)


def make_up(config: Config, folder: Path, most: int) -> None:
    """Add a journal in which the first `most` requests are done; a real entry is the pattern for all of them."""
    real = next((folder / "journal").glob("001-*.jsonl"))
    with real.open() as lines:
        example = json.loads(next(lines))
    with (folder / "journal" / "001-99.jsonl").open("w") as out:
        for index, item, request in islice(encoded(config), most):
            line = example["line"] | {"custom_id": item.custom_id, "index": index}
            entry = example | {"id": request_id(item, request), "line": line}
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")


def deal_out(config: Config, folder: Path, place: Path) -> None:
    """Write the finished run in `folder` as the shards of an array, into folders in `place`."""
    report = read_report(folder / "report.json")
    with next((folder / "journal").glob("001-*.jsonl")).open() as entries:
        example = json.loads(next(entries))
    parts = [place / f"{shard:02}" for shard in range(SHARDS)]
    for shard, part in enumerate(parts):
        part.mkdir(parents=True)
        count = len(range(shard, report["requests"], SHARDS))
        task = report["task"] | {"shard": shard, "shards": SHARDS}
        write_report(part, report | {"requests": count, "expected": count, "task": task})
        figures, work = Columns(), Work()
        for _ in range(count):
            figures.append(example["figures"] | {"attempt": 1, "at": example["at"]})
            work.add(example["work"])
        write_figures(part, Merged(figures, work, 0, 0, []))
    with ExitStack() as files:
        results, lines = (
            [files.enter_context((part / name).open("w")) for part in parts] for name in ("results.jsonl", LINES)
        )
        for line, out in zip(files.enter_context((folder / "results.jsonl").open()), cycle(results), strict=False):
            out.write(line)
        for item, out in zip(make_task(config.task).items(), cycle(lines), strict=False):
            out.write(json.dumps(asdict(line_of(item))) + "\n")


def measure(place: Path, requests: int, real: int, ranks: int) -> dict[str, Any]:
    """Run a job as described above, and return its figures.

    Args:
        place: the folder with the model and the input; the run folders are made in it.
        requests: all requests of the job.
        real: requests that are generated in each of the two attempts.
        ranks: data ranks.
    """
    few, folder = place / f"few-{ranks}", place / f"run-{ranks}"
    small = watched(start(place, FEW, ranks, few), few, 1)
    first = watched(start(place, requests, ranks, folder), folder, 1, real)
    print(f"killed after {first}", flush=True)
    make_up(composed(options(place, requests)), folder, requests - real)
    second = watched(start(place, requests, ranks, folder), folder, 2)
    print(f"ended after {second}", flush=True)
    report = read_report(folder / "report.json")
    assert report["requests"] == requests, report["requests"]
    with (folder / "journal" / "002-0.jsonl").open() as lines:
        decode_s = json.loads(list(lines)[-1])["at"]
    return {
        "requests": requests,
        "ranks": ranks,
        "start_s": first.first,
        "resume_s": second.first,
        "requests_per_s": (second.count - ranks) / decode_s,  # the last line of each rank's journal is about the rank
        "end_s": second.ended - second.last,
        "bytes_a_request": {
            "first attempt": round((first.peak - small.peak) / requests),
            "resumed": round((second.peak - small.peak) / requests),
        },
    }


def measure_merge(place: Path, requests: int, ranks: int) -> dict[str, float]:
    """Deal the run out to shards, run `lopa-dist merge` on them, and return its seconds and its peak memory."""
    folder, array = place / f"run-{ranks}", place / "array"
    deal_out(composed(options(place, requests)), folder, array)
    job, most = Process([sys.executable, "-m", "lopa_dist", "merge", str(array)], 1, place / "merge.log"), 0
    while job.running():
        most = max(most, job.peak())
        time.sleep(0.02)
    assert (array / "results.jsonl").read_bytes() == (folder / "results.jsonl").read_bytes()
    return {"seconds": job.age, "peak_mib": round(most / 2**20)}


def main() -> None:
    """Measure the jobs and the merge; write and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--real", type=int, default=4000, help="requests generated in each of the two attempts")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        stub(place / "model")
        with (place / "input.jsonl").open("w") as out:
            out.writelines(prompts(given.requests))
        rows = [measure(place, given.requests, given.real, ranks) for ranks in given.ranks]
        merge = measure_merge(place, given.requests, given.ranks[0])
    rows[0]["merge"] = merge
    replace_rows("large_job", rows, ("requests", "ranks"))
    seconds = {"start": "{start_s:.1f} s", "resume": "{resume_s:.1f} s", "end": "{end_s:.1f} s"}
    columns = {"requests": "{requests:,}", "ranks": "{ranks}", **seconds, "requests/s": "{requests_per_s:.0f}"}
    show("Large jobs, with a stub model", rows, columns | {"bytes per request": "{bytes_a_request}"})
    print(f"merge of {SHARDS} shards: {merge['seconds']:.1f} s, {merge['peak_mib']} MiB")


if __name__ == "__main__":
    main()
