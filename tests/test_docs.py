"""What the documentation quotes is what the code says, and its links lead somewhere."""

from __future__ import annotations

import inspect
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from lopa_dist.commands import COMMANDS
from lopa_dist.jobs.setup.settings import settings_of
from tests.decode.oracle import Oracle

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_quoted_step_is_the_oracles() -> None:
    step = textwrap.dedent(inspect.getsource(Oracle.step)).rstrip()
    assert step in (ROOT / "docs/lopa-step.md").read_text(), "copy it anew into docs/lopa-step.md"


def test_the_configuration_page_is_what_the_code_says() -> None:
    program = runpy.run_path(str(ROOT / "scripts/configuration.py"))
    assert program["PAGE"].read_text() == program["page"](), "run python scripts/configuration.py"


def test_the_models_page_is_what_the_table_says() -> None:
    program = runpy.run_path(str(ROOT / "scripts/models.py"))
    assert program["PAGE"].read_text() == program["page"](), "run python scripts/models.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_to_headings_find_them(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert heading in anchors(page.parent / target if target else page), f"{page.name}: {target}#{heading}"


def test_headings_that_the_package_names_exist() -> None:
    """In messages, meanings of settings and presets."""
    files = [*(ROOT / "lopa_dist").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    named = [link for file in files for link in re.findall(r"(docs/[\w-]+\.md)#([\w-]+)", file.read_text())]
    assert len(named) >= 3
    assert not [f"{page}#{heading}" for page, heading in named if heading not in anchors(ROOT / page)]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    """A path from the checkout, or one of a module in the package."""
    for named in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|sh|yaml|json|png))`", page.read_text()):
        assert any((base / named).exists() for base in (ROOT, ROOT / "lopa_dist")), f"{page.name} names {named}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ("CHANGELOG.md", "tried.md")], ids=lambda p: p.name)
def test_settings_and_commands_that_pages_name_exist(page: Path) -> None:
    keys = {setting.key for setting in settings_of()}
    section = "|".join({key.split(".")[0] for key in keys if "." in key})
    text = page.read_text()
    named = set(re.findall(rf"(?<![\w.-])((?:{section})\.[\w.]+)=", text))
    quoted = set(re.findall(rf"`((?:{section})\.\w+)`", text)) - {"job.lock"}
    modules = {key for key in quoted if (ROOT / "lopa_dist" / (key.replace(".", "/") + ".py")).exists()}
    assert not (named | quoted - modules) - keys
    quoted = set(re.findall(r"^    .*$|`[^`\n]+`", text, re.MULTILINE))
    assert not {name for code in quoted for name in re.findall(r"lopa-dist ([a-z][a-z-]*)(?![\w.=/-])", code)} - {
        *COMMANDS
    }


def test_messages_that_the_debugging_page_explains_are_those_of_the_code() -> None:
    table = (ROOT / "docs/debugging.md").read_text().split("## Messages")[1]
    elsewhere = ("No space left on device", "Root Cause")  # of the system and of torchrun
    messages = [m for m in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) if not m.startswith(elsewhere)]
    assert len(messages) >= 2
    code = "".join(file.read_text() for file in (ROOT / "lopa_dist").rglob("*.py"))
    for message in messages:
        assert all(part in code for part in re.split(r" ?\bN\b ?", message)), message
