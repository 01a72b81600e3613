"""A table of runs for a paper (LaTeX with booktabs) or a README (Markdown)."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_ROWS = 40  # of a table, which must fit on a page
TEXT_WIDTH, LETTER, COLUMN = 345, 4.5, 12  # points: of an article's text, of a letter, of the space around a column
SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def latex(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], methods: str = "", notes: Sequence[str] = ()
) -> str:
    """Return a LaTeX `table` with its first column left-aligned; it needs ``\\usepackage{booktabs}``.

    There are several tables if one would not fit on a page. One that is wider than the text of an article is scaled,
    for which it needs ``\\usepackage{graphicx}``, too. The caption is `title` and how the figures are worked out
    (`methods`); `notes` become comments.
    """
    lines = [row_of([escaped(one_line(name)), *(figure(cell) for cell in cells)]) for name, *cells in rows]
    caption = f"{escaped(title)}. {escaped(methods)}" if methods else escaped(title)
    caption = caption.replace(r" \%", r"\,\%")
    width = sum(LETTER * max(map(len, column)) + COLUMN for column in zip(head, *rows, strict=True))
    begin, end = ("\\resizebox{\\textwidth}{!}{%\n", "}") if width > TEXT_WIDTH else ("", "")
    packages = "booktabs" + ", graphicx" * bool(begin)
    parts = [lines[first : first + MOST_ROWS] for first in range(0, len(lines), MOST_ROWS)]
    text = [rf"% \usepackage{{{packages}}}", *(f"% {one_line(note)}" for note in notes)]
    for number, part in enumerate(parts, 1):
        text += [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}{f' (Part {number} of {len(parts)})' * (len(parts) > 1)}}}",
            rf"{begin}\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            row_of([escaped(one_line(cell)) for cell in head]),
            r"\midrule",
            *part,
            r"\bottomrule",
            rf"\end{{tabular}}{end}",
            r"\end{table}",
        ]
    return "\n".join(text)


def row_of(cells: Sequence[str]) -> str:
    """Return a row of LaTeX; what begins with ``[`` or ``*`` would be an option of the line break before it."""
    return ("{}" if cells[0].startswith(("[", "*")) else "") + " & ".join(cells) + r" \\"


def one_line(text: str) -> str:
    """Return a text without line breaks, which names of folders may have."""
    return " ".join(text.splitlines())


def plain(text: str) -> str:
    """Return a text as one line that Markdown does not take for HTML."""
    return one_line(text).replace("<", "&lt;")


def escaped(text: str) -> str:
    """Return a text escaped for LaTeX."""
    return re.sub(r"[&%$#_{}\\~^<>|]", lambda found: SPECIAL.get(found[0], f"\\{found[0]}"), text)


def figure(text: str) -> str:
    """Return a cell for LaTeX; a hyphen between two numbers becomes a dash, and one before a number a minus."""
    text = escaped(one_line(text))
    text = re.sub(r"(?<=\d)-(?=\d)", "--", text)
    text = re.sub(r"(\d(?:\.\d+)?)e--?0*(\d+)", r"$\1\\cdot10^{-\2}$", text)
    return re.sub(r"(?<![\w.^{-])-(?=[\d.])", "$-$", text)


def markdown(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], methods: str = "", notes: Sequence[str] = ()
) -> str:
    """Return a Markdown table below its title, followed by how the figures are worked out (`methods`) and `notes`."""
    lines = ["| " + " | ".join(plain(cell).replace("|", r"\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join(
        [f"**{plain(title)}**", "", lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:], ""]
        + [f"{plain(note)}\n" for note in (methods, *notes) if note]
    )
