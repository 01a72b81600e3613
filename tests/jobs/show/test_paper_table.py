"""Tables for papers: figures have dashes and minus signs, names stay as they are, and all of it fits on a page."""

from __future__ import annotations

from lopa_dist.jobs.show.paper_table import latex, markdown


def test_names_keep_their_hyphens() -> None:
    rows = [["2026-11-28 a_b", "82.4 (59.0-93.8)"], ["x", "-1.5"]]
    made = latex("gsm8k with Qwen/Qwen2.5-7B", ["run", "accuracy %"], rows)
    assert r"\caption{gsm8k with Qwen/Qwen2.5-7B}" in made
    assert r"2026-11-28 a\_b & 82.4 (59.0--93.8) \\" in made
    assert r"x & $-$1.5 \\" in made


def test_names_with_signs_are_printed_as_they_are() -> None:
    """LaTeX's usual fonts have other characters in the places of these, and Markdown takes HTML for what it is."""
    title, rows = "a <b> | c", [["x<i>|", "1"]]
    made = latex(title, ["run", "n"], rows)
    assert r"\caption{a \textless{}b\textgreater{} \textbar{} c}" in made
    assert r"x\textless{}i\textgreater{}\textbar{} & 1 \\" in made
    made = markdown(title, ["run", "n"], rows)
    assert "**a &lt;b> | c**" in made
    assert r"| x&lt;i>\| | 1 |" in made


def test_names_are_no_options_of_line_breaks() -> None:
    made = latex("t", ["run", "n"], [["[x]", "1"], ["*y", "2"]])
    assert r"{}[x] & 1 \\" in made
    assert r"{}*y & 2 \\" in made
    assert made.startswith("% \\usepackage{booktabs}\n\\begin{table}\n")


def test_long_tables_are_several_and_wide_ones_are_scaled() -> None:
    rows = [[f"run {number}", "1"] for number in range(85)]
    made = latex("t", ["run", "n"], rows)
    assert made.count(r"\begin{table}") == made.count(r"\end{table}") == made.count(r"run & n \\") == 3
    assert [rf"\caption{{t (Part {part} of 3)}}" in made for part in (1, 2, 3)] == [True] * 3
    assert all(rf"run {number} & 1 \\" in made for number in range(85))
    made = latex("t", ["run", "n"], [["r" * 90, "1"]])
    assert made.startswith("% \\usepackage{booktabs, graphicx}")
    assert "\\resizebox{\\textwidth}{!}{%\n\\begin{tabular}{lr}" in made
    assert "\\end{tabular}}\n\\end{table}" in made
