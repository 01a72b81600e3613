"""Tables for papers: figures have dashes and minus signs, names stay as they are."""

from __future__ import annotations

from lopa_dist.jobs.show.paper_table import latex


def test_names_keep_their_hyphens() -> None:
    rows = [["2026-11-28 a_b", "82.4 (59.0-93.8)"], ["x", "-1.5"]]
    made = latex("gsm8k with Qwen/Qwen2.5-7B", ["run", "accuracy %"], rows)
    assert r"\caption{gsm8k with Qwen/Qwen2.5-7B}" in made
    assert r"2026-11-28 a\_b & 82.4 (59.0--93.8) \\" in made
    assert r"x & $-$1.5 \\" in made


def test_names_are_no_options_of_line_breaks() -> None:
    made = latex("t", ["run", "n"], [["[x]", "1"], ["*y", "2"]])
    assert r"{}[x] & 1 \\" in made
    assert r"{}*y & 2 \\" in made
