"""`lopa-dist doctor [KEY=VALUE ...]`: whether a job with these settings would run on this machine, and what slows it.

Each check looks at one thing that jobs need and says in a line that it is fine, what makes it slow, or what is broken
and how to mend it. Nothing is downloaded and no weights are loaded. What Triton compiles on a GPU is kept for the job.

Started on several ranks, as a job would be, it joins them and compares their collectives. Rank 0 shows what it finds;
the others show what is slow or broken, and all end with the same status.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from netrc import netrc
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lopa_dist.checks import UserError
from lopa_dist.config import Config, check_keys, composed, with_own_model
from lopa_dist.engine import memory
from lopa_dist.engine.buckets import hidden_rows
from lopa_dist.engine.kernel_choice import widths_of
from lopa_dist.jobs.commands.explain import in_cache, shape_of
from lopa_dist.jobs.run.prompts import check_template
from lopa_dist.jobs.setup.device import choose_dtype, cores, gpu
from lopa_dist.jobs.setup.resolve import resolve
from lopa_dist.jobs.show.wandb_log import chosen_mode
from lopa_dist.kernels.dispatch import KERNELS, TRITON
from lopa_dist.kernels.preflight import Widths, faults
from lopa_dist.kernels.row_bits import FAULT, same_bits
from lopa_dist.models.checkpoint import DTYPES
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.files import find, local
from lopa_dist.models.quantize import linears, mixtures
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop
from lopa_dist.tasks import sandbox
from lopa_dist.tasks.registry import TASKS

PROMPT = 1024  # tokens, where memory is planned: the doctor reads no input
JOIN_S = 30.0  # until the ranks have met and answered
ROUNDS, SENT = 5, 4096  # of collectives, and numbers in each
LEAST_FREE = 1 << 30  # bytes on the disk of the run folders
NODE_LOCAL = ("tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay")  # kinds of file systems
GIB = 2**30


class State(Enum):
    """What a check found: the word that is shown, and its colour."""

    FINE = "fine", "green"
    SLOW = "slow because", "yellow"
    BROKEN = "broken", "bold red"


class Finding(NamedTuple):
    """What a check found; of what is broken, the text says what to do."""

    state: State
    text: str


def fine(text: str) -> Finding:
    """Return a finding that needs nothing done."""
    return Finding(State.FINE, text)


def slow(text: str) -> Finding:
    """Return the reason why a job would run, and be slower than it could."""
    return Finding(State.SLOW, text)


def broken(text: str, remedy: str) -> Finding:
    """Return what would end a job, and what to do about it."""
    return Finding(State.BROKEN, f"{text}: {remedy}")


@dataclass
class Machine:
    """What the checks look at."""

    config: Config
    group: Group | None = None  # of the ranks that the doctor was started with, once they are joined

    @cached_property
    def device(self) -> torch.device:
        """Where a job's rank would compute; a CPU where the GPU that was asked for is not there."""
        name = self.config.model.device
        if not torch.cuda.is_available() or name == "cpu":
            return torch.device("cpu")
        return gpu(name, detect())

    @cached_property
    def shape(self) -> ModelConfig | None:
        """The model's configuration; None where its files are not on this machine yet."""
        return shape_of(self.config)


def python(machine: Machine) -> Finding:
    """The version and the path of the interpreter."""
    return fine(f"{platform.python_version()}, {sys.executable}")


def library(machine: Machine) -> Finding:
    """The version of torch, and whether it can use the GPU that is there."""
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return fine(version)
    if torch.version.cuda is None:
        return slow(f"{version} is built for CPUs, but this machine has a GPU: install torch's CUDA build")
    return slow(
        f"{version} finds no GPU, although nvidia-smi is there: the driver may be older than {torch.version.cuda}"
    )


def device(machine: Machine) -> Finding:
    """The GPU, or the cores."""
    asked = machine.config.model.device
    if asked.startswith("cuda") and machine.device.type == "cpu":
        return broken(f"model.device={asked}, but torch sees no GPU", "model.device=auto, or ask for a node with one")
    if machine.device.type == "cuda":
        if (machine.device.index or 0) >= torch.cuda.device_count():
            return broken(f"there is no {asked}", f"there are {torch.cuda.device_count()} GPUs, counted from 0")
        properties = torch.cuda.get_device_properties(machine.device)
        text = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / GIB:.0f} GiB"
        if (properties.major, properties.minor) < (8, 0):
            return slow(f"{text}: older than the GPUs that the kernels are made for (A100, H100)")
        return fine(text)
    number, why = cores(detect())
    text = f"CPU, {number} {'core' if number == 1 else 'cores'} ({why})"
    small = machine.shape is not None and parameters(machine.shape) < 5e8
    return fine(text) if small else slow(f"there is no GPU, and models of billions of weights need one: {text}")


def compiler(machine: Machine) -> Finding:
    """What Triton needs beside itself."""
    if machine.device.type == "cpu":
        return fine("not needed on a CPU")
    if machine.config.engine.kernels == "torch":
        return slow("engine.kernels=torch: no kernel of Triton's runs, and no CUDA graph")
    if not TRITON:
        return slow("Triton is not installed, so operations run one by one: pip install triton")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [name for name, there in (("C compiler", compiler), (str(headers), headers.exists())) if not there]
    if missing:
        return slow(f"Triton cannot run without {' and '.join(missing)}: apt install gcc python3-dev, or alike")
    import triton

    return fine(f"Triton {triton.__version__}, {compiler}")


def kernels(machine: Machine) -> Finding:
    """Each of Triton's kernels, launched once and compared with torch."""
    if machine.device.type == "cpu" and not same_bits():
        return slow(FAULT)
    if machine.device.type == "cpu" or machine.config.engine.kernels == "torch":
        return fine("torch's operations compute everything here")
    shape = machine.shape
    widths = Widths(1024, 2048, 16, 4, 64, 16)
    if shape is not None:
        widths = widths_of(shape, max(1, 64 // (shape.heads // shape.kv_heads)))
    dtype = DTYPES[choose_dtype(machine.config.model, machine.device)]
    fp8 = torch.cuda.get_device_capability(machine.device) >= (8, 9)
    wanted = tuple(name for name in KERNELS if name != "fp8" or fp8)
    failing = faults(widths, dtype, machine.device, wanted)
    if not failing:
        return fine(f"{len(wanted)} compile here and agree with torch")
    said = "; ".join(f"{name}: {fault}" for name, fault in failing.items())
    if machine.config.engine.kernels == "triton":
        return broken(said, "engine.kernels=auto does without them")
    return slow(f"these run in torch's form: {said}")


def ranks(machine: Machine) -> Finding:
    """How the doctor was started, as a job would be."""
    world = detect()
    if world.size == 1:
        return fine("one process; torchrun, srun and mpirun start more")
    return fine(f"rank {world.rank} of {world.size}, by {world.launcher}")


def collectives(machine: Machine) -> Finding:
    """Whether ranks receive what others send, and how long that takes."""
    world = detect()
    if world.size == 1:
        return fine("one process has none")
    if machine.device.type == "cuda":
        torch.cuda.set_device(machine.device)
    parallel = machine.config.parallel
    findings: list[Finding] = []

    def join() -> None:
        try:
            machine.group = Group(
                world, Mesh(1, world.size), parallel.backend, JOIN_S, machine.device, Stop(machine.config.job.grace_s)
            )
            findings.append(exchange(machine.group, machine.device))
        except (RuntimeError, ValueError, TimeoutError) as error:
            findings.append(Finding(State.BROKEN, f"{error}"))

    joining = Thread(target=join, daemon=True)  # the ranks of a job may wait for each other for minutes
    joining.start()
    joining.join(JOIN_S)
    if not findings:
        return broken(
            f"the {world.size} ranks did not meet, or did not answer, within {JOIN_S:.0f} s",
            "see whether all of them were started, and whether a firewall is between their machines; for NCCL, "
            "NCCL_SOCKET_IFNAME names the network, and NCCL_DEBUG=INFO says more",
        )
    return findings[0]


def exchange(group: Group, device: torch.device) -> Finding:
    """Gather and broadcast a few numbers between the ranks of a group."""
    comm, times = group.comm, []
    ranks = torch.arange(comm.size, dtype=torch.int32, device=device)
    for number in range(ROUNDS):
        began = time.perf_counter()
        gathered = comm.all_gather(torch.full((SENT,), comm.rank + number, dtype=torch.int32, device=device))
        right = bool((gathered == (ranks + number)[:, None]).all())  # waits for the device
        times.append(time.perf_counter() - began)
        last = comm.broadcast(torch.full((SENT,), comm.rank, dtype=torch.int64, device=device), comm.size - 1)
        if not (right and bool((last == comm.size - 1).all())):
            return broken(
                f"{group.backend}: what ranks get is not what others sent",
                "another parallel.backend; for NCCL, NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 finds the way that is bad",
            )
    took = 1000 * statistics.median(times)
    return fine(f"{group.backend} joins {comm.size} ranks; {SENT * 4 >> 10} KiB from each take {took:.2f} ms")


def slurm(machine: Machine) -> Finding:
    """Whether this is a job of Slurm's, and what it was given."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        if shutil.which("sbatch") is None:
            return fine("not here; a job starts without it")
        return fine("sbatch is here; this is not a Slurm job, so other nodes may differ")
    where = f"job {job} on {os.environ.get('SLURM_JOB_NODELIST', '?')}"
    given = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    if given == "1":
        return slow(f"{where} has one core a task: --cpus-per-task=8 feeds a GPU and judges programs")
    return fine(f"{where}, {given} cores a task")


def run_folder(machine: Machine) -> Finding:
    """Where results go: it must be writable, have room, and be seen by all nodes."""
    folder = Path(os.environ.get("SLURM_SUBMIT_DIR", ".")).resolve()
    remedy = "start from a folder that can be written, or give hydra.run.dir"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lopa-dist-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return broken(f"{folder} cannot be written ({error.strerror})", remedy)
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        return broken(f"{folder} has {free / GIB:.2f} GiB free", "make room, or give another hydra.run.dir")
    kind = file_system(folder)
    if int(os.environ.get("SLURM_NNODES", "1")) > 1 and kind in NODE_LOCAL:
        return broken(f"{folder} ({kind}) is this node's alone", "start from a folder that all nodes share")
    return fine(f"{folder} can be written, {free / GIB:.0f} GiB free{f', {kind}' if kind else ''}")


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on; an empty text where the system does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    over = [(where, kind) for where, kind in mounts if folder.is_relative_to(where.replace("\\040", " "))]
    return max(over, key=lambda mount: len(mount[0]))[1] if over else ""


def model(machine: Machine) -> Finding:
    """Whether the checkpoint is here, and is one that can be run."""
    path, shape = machine.config.model.path, machine.shape
    if shape is None:
        if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
            return broken(f"{path} is not on this machine, and HF_HUB_OFFLINE is set", "fetch it: hf download " + path)
        return fine(f"{path} is not here yet; a job downloads it, so a node without network needs it beforehand")
    resolve(machine.config, shape, machine.device)  # settings that do not go with the model are refused
    return fine(f"{path}: {shape.family}, {parameters(shape) / 1e6:,.0f} million weights")


def parameters(shape: ModelConfig) -> int:
    """Return how many weights a model has, from its configuration alone."""
    return weight_bytes(shape, "none", 1)


def weight_bytes(shape: ModelConfig, kind: str, element: int) -> int:
    """Return the bytes of a model's weights, from its configuration alone.

    Args:
        shape: the configuration.
        kind: `model.quantization`.
        element: bytes of a number that is not quantised.
    """
    with torch.device("meta"):
        model = Transformer(shape)
    eight: set[int] = set()
    if kind != "none":
        eight = {id(linear.weight) for _, _, linear in linears(model)}
        eight |= {id(weight) for mlp in mixtures(model) for weight in (mlp.gate_up, mlp.down)}
    return sum(weight.numel() * (1 if id(weight) in eight else element) for weight in model.parameters())


def memory_needed(machine: Machine) -> Finding:
    """The memory that is free, against weights, K/V and rows of the sequences that are to run at once."""
    if machine.shape is None:
        return fine("not planned: it follows from the model's configuration, which is not here yet")
    config = resolve(machine.config, machine.shape, machine.device)
    free = memory.free_bytes(machine.device) or available_memory()
    element = DTYPES[choose_dtype(config.model, machine.device)].itemsize
    weights = weight_bytes(machine.shape, config.model.quantization, element)
    what = f"{free / GIB:.1f} GiB free, {weights / GIB:.1f} for weights"
    if free <= weights:
        return broken(what, "take a GPU with more, model.quantization, model.dtype=bf16 or parallel.tensor")
    each, asked = PROMPT + config.decode.max_new_tokens, config.engine.max_sequences
    needs = np.full(asked, each if config.decode.stores_kv else 0)
    longest, engine = each + config.decode.block_size, config.engine
    try:
        plan = memory.plan(
            machine.shape, element, free - weights, needs, asked, engine.max_rows, engine.kv_tokens, longest,
            partial(hidden_rows, real_rows_only=engine.reproducible),
        )  # fmt: skip
    except memory.TooLarge:
        what += f", too little is left for one sequence of {each} tokens"
        return broken(what, "shorten decode.max_new_tokens, or model.quantization")
    what += f", {plan.bytes / GIB:.1f} for {plan.sequences} sequences of {each} tokens"
    if plan.sequences < asked:
        return slow(f"{what}, not engine.max_sequences={asked}")
    return fine(what)


def available_memory() -> int:
    """Return the bytes of this machine's memory that are free."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tokenizer(machine: Machine) -> Finding:
    """A message, through template and tokenizer."""
    path, mode = machine.config.model.path, machine.config.model.chat_template
    folder = find(path) if local(path) is not None else in_cache(path, "tokenizer_config.json")
    if folder is None:
        return fine("comes with the model")
    words = load_tokenizer(folder)
    if not words.chat_template:
        if mode == "always":
            return broken("model.chat_template=always, but the tokenizer has none", "model.chat_template=never")
        return fine(f"{len(words)} tokens, no chat template: prompts go in as they are")
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    given = machine.config.model.template
    try:
        check_template(given, str(words.chat_template))
    except ValueError as error:
        return broken(str(error), "other values in model.template")
    text = str(words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given))
    if messages[0]["content"] not in text:
        return broken("the chat template leaves the question out", "model.chat_template=never, or another tokenizer")
    wraps = "not used (model.chat_template=never)" if mode == "never" else "wraps prompts"
    return fine(f"{len(words)} tokens, the chat template {wraps}")


def wandb(machine: Machine) -> Finding:
    """Where figures of runs go."""
    mode, key = chosen_mode(machine.config), os.environ.get("WANDB_API_KEY")
    if mode == "disabled":
        return fine("off (logging.wandb.mode=disabled)")
    if mode == "offline":
        return fine(f"offline, into the run folder{'' if key else ' (WANDB_API_KEY is not set)'}; wandb sync sends it")
    if not key and not logged_in():
        return broken("logging.wandb.mode=online, but there is no key", "wandb login, or logging.wandb.mode=offline")
    return fine("online; whether this machine reaches it is seen when a job begins, which waits 30 s at most")


def logged_in() -> bool:
    """Whether `wandb login` left a key."""
    try:
        hosts = netrc(os.environ.get("NETRC", str(Path.home() / ".netrc"))).hosts
    except (OSError, SyntaxError):
        return False
    return any("wandb" in host for host in hosts)


def programs(machine: Machine) -> Finding:
    """The sandbox, which only tasks that run a model's programs need."""
    task = machine.config.task
    needs = "allow_code_execution" in TASKS[task.name].options
    if needs and task.allow_code_execution is None:
        return broken(f"task={task.name} runs the model's programs", "task.allow_code_execution=true, or false")
    unconfined = task.allow_code_execution == "unconfined"
    try:
        sandbox.check(not unconfined)
    except ValueError as error:
        if needs and task.allow_code_execution:
            return broken("programs cannot be run", str(error))
        reason = str(error).split(": ", 1)[-1].split(". ")[0]
        return fine(f"not needed here; humaneval and mbpp would need it: {reason}")
    return fine("programs run with limits alone (unconfined)" if unconfined else "bubblewrap confines programs")


CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "Python": python,
    "torch": library,
    "device": device,
    "compiler": compiler,
    "ranks": ranks,
    "collectives": collectives,
    "Slurm": slurm,
    "run folder": run_folder,
    "model": model,
    "memory": memory_needed,
    "tokenizer": tokenizer,
    "W&B": wandb,
    "sandbox": programs,
    "kernels": kernels,  # the last: one that breaks the GPU leaves nothing to check
}


def examine(machine: Machine) -> Iterator[tuple[str, Finding]]:
    """Yield what each check finds, as it is found; a check that fails itself has found something broken."""
    said = dict[str, str]()
    for name, check in CHECKS.items():
        try:
            yield name, check(machine)
        except Exception as error:
            text = f"{error}" if isinstance(error, ValueError) else repr(error)
            yield name, Finding(State.BROKEN, f"as {said[text]}" if text in said else text)
            said.setdefault(text, name)


def doctor(overrides: list[str], console: Console) -> bool:
    """Print what is found for a job with these overrides; return whether it would run.

    Raises:
        UserError: settings that cannot be.
    """
    wrong = [word for word in overrides if "=" not in word]
    if wrong:
        raise UserError(f"{wrong[0]}: doctor takes settings as key=value, as a job does: lopa-dist doctor model=...")
    check_keys(overrides)
    machine, world = Machine(composed(with_own_model(overrides))), detect()
    states = []
    for name, finding in examine(machine):
        states.append(finding.state)
        if world.rank and finding.state == State.FINE:
            continue
        if world.rank:
            console.print(Text(f"rank {world.rank} on {socket.gethostname()}:"))
        line = Table.grid(padding=(0, 2))
        line.add_column(width=max(map(len, CHECKS)), no_wrap=True)
        line.add_column(width=max(len(state.value[0]) for state in State), no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(name, Text(*finding.state.value), Text(finding.text))
        console.print(line)
    count = broken_everywhere(machine, states.count(State.BROKEN))
    if count:
        verdict = f"not run here: {count} {'thing is' if count == 1 else 'things are'} broken"
    else:
        verdict = f"run here{', slower than it could' if State.SLOW in states else ''}"
    if not world.rank:
        console.print(Text(f"A job would {verdict}."))
    return not count


def broken_everywhere(machine: Machine, count: int) -> int:
    """Return how many things are broken on all ranks; on this one alone if they are not joined."""
    if machine.group is None:
        return count
    try:
        return machine.group.store.sum({"broken": count})["broken"]
    except (RuntimeError, TimeoutError):
        return count + 1  # another rank is lost
