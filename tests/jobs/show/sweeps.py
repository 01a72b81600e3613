"""Folders of runs, of which tests of comparisons are made."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.seed_groups import SeedGroup
from tests.pages import Page

RUNS = [(0, 0.9, 2.0, 0.98, 20.0), (3, 0.9, 3.0, 0.96, 40.0), (7, 0.9, 4.0, 0.90, 80.0), (7, 0.7, 3.5, 0.88, 85.0)]


def sweep(folder: Path, report: dict[str, Any], **more: Any) -> Page:
    """A page of four runs that differ in two settings."""
    for branches, tau, tpf, accuracy, rows in RUNS:
        name = folder / f"decode.branches={branches},decode.tau_conf={tau}"
        (name / ".hydra").mkdir(parents=True)
        (name / ".hydra" / "overrides.yaml").write_text(f"- decode.branches={branches}\n- decode.tau_conf={tau}\n")
        decode = report["decode"] | {"branches": branches, "tau_conf": tau}
        figures = {"tpf": tpf, "accuracy": accuracy, "rows_per_token": rows, "requests": 100}
        (name / "report.json").write_text(json.dumps(report | figures | {"decode": decode} | more))
    compare(folder)
    return Page(folder / "comparison.html")


def fronts(page: Page) -> list[bool]:
    """For each point, whether it is on the front."""
    return ["best" in str(attributes.get("class")).split() for tag, attributes in page.tags if tag == "g"]


NONE = Path("no/such/folder")


def named(report: dict[str, Any], *settings: dict[str, Any]) -> list[SeedGroup]:
    """Runs of a sweep with these decode settings."""
    return [
        SeedGroup(
            ",".join(f"decode.{k}={v}" for k, v in of.items()), report | {"decode": report["decode"] | of}, [NONE]
        )
        for of in settings
    ]


def make(folder: Path, name: str, report: dict[str, Any], right: str, **decode: Any) -> None:
    """A run whose answers are right (+) or wrong (-)."""
    (folder / name).mkdir(parents=True)
    figures = {"accuracy": right.count("+") / len(right), "judged": len(right), "requests": len(right)}
    seed = int(name.split("seed=")[1]) if "seed=" in name else 0
    made = report | figures | {"decode": report["decode"] | decode, "seed": seed}
    (folder / name / "report.json").write_text(json.dumps(made))
    lines = [
        {"custom_id": str(i), "index": i, "finish_reason": "stop", "correct": verdict == "+"}
        for i, verdict in enumerate(right)
    ]
    (folder / name / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_stream(folder: Path, report: dict[str, Any], stream: int, seed: int, right: str) -> None:
    """A run at temperature 0.7 on a stream of problems."""
    of_stream = report | {"task": report["task"] | {"problem_seed": stream}, "whole_input": str(stream)}
    make(folder, f"{stream}/seed={seed}", of_stream, right, temperature=0.7)


def table_of(folder: Path, **options: Any) -> tuple[str, list[dict[str, str]]]:
    """What a comparison prints, in one line, and the rows of its file."""
    console = Console(width=250, record=True)
    compare(folder, console, **options)
    with (folder / "comparison.csv").open(newline="") as file:
        return " ".join(console.export_text().split()), list(csv.DictReader(file))


def made_sweep(folder: Path, report: dict[str, Any], count: int) -> list[str]:
    """`count` runs of presets and thresholds, as people type them; returns what they are called."""
    presets = ["decode=verified", "decode=verified_tree", "decode=d2f", "decode=vanilla", "decode=lopa"]
    typed = [[presets[i % 5]] + ([f"decode.tau_conf=0.{90 - 5 * (i // 5)}"] if count > 5 else []) for i in range(count)]
    for i, words in enumerate(typed):
        run_folder = folder / ",".join(words)
        (run_folder / ".hydra").mkdir(parents=True)
        (run_folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in [*words, "seed=0"]))
        decode = report["decode"] | {"drafts": i % 5, "tau_conf": 0.9 - 0.05 * (i // 5), "tau_act": 0.5 + i % 5}
        figures = {
            "tpf": 1 + (i * 7 % 11) / 3,
            "accuracy": 0.98 - (i * 5 % 13) / 90,
            "rows_per_token": 5.0 + i * 3 % 17,
        }
        made = report | figures | {"requests": 300, "judged": 300, "decode": decode}
        (run_folder / "report.json").write_text(json.dumps(made))
    return [", ".join(word.replace("decode.", "") for word in words) for words in typed]
