"""Configurations from overrides: Hydra composes them from the presets in `conf`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from threading import RLock

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lopa_dist.checks import UserError
from lopa_dist.config import Config
from lopa_dist.overrides import hydra_message, is_setting, key_in
from lopa_dist.own_presets import unreadable
from lopa_dist.setting_keys import CONF, groups, keys_of, nearest

COMPOSING = RLock()
LONGEST_NAME = 200  # bytes; file systems allow 255


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


def is_preset(override: Override) -> bool:
    """Return whether an override chooses a preset, a file in a folder of `conf`."""
    changes = override.type is OverrideType.CHANGE and isinstance(override.value(), str)
    return changes and override.get_key_element() in groups()
