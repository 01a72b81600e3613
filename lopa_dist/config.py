"""The whole configuration as dataclasses: names and types for Hydra, and the checks of values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from lopa_dist.atomic import check_writable
from lopa_dist.checks import check_options, number, option, require, require_seconds
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.learn.config import LearnConfig
from lopa_dist.models.config import QUANTIZATIONS
from lopa_dist.models.families import PATTERNS
from lopa_dist.optional import why_lacking
from lopa_dist.own_code import is_own, load
from lopa_dist.remote import exists, is_remote
from lopa_dist.tasks.prompt_template import template_of
from lopa_dist.tasks.registry import TASKS, options_of, task_class
from lopa_dist.tasks.response_format import TRIES
from lopa_dist.tasks.rows import check_ending

OUTPUTS = (".jsonl", ".csv", ".parquet")
AUTO_CHOICES = ("context",)
AUTO_NUMBERS = ("block_size", "sub_block_size", "max_active_blocks")


@dataclass
class ModelOptions:
    """Which checkpoint, and how it is loaded."""

    path: str = option(
        "embedded", "the checkpoint: embedded, lists, causal, causal_lists, a folder, or a Hugging Face id"
    )
    lora: str | None = option(None, "a PEFT LoRA adapter (folder or id), merged into the weights as they are loaded")
    lora_rows: str = option(
        "all",
        "rows that the adapter acts on: all, or only masks' rows, which leaves a causal model's text as it is "
        "(I-DLM, Nemotron)",
        ("all", "masks"),
    )
    pattern: str = option(
        "auto",
        "how the model was trained, which decides decode options set to auto (vanilla: decoded with the dual cache); "
        "auto: as its family",
        ("auto", *PATTERNS),
    )
    dtype: str = option(
        "auto", "precision of the weights; auto: fp32 on a CPU, bf16 on a GPU", ("auto", "fp32", "bf16", "fp16")
    )
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda (each rank its own), or cuda:N")
    quantization: str = option(
        "none",
        "precision of the layers' projections: fp8 (weights and activations) or int8 (weights)",
        ("none", *QUANTIZATIONS),
    )
    chat_template: str = option(
        "auto",
        "wrap plain prompts in the tokenizer's chat template; auto: if it has one",
        ("auto", "always", "never"),
    )
    template: dict[str, Any] = field(
        default_factory=dict,
        metadata={"meaning": "values for the chat template's own variables, such as {enable_thinking: false}"},
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"model.device={self.device!r}: must be one of auto, cpu, cuda, cuda:N")
        check_options("model", self)
        if self.lora_rows != "all" and self.lora is None:
            raise ValueError(f"model.lora_rows={self.lora_rows} needs an adapter: set model.lora")

    @property
    def merged_lora(self) -> str | None:
        """The adapter that is merged into the weights, and so acts on all rows; None: there is none."""
        return self.lora if self.lora_rows == "all" else None


@dataclass
class DecodeOptions(DecodeConfig):
    """The decode options as users write them: some may be ``auto``, which is what the model was trained for.

    These are context, block_size, sub_block_size and max_active_blocks.
    """

    block_size: int | str = 32  # type: ignore[assignment]
    sub_block_size: int | str | None = None  # type: ignore[assignment]
    max_active_blocks: int | str | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for key in AUTO_CHOICES:
            choices = DecodeConfig.__dataclass_fields__[key].metadata["choices"]
            require(f"decode.{key}", getattr(self, key), ("auto", *choices))
        for key in AUTO_NUMBERS:
            value = number(getattr(self, key))
            setattr(self, key, value)
            if isinstance(value, str) and value != "auto":
                raise ValueError(f"decode.{key}={value!r}: must be an integer or 'auto'")
        # the given options must fit together, whatever the model's own values are
        given = {f.name: value for f in fields(DecodeConfig) if (value := getattr(self, f.name)) != "auto"}
        DecodeConfig(**given)


@dataclass
class TaskConfig:
    """What is generated."""

    name: str = option("arithmetic", f"what is generated: {', '.join(TASKS)}, or FILE.py:CLASS, a task of your own")
    limit: int | None = option(
        200,
        "how many requests to run (lines of a batch file); null: all, as in all presets but arithmetic and lists",
        least=1,
    )
    input: str | None = option(
        None, "a file, a folder, - (standard input) or hf://owner/name:config:split; null: the task's own data set"
    )
    output: str | None = option(
        None,
        "a file for the results besides the run folder: .jsonl, .csv or .parquet, also s3://..., gs://... or "
        "hf://datasets/owner/name/FILE; FOLDER/part-*.parquet: parts, written while the job runs; null: none",
    )
    harness: str | None = option(
        None, "task=harness: the name of a task or group of lm-evaluation-harness, or a task's YAML file"
    )
    masks: int = option(
        128,
        "task=harness: masks per text from which a masked model's likelihood is estimated",
        least=1,
    )
    column: str | None = option(
        None, "task=batch: the column or field that holds the prompt, if it is not called prompt"
    )
    prompt: str | None = option(
        None, "task=batch: the prompt, with columns in braces, as in 'Classify: {text}'; double a literal brace"
    )
    id: str | None = option(None, "task=batch: the column that names requests; null: custom_id or id, else line-1, ...")
    truncate: str | None = option(
        None,
        "where to cut a prompt, or a chat's last message, that is too long for the model: left (drops its beginning) "
        "or right; null: it is an error",
        ("left", "right", None),
    )
    samples: int = option(1, "task=batch: answers per prompt; different ones need decode.temperature above 0", least=1)
    tries: int = option(
        TRIES,
        "task=batch: most answers to generate until one is the JSON that a line's response_format asks for; a second "
        "one needs a temperature above 0",
        least=1,
    )
    response_format: Any = field(
        default=None,
        metadata={
            "meaning": "task=batch: the format of answers, for lines without one: json_object, a JSON schema "
            "(FILE.json), or as in a line; null: any text"
        },
    )
    fewshot: int | None = option(None, "examples in the prompt; null: the task's usual number", least=0)
    fewshot_input: str | None = option(None, "where the examples are, as for input; null: the usual ones")
    fewshot_as_multiturn: bool = option(
        True, "in a chat, every example is a separate turn; false: all are in one turn of the user"
    )
    score: str | None = option(
        None,
        "task=batch: how answers are judged: exact compares them with each line's reference, FILE.py:FUNCTION calls "
        "your own function (docs/inputs.md#own-problems); null: not at all",
    )
    allow_code_execution: bool | str | None = option(
        None,
        "humaneval, mbpp and their plus forms: run the model's code in a sandbox; false: only generate; unconfined: "
        "run it without a sandbox, only with limits; null: such a task is refused",
        (True, False, "unconfined", None),
    )
    code_timeout_s: float = option(10.0, "seconds for one program and its tests, which run beside decoding")
    split: str = option("held_out", "arithmetic, lists: which problems", ("held_out", "train"))
    shard: int = option(0, "which part of the requests: every `shards`-th, from this one on")
    shards: int = option(1, "parts of the requests, one job each, which `lopa-dist merge` joins", least=1)
    problem_seed: int = option(1, "arithmetic, lists: which stream of problems; 2 is the final test, not for tuning")

    def __post_init__(self) -> None:
        check_options("task", self)
        own = is_own(self.name)
        if not own:
            require("task.name", self.name, tuple(TASKS))
        if not 0 <= self.shard < self.shards:
            raise ValueError(f"task.shard={self.shard}: must be from 0 to task.shards - 1 = {self.shards - 1}")
        if self.score is not None and self.score != "exact" and not is_own(self.score):
            raise ValueError(f"task.score={self.score}: must be exact or FILE.py:FUNCTION")
        require_seconds("task.code_timeout_s", self.code_timeout_s)
        if self.output is not None and PurePosixPath(self.output).suffix not in OUTPUTS:
            raise ValueError(
                f"task.output={self.output}: name a file that ends with {', '.join(OUTPUTS)}, or FOLDER/part-*.parquet "
                "for parts that are written while the job runs"
            )
        if self.output is not None and "*" in str(PurePosixPath(self.output).parent) + self.output.partition("*")[2]:
            raise ValueError(f"task.output={self.output}: one * in the name of the file stands for a part's number")
        if self.prompt is not None:
            template_of(self.prompt)
            if self.column is not None:
                raise ValueError(
                    f"task.column={self.column} with task.prompt: both say what the prompt is; leave one of them out"
                )
        if not own and hasattr(TASKS[self.name], "check"):
            TASKS[self.name].check(self)
        if self.input == "-" and not getattr(TASKS.get(self.name), "reads_stdin", False):
            raise ValueError("task.input=-: only task=batch reads standard input; name a file")
        read = options_of(self.name)
        for f in fields(self):
            names = [name for name, task in TASKS.items() if f.name in task.options]
            value = getattr(self, f.name)
            if names and f.name not in read and value != f.default:
                raise ValueError(
                    f"task.{f.name}={value}: has no effect with task={self.name}, only with {', '.join(names)}; "
                    "leave it out"
                )


@dataclass
class ParallelConfig:
    """How ranks are used: world = data x branch x tensor."""

    data: str | int = option("auto", "replicas that take different requests from one queue", least=1)
    branch: str | int = option("auto", "ranks per replica, which share its sequences' branches", least=1)
    tensor: str | int = option("auto", "ranks that split a model's weights; auto: 1", least=1)
    backend: str = option(
        "auto",
        "how ranks communicate; auto: nccl on GPUs, else gloo, or mpi under mpirun",
        ("auto", "solo", "gloo", "nccl", "mpi"),
    )
    timeout_s: float = option(60.0, "seconds that a collective may take before a rank counts as lost")
    threads: int = option(
        0,
        "CPU threads per rank; 0: the machine's cores divided among its ranks, or fewer if OMP_NUM_THREADS or "
        "torch.set_num_threads says so",
        least=0,
    )

    def __post_init__(self) -> None:
        for axis in ("data", "branch", "tensor"):
            setattr(self, axis, number(getattr(self, axis)))
        check_options("parallel", self)
        require_seconds("parallel.timeout_s", self.timeout_s)


@dataclass
class JobConfig:
    """How a job stops, and resumes in its run folder."""

    resume: str = option(
        "auto",
        "continue where the run folder's journal ends (auto), or set that aside and start over (new)",
        ("auto", "new"),
    )
    retry: str | None = option(
        None,
        "errors: rerun the requests that ended with an error, also with another model.dtype or model.quantization; "
        "verdicts: judge all answers again, for example after a change of a file that task.score reads",
        ("errors", "verdicts", None),
    )
    crashes: int | None = option(
        2, "set a request aside as an error after the process has ended this many times while it ran; null: never"
    )
    learn: str | int | None = option(
        None,
        "causal models: pause after this many answers, learn from them to draft (learn.*), and continue; auto: when "
        "this is expected to pay; null: never. No text depends on it (docs/drafts-that-learn.md)",
        least=1,
    )
    grace_s: float = option(
        20.0, "seconds to finish requests in flight after SIGTERM, SIGUSR1 or SIGHUP, before they are dropped"
    )

    def __post_init__(self) -> None:
        self.learn = number(self.learn)
        check_options("job", self)
        require_seconds("job.grace_s", self.grace_s, zero=True)
        if self.crashes is not None and not 1 <= self.crashes < 256:
            raise ValueError(f"job.crashes={self.crashes}: must be from 1 to 255, or null")
        if self.retry and self.resume == "new":
            raise ValueError(
                f"job.retry={self.retry} with job.resume=new: a job that starts over has no {self.retry} yet"
            )


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = option(
        "auto",
        "auto: as WANDB_MODE or WANDB_DISABLED says, or else online when WANDB_API_KEY is set, offline without",
        ("auto", "online", "offline", "disabled"),
    )
    project: str | None = option(None, "the project's name; null: that of WANDB_PROJECT, or else lopa_dist")
    entity: str | None = option(None, "user or team; null: the account's default")
    group: str | None = option(None, "the group of the run")
    tags: list[str] = field(default_factory=list, metadata={"meaning": "tags of the run"})
    texts: bool = option(
        False, "also send answers' texts: a table of the first 1,000, results.jsonl and report.html; else only figures"
    )
    ranks: bool = option(
        False, "a separate run for every rank, in one group, which shows if a rank is slower than the others"
    )

    def __post_init__(self) -> None:
        check_options("logging.wandb", self)


@dataclass
class LoggingConfig:
    """What is shown and kept of a run."""

    progress: str = option(
        "auto", "auto: a live display on a terminal, lines elsewhere; never: silent", ("auto", "always", "never")
    )
    every_s: float = option(5.0, "seconds between progress lines, and between logged steps")
    token_ids: bool = option(False, "write token ids into results.jsonl")
    token_steps: bool = option(
        False, "write each token's log probability, step and way (filled, accepted, bonus, edited) into results.jsonl"
    )
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        check_options("logging", self)
        require_seconds("logging.every_s", self.every_s)


@dataclass
class Config:
    """The root."""

    model: ModelOptions = field(default_factory=ModelOptions)
    task: TaskConfig = field(default_factory=TaskConfig)
    decode: DecodeConfig = field(default_factory=DecodeOptions)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    job: JobConfig = field(default_factory=JobConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    seed: int = option(0, "seed of all random numbers")

    def __post_init__(self) -> None:
        if self.engine.reproducible and self.model.quantization == "fp8":
            raise ValueError(
                "engine.reproducible=true with model.quantization=fp8: the library multiplies fp8, in bits that depend "
                "on the batch; use int8 or none"
            )


def check_files(config: Config) -> None:
    """Raise a ValueError if a file or code that the configuration names cannot be used; the input is not read yet."""
    if config.task.input:
        check_ending(config.task.input)
    if config.task.output:
        check_output(config.task.output)
    for key, text in (("task.score", config.task.score), ("decode.fill", config.decode.fill)):
        if is_own(text):
            load(str(text), key)
    task_class(config.task.name)
    if config.decode.rule is not None:
        from lopa_dist.rules.own_rule import own_rule  # torch, which takes seconds to import, comes with rules

        own_rule(config.decode)


def check_output(path: str) -> None:
    """Raise a ValueError if results could not be written to `path`, or a remote `path` cannot be reached."""
    if path.endswith(".parquet") and (why := why_lacking("pyarrow")):
        raise ValueError(f"task.output={path}: {why}; or write .csv")
    if is_remote(path):
        exists(path, "task.output")
        return
    try:
        check_writable(Path(path).expanduser().parent)
    except OSError as error:
        raise ValueError(f"task.output={path}: its folder cannot be written to ({error})") from error
