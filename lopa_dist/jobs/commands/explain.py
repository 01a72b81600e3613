"""`lopa-dist explain [KEY ...]`: every setting with its value, where that came from, its meaning and its choices."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from lopa_dist.checks import UserError, written
from lopa_dist.config import AUTO_CHOICES, CONF, Config, DecodeOptions, check_keys, composed, with_own_model
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.jobs.setup.device import choose_device
from lopa_dist.jobs.setup.resolve import Resolved, by_device, by_model, resolve_decode
from lopa_dist.models.checkpoint import read_config
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import PATTERNS
from lopa_dist.models.files import find, local
from lopa_dist.parallel.launcher import World

KINDS = {
    "IntOrAuto": "an integer, auto",
    "int": "an integer",
    "float": "a number",
    "bool": "true, false",
    "None": "null",
    "list[str]": "a list",
    "dict[str, Any]": "names and values",
}


@dataclass(frozen=True)
class Setting:
    """A key of the configuration, as its dataclass describes it."""

    key: str
    default: Any
    meaning: str
    allowed: str  # its choices, or what kind of value it takes
    details: str  # what its section's docstring says of it besides; often nothing


def settings_of(section: Any = Config, prefix: str = "") -> Iterator[Setting]:
    """Every key below a section, in the order of its fields."""
    for entry in fields(section):
        key = prefix + entry.name
        make = entry.default_factory
        default = entry.default if make is MISSING else make()
        if is_dataclass(default):
            yield from settings_of(type(default), f"{key}.")
        else:
            meaning = documented_field(entry, section).metadata["meaning"]
            yield Setting(key, default, meaning, allowed(entry, section), details(entry.name, section))


def documented_field(entry: Field[Any], section: Any) -> Field[Any]:
    """The field that says what a setting means: `DecodeOptions` only widens some of `DecodeConfig`."""
    return DecodeConfig.__dataclass_fields__[entry.name] if section is DecodeOptions else entry


def allowed(entry: Field[Any], section: Any) -> str:
    """What values a setting takes, in words."""
    choices = documented_field(entry, section).metadata.get("choices")
    if choices:
        more = ("auto",) if section is DecodeOptions and entry.name in AUTO_CHOICES else ()
        return ", ".join([*more, *map(written, choices)])
    kinds = [kind.strip() for kind in str(entry.type).split("|")]
    words = [KINDS[kind] for kind in kinds if kind in KINDS]
    if "str" in kinds:
        words.insert(len(words) - ("None" in kinds), "auto" if "int" in kinds else "a text")
    words = ", ".join(words).split(", ")
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def details(name: str, section: Any) -> str:
    """The paragraphs of a section's description that begin with a setting's name, and what is listed below them."""
    its_own, inside = [], False
    for paragraph in description(section).split("\n\n"):
        inside = paragraph.startswith(f"`{name}`") or (inside and paragraph.startswith("- "))
        its_own += [paragraph] if inside else []
    return "\n\n".join(its_own)


def description(section: Any) -> str:
    """What a section's docstring says, without its list of errors."""
    documented = DecodeConfig if section is DecodeOptions else section
    return inspect.cleandoc(str(documented.__doc__)).split("\n\nRaises:")[0]


def shown(value: Any) -> str:
    """A value as one writes it on the command line."""
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def sources(overrides: list[str]) -> dict[str, str]:
    """For each key that is not at its default, what set it last: a file of `conf`, or the command line."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list("config", overrides, RunMode.RUN)
    origins: dict[str, str] = {}
    for entry in chosen.defaults:
        file = CONF / f"{entry.config_path}.yaml"
        if file.exists():
            below = "" if entry.package in (None, "", "_global_") else f"{entry.package}."
            keys = keys_in(yaml.safe_load(file.read_text()) or {}, below)
            origins |= dict.fromkeys(keys, f"conf/{entry.config_path}.yaml")
    return origins | dict.fromkeys((entry.key_or_group for entry in chosen.config_overrides), "the command line")


def keys_in(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Dotted names of the keys that a file sets."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from keys_in(value, f"{prefix}{key}.")
        elif key != "defaults":
            yield prefix + key


def resolved(config: Config) -> Resolved:
    """What ``auto`` comes to in a job of one process here, and by what; only of settings for which that is known."""
    device, shape = choose_device(config, World("python")), shape_of(config)
    values = by_device(config, device)
    if shape is None:
        return values | by_pattern(config)
    return values | by_model(config, shape, device)


def shape_of(config: Config) -> ModelConfig | None:
    """The model's configuration, if its files are on this machine."""
    model = config.model
    path = find(model.path) if local(model.path) is not None else in_cache(model.path, "config.json")
    if path is None:
        return None
    mask_adapter = None
    if model.lora is not None and model.lora_rows == "masks":
        mask_adapter = (
            local(model.lora, "model.lora") or in_cache(model.lora, "adapter_config.json") or Path(model.lora)
        )
    return read_config(path, mask_adapter)


def in_cache(path: str, file: str) -> Path | None:
    """The folder of a hub id's `file`, if it was downloaded before."""
    cached = try_to_load_from_cache(path, file)
    return Path(cached).parent if isinstance(cached, str) else None


def by_pattern(config: Config) -> Resolved:
    """What decode options set to ``auto`` come to where the model's files are not on this machine."""
    given = config.model.pattern
    found: Resolved = {}
    for name in ("context", "max_active_blocks"):
        if getattr(config.decode, name) != "auto":
            continue
        values: dict[str, list[str]] = {}
        for pattern in PATTERNS if given == "auto" else (given,):
            with contextlib.suppress(ValueError):  # this pattern does not go with the other options
                unknown = replace(PATTERNS[pattern], edits=True)  # whether the model edits is not known either
                value = getattr(resolve_decode(config.decode, unknown), name)
                values.setdefault(shown(value), []).append(pattern)
        if given == "auto":
            choices = ", ".join(f"{value} ({', '.join(patterns)})" for value, patterns in values.items())
            reason = f"how {config.model.path} was trained, as its files say, which are not here yet: {choices}"
            found[f"decode.{name}"] = "auto", reason
        elif values:
            found[f"decode.{name}"] = yaml.safe_load(next(iter(values))), f"model.pattern={given}"
    return found


def explanations(overrides: list[str]) -> Iterator[tuple[Setting, str, str]]:
    """Each setting, its value, and where the value came from, for a job with these overrides."""
    config, set_by = composed(overrides), sources(overrides)
    automatic = resolved(config)
    for setting in settings_of():
        value, origin = attrgetter(setting.key)(config), set_by.get(setting.key, "default")
        if setting.key in automatic:
            value, reason = automatic[setting.key]
            origin = f"{origin}: auto, which follows {reason}"
        yield setting, shown(value), origin


def explain(arguments: list[str]) -> str:
    """What `lopa-dist explain` prints: of the keys and sections that are named, else of all; UserError: no such key."""
    wanted, overrides = [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]
    check_keys(overrides)
    known = [setting.key for setting in settings_of()]
    for key in wanted:
        if not any(name == key or name.startswith(f"{key}.") for name in known):
            near = difflib.get_close_matches(key, known, n=3)
            sections = dict.fromkeys(name.split(".")[0] for name in known)
            hint = f"; did you mean {', '.join(near)}?" if near else f". Sections: {', '.join(sections)}"
            raise UserError(f"{key}: no such key{hint}")
    parts = []
    for setting, value, origin in explanations(with_own_model(overrides)):
        if not wanted or any(setting.key == key or setting.key.startswith(f"{key}.") for key in wanted):
            lines = [setting.meaning, f"takes: {setting.allowed}", f"from: {origin}"]
            if setting.key in wanted and setting.details:
                lines += ["", *setting.details.splitlines()]
            parts.append("\n".join([f"{setting.key}={value}", *(f"    {line}".rstrip() for line in lines)]))
    return "\n".join(parts)
