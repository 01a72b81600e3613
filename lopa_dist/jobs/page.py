"""HTML pages, each one file that needs nothing but a browser, so that people can pass it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lopa_dist.whole import named

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("pages")),
    autoescape=True,  # of texts that models and users wrote
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_page(file: Path, template: str, **data: Any) -> Path:
    """Fill in a template of the folder `pages`; returns the file."""
    text = TEMPLATES.get_template(template).render(data)
    with named(file):
        file.write_text(text, encoding="utf-8", errors="replace")  # no encoding has half of a surrogate pair
    return file
