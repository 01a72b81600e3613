"""The whole configuration as dataclasses: names and types for Hydra, and the checks of values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lopa_dist.atomic import check_writable
from lopa_dist.checks import UserError, check_options, number, option, require, require_seconds
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.learn.config import LearnConfig
from lopa_dist.models.config import QUANTIZATIONS
from lopa_dist.models.families import PATTERNS
from lopa_dist.optional import why_lacking
from lopa_dist.overrides import hydra_message, is_setting, key_in
from lopa_dist.own_code import is_own, load
from lopa_dist.own_presets import unreadable
from lopa_dist.remote import exists, is_remote
from lopa_dist.tasks.prompt_template import template_of
from lopa_dist.tasks.registry import TASKS, options_of, task_class
from lopa_dist.tasks.response_format import TRIES
from lopa_dist.tasks.rows import check_ending

HERE = Path(__file__).parent
OUTPUTS = (".jsonl", ".csv", ".parquet")
COMPOSING = RLock()
LONGEST_NAME = 200  # bytes; file systems allow 255
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # in a wheel, and in a checkout


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


AUTO_CHOICES = ("context",)
AUTO_NUMBERS = ("block_size", "sub_block_size", "max_active_blocks")


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


def short(name: str) -> str:
    """Return `name` as a folder's name: without slashes and Hydra's backslashes; a long one ends in a hash instead."""
    name, whole = name.replace("/", "_").replace("\\", ""), name
    if len(name.encode()) <= LONGEST_NAME:
        return name
    start = name.encode()[: LONGEST_NAME - 17].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


SCHEMA = OmegaConf.structured(Config)
OmegaConf.set_struct(SCHEMA.model.template, False)  # its keys are the user's
ConfigStore.instance().store(name="lopa_dist_schema", node=SCHEMA)  # which `conf/config.yaml` extends
OmegaConf.register_new_resolver("lopa_dist.short", short, replace=True)  # which `conf/config.yaml` uses


def composed(overrides: list[str]) -> Config:
    """Return the configuration that a command line with these overrides has, checked.

    Raises:
        ValueError: a preset that does not exist, or a value that cannot be used.
    """
    try:
        config = OmegaConf.to_object(composition(overrides))
    except HydraException as error:
        raise UserError(what_hydra_says(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(unreadable(error, overrides)) from error
    assert isinstance(config, Config)
    return config


def what_hydra_says(error: HydraException) -> str:
    """Return what Hydra says of a command line that it cannot compose, and what was probably meant."""
    message = hydra_message(error)
    if (key := key_in(str(error))) is None:
        return message
    where = message.split(":")[0]  # In 'experiment/mine'
    if key in groups():
        begin = "let the file begin with the line `# @package _global_`, without a byte order mark"
        return f"{where}: {key}: no such key; {begin}"
    known = [one for one, *_ in keys_of()]
    if key in known:
        section, _, name = key.rpartition(".")
        return f"{where}: {key}: write it as two lines, `{section}:` and `  {name}: ...`"
    near = nearest(key, known)
    return f"{where}: {key}: no such key" + (f"; did you mean {', '.join(near)}?" if near else "")


def composition(overrides: list[str]) -> DictConfig:
    """Return what Hydra composes from these overrides; presets are composed once, and settings put into a copy."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    presets = tuple(str(one.input_line) for one in parsed if is_preset(one))
    settings = [one for one in parsed if is_setting(one)]
    if len(presets) + len(settings) < len(parsed):
        return by_hydra(tuple(overrides))
    config = deepcopy(by_hydra(presets))
    try:
        for one in settings:
            OmegaConf.update(config, one.key_or_group, one.value(), merge=True)
    except OmegaConfBaseException:
        return by_hydra(tuple(overrides))  # raises the error in Hydra's words
    return config


@cache
def by_hydra(overrides: tuple[str, ...]) -> DictConfig:
    """Return what Hydra composes from these overrides, which takes it a tenth of a second."""
    with reading_conf():
        return compose("config", list(overrides))


@contextmanager
def reading_conf() -> Iterator[None]:
    """Have Hydra read `conf` within the block, which one thread at a time may enter.

    Hydra reads the files of one program per process. That may be the user's program, such as one with `@hydra.main`
    that makes an `LLM`, so at the end Hydra is set back to it.
    """
    with COMPOSING:
        program, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
        GlobalHydra.instance().hydra = None
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().hydra = program
            VersionBase.instance().version_base = version


@cache
def groups() -> frozenset[str]:
    """Return the folders of presets in `conf`."""
    return frozenset(path.name for path in CONF.iterdir() if path.is_dir())


def is_preset(override: Override) -> bool:
    """Return whether an override chooses a preset, a file in a folder of `conf`."""
    changes = override.type is OverrideType.CHANGE and isinstance(override.value(), str)
    return changes and override.get_key_element() in groups()


def check_keys(overrides: list[str]) -> None:
    """Raise a UserError that suggests the nearest known keys for a misspelt one, before Hydra composes anything."""
    known = [key for key, *_ in keys_of()]
    sections = {key.rpartition(".")[0] for key in known} - groups() - {""}
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in groups() and value.startswith("../"):
            raise UserError(f"{override}: a preset is named without its folder")
        if key in groups() and (wrong := next(no_names(override), None)) is not None:
            raise UserError(f"{override}: {wrong} is not the name of a preset; leave out {key} for the usual one")
        if "=" in override and key in sections and not value.lstrip().startswith("{"):
            names = [one for one in known if one.rpartition(".")[0] == key]
            raise UserError(f"{override}: {key} has no presets, but the settings {', '.join(names)}")
        if "=" not in override or key.startswith(("hydra", "-")) or key in groups() or "/" in key or "@" in key:
            continue
        if key not in known:
            near = nearest(key, {*known, *groups()})  # a set: some keys are groups, too
            if key.split(".")[-1] == "n":  # its name in a line of a file and in `SamplingParams`
                near = ["task.samples"]
            if key == "task.stop":
                raise UserError("task.stop: no such key; stop strings are a line's own: give the input a field stop")
            if near:
                raise UserError(f"{key}: no such key; did you mean {', '.join(near)}? `lopa-dist explain` lists all")
            section = key.split(".")[0]
            names = [k for k in known if k.startswith(f"{section}.")]
            names = names or sorted({k.split(".")[0] for k in known} | groups())
            raise UserError(f"{key}: no such key (CHANGELOG.md has those that are gone). Known: {', '.join(names)}")


def no_names(override: str) -> Iterator[str]:
    """Yield the values of an override, several in a sweep, that cannot name a preset: numbers, truth values, null."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # which says more when it composes
        return
    if parsed.type is OverrideType.DEL:
        return
    value = parsed.value()
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        if one is None or isinstance(one, bool | int | float):
            yield "null" if one is None else str(one)


def nearest(key: str, known: Iterable[str]) -> list[str]:
    """Return up to three `known` keys that `key` may be meant for, the most alike first.

    Their last part is nearly the same as that of `key`, or begins with it. If some of them are in the same section,
    only these are returned; otherwise, if some have exactly the same last part, only those.
    """
    section, _, name = key.rpartition(".")
    parts = {one: one.rpartition(".") for one in known if one != "task.name"}  # which presets set
    likeness = {one: SequenceMatcher(None, name, last).ratio() for one, (_, _, last) in parts.items()}
    close = [one for one in sorted(parts) if likeness[one] >= 0.75 or (name and parts[one][2].startswith(name))]
    close.sort(key=lambda one: -likeness[one])
    beside = [one for one in close if section and parts[one][0] == section]
    return (beside or [one for one in close if parts[one][2] == name] or close)[:3]


def keys_of(section: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield the dotted name of each setting and section below a section, the dataclass that has it, and its field."""
    for entry in fields(section):
        key = prefix + entry.name
        yield key, section, entry
        if is_dataclass(entry.default_factory):
            yield from keys_of(entry.default_factory, f"{key}.")
