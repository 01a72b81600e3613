"""Write docs/configuration.md from the dataclasses and the presets: ``python scripts/configuration.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from lopa_dist.config import Config
from lopa_dist.jobs.setup.settings import description, settings_of, shown
from lopa_dist.setting_keys import CONF, keys_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRO = """# Configuration

<!-- Written by scripts/configuration.py; change the dataclasses or the presets, not this page. -->

Every setting, as `key=value` on the command line. `lopa-dist explain KEY ...` explains single settings, and shows their
values in a job with given presets and overrides: `lopa-dist explain decode.context model=dream_instruct`.

A preset is a file in `conf/`; `decode=verified` chooses one. Presets of your own are in a folder of yours with the same
subfolders: `lopa-dist --config-dir FOLDER experiment=mine` reads FOLDER/experiment/mine.yaml, which begins with
the line `# @package _global_`; launch/*.sh take the folder as `hydra.searchpath=[file:///FOLDER]`. A setting that
neither the command line nor a preset gives has its default from the tables below. `decode` options set to `auto` follow
how the model was trained, according to its family or `model.pattern`."""
GROUPS = {
    "model": "Models",
    "decode": "Ways of decoding",
    "task": "Tasks",
    "launcher": "Launchers of sweeps",
    "experiment": "Settings of the paper",
}


def sections() -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the dataclass of every section with settings of its own; the root comes first."""
    yield "", Config
    for key, _, entry in keys_of():
        if is_dataclass(entry.default_factory):
            yield key, entry.default_factory


def section_page(name: str, section: Any) -> str:
    """Return a section's description and the table of its settings."""
    prefix = f"{name}." if name else ""
    own = {prefix + entry.name for entry in fields(section)}
    rows = [one for one in settings_of(section, prefix) if one.key in own]
    table = [
        "| setting | default | takes | meaning |",
        "|---|---|---|---|",
        *(f"| `{one.key}` | `{shown(one.default)}` | {one.allowed} | {one.meaning} |" for one in rows),
    ]
    text = description(section) if name else "Outside all sections."
    return "\n".join([f"### {name or 'The root'}", "", text, "", *table])


def presets(group: str, title: str) -> str:
    """Return the table of a group's presets, each with the comment at the beginning of its file."""
    lines = [f"### {title}", "", f"| `{group}=` | |", "|---|---|"]
    for file in sorted((CONF / group).glob("*.yaml")):
        comment = []
        for line in file.read_text().splitlines():
            if line.startswith("# @package"):
                continue
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        lines.append(f"| `{file.stem}` | {' '.join(comment)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    settings = [section_page(name, section) for name, section in sections()]
    chosen = [presets(group, title) for group, title in GROUPS.items()]
    return "\n\n".join([INTRO, "## Settings", *settings, "## Presets", *chosen]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
