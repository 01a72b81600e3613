"""`lopa-dist explain [KEY ...]`: every setting with its value, where that comes from, its meaning and its choices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from lopa_dist.checks import UserError, did_you_mean
from lopa_dist.composing import composed, reading_conf
from lopa_dist.config import Config
from lopa_dist.jobs.setup.device import choose_device
from lopa_dist.jobs.setup.resolve import Resolved, by_device, by_model, resolve_decode
from lopa_dist.jobs.setup.settings import Setting, settings_of, shown
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import PATTERNS
from lopa_dist.models.files import find, in_cache, local
from lopa_dist.overrides import as_hydra_reads
from lopa_dist.own_presets import folders
from lopa_dist.parallel.launcher import World
from lopa_dist.setting_keys import CONF, check_keys


def sources(overrides: list[str]) -> dict[str, str]:
    """Return what set each key last, a preset's file or the command line; keys that neither sets are left out."""
    with reading_conf():
        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list("config", overrides, RunMode.RUN)
    origins: dict[str, str] = {}
    for entry in chosen.defaults:
        files = [folder / f"{entry.config_path}.yaml" for folder in (CONF, *folders(overrides))]
        if (file := next(filter(Path.exists, files), None)) is not None:
            below = "" if entry.package in (None, "", "_global_") else f"{entry.package}."
            keys = keys_in(yaml.safe_load(file.read_text(encoding="utf-8")) or {}, below)
            origins |= dict.fromkeys(keys, f"conf/{entry.config_path}.yaml" if file == files[0] else str(file))
    return origins | dict.fromkeys((entry.key_or_group for entry in chosen.config_overrides), "the command line")


def keys_in(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the dotted names of the keys that `tree`, a file's content, sets."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from keys_in(value, f"{prefix}{key}.")
        elif key != "defaults":
            yield prefix + key


def resolved(config: Config) -> Resolved:
    """Return what each ``auto`` resolves to in a job of one process here, and why; what is unknown is left out."""
    device, shape = choose_device(config, World("python")), shape_of(config)
    values = by_device(config, device)
    if shape is None:
        return values | by_pattern(config)
    return values | by_model(config, shape, device)


def shape_of(config: Config) -> ModelConfig | None:
    """Return the model's configuration; None if its files are not on this machine."""
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


def by_pattern(config: Config) -> Resolved:
    """Return what decode options set to ``auto`` resolve to, and why, without the model's files on this machine."""
    given = config.model.pattern
    found: Resolved = {}
    for name in ("context", "max_active_blocks"):
        if getattr(config.decode, name) != "auto":
            continue
        values: dict[str, list[str]] = {}
        for pattern in PATTERNS if given == "auto" else (given,):
            with contextlib.suppress(ValueError):  # the other options exclude this pattern
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
    """Yield each setting, its value, and where the value comes from, for a job with these overrides."""
    missing: list[str] = []
    if "task=batch" in overrides and not any(a.startswith("task.input=") for a in overrides):
        missing = ["task.input=FILE"]  # a job needs it, an explanation does not
    config, set_by = composed([*overrides, *missing]), sources(overrides)
    if missing:
        set_by["task.input"] = "you, when you start the job"
    automatic = resolved(config)
    for setting in settings_of():
        value, origin = attrgetter(setting.key)(config), set_by.get(setting.key, "default")
        if setting.key in automatic:
            value, reason = automatic[setting.key]
            origin = f"{origin}: auto, which follows {reason}"
        yield setting, shown(value), origin


OF_HYDRA = {
    "hydra.run.dir": "the run folder; the same one again goes on with the job in it (docs/results.md)",
    "hydra.sweep.dir": "the folder of a sweep (-m), with a run folder for each point; launch/sweep.sh calls it FOLDER",
    "launcher": "how a sweep's jobs start: local (here, one after the other) or slurm (docs/clusters.md)",
}
"""Settings of Hydra's that our own commands name."""


def explain(arguments: list[str]) -> str:
    """Return what `lopa-dist explain` prints: on the keys and sections in `arguments`, or on all if it has none.

    Raises:
        UserError: there is no such key.
    """
    wanted, overrides = [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]
    check_keys(overrides)
    known = [setting.key for setting in settings_of()]
    parts = [f"{key}\n    {OF_HYDRA[key]}" for key in wanted if key in OF_HYDRA]
    wanted = [key for key in wanted if key not in OF_HYDRA]
    if parts and not wanted:
        return "\n".join(parts)
    for key in wanted:
        if not any(name == key or name.startswith(f"{key}.") for name in known):
            hint = did_you_mean(key, known, 3)
            if hint == ".":
                hint += f" Sections: {', '.join(dict.fromkeys(name.split('.')[0] for name in known))}"
            raise UserError(f"{key}: no such key{hint}")
    for setting, value, origin in explanations(as_hydra_reads(overrides)):
        if not wanted or any(setting.key == key or setting.key.startswith(f"{key}.") for key in wanted):
            lines = [setting.meaning, f"takes: {setting.allowed}", f"from: {origin}"]
            if setting.key in wanted and setting.details:
                lines += ["", *setting.details.splitlines()]
            parts.append("\n".join([f"{setting.key}={value}", *(f"    {line}".rstrip() for line in lines)]))
    return "\n".join(parts)
