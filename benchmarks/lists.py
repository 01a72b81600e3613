"""Measure the list model's accuracy, tokens per forward and rows per token, by family, with every kind of decoding.

    python -m benchmarks.lists                                  # 800 held-out problems per setting
    python -m benchmarks.lists --model outputs/lists/checkpoint --problems 80 --only plain
    python -m benchmarks.lists --model causal_lists             # lossless lookahead
    python -m benchmarks.lists --seed 2                         # the final test
    python -m benchmarks.lists --problems 3200 --items 61       # the longest lists: answers of 4 to 8 blocks

The families run one after the other. Each setting is compared with plain decoding at the `tau_conf` that gives as many
tokens per forward, because a setting that fills more tokens at a time must do better than a lower threshold does. A
causal model (`--model causal_lists`) writes the same text with any lookahead; its table says how many answers are equal
to those written one token at a time.

The results are kept in benchmarks/results/lists.json or causal_lists.json as long as the model's weights stay the same;
only missing ones are measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from zlib import crc32

import numpy as np

from benchmarks.answers import COLUMNS, PUBLISHED, answer, load
from benchmarks.embedded import LEFT_TO_RIGHT, Setting, drafted
from benchmarks.results import Result, measured, show
from lopa_dist.decode import DecodeConfig
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import find
from lopa_dist.tasks.embedded import Lists
from lopa_dist.tasks.list_problems import BLANK, FAMILIES
from lopa_dist.tasks.task import Item

BASE: Setting = {"block_size": 16, "max_new_tokens": 144, "branches": 0}  # every setting extends `PUBLISHED` and this
PLAIN: dict[str, Setting] = {
    "plain": {},
    **{f"plain, tau_conf {tau}": {"tau_conf": tau} for tau in (0.95, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)},
}
SETTINGS: dict[str, Setting] = {
    "left to right": LEFT_TO_RIGHT,
    **PLAIN,
    "control +1": {"extra_fill": 1},
    "control +2": {"extra_fill": 2},
    "LoPA, k = 7": {"branches": 7},
    "verified, 10 drafts": drafted(0, 10),
    "verified, tree of 8": drafted(7, 10),
    "verified, k = 3, 2 drafts above 0.5": drafted(3, 2, tau_look=0.5),
    "verified, 7 branches above 0.5": drafted(7, 1, tau_look=0.5),
}
ONE = "one token at a time"
LOSSLESS: dict[str, Setting] = {
    name: {"context": "causal", "verify": "agreement", "drafts": drafts, "draft_from": source}
    for name, drafts, source in (
        (ONE, 0, "auto"),
        ("8 drafts of masks", 8, "masks"),
        ("8 drafts of text", 8, "text"),
        ("8 drafts of masks and text", 8, "auto"),
        ("16 drafts of masks and text", 16, "auto"),
        ("drafts=auto", "auto", "auto"),
    )
}


@dataclass(frozen=True)
class Job:
    """One measurement. If `items` is not 0, its problems are only lists with at least this many items."""

    path: str
    name: str
    problems: int
    seed: int
    block_size: int
    items: int

    @property
    def setting(self) -> Setting:
        """All options of decoding that differ from `PUBLISHED`."""
        return {**BASE, **(SETTINGS | LOSSLESS)[self.name], "block_size": self.block_size}

    @property
    def key(self) -> str:
        """What identifies the job's result among those of the same weights."""
        lists = [self.problems, self.seed, *([self.items] if self.items else [])]
        return json.dumps([self.setting, *lists], sort_keys=True)

    def takes(self, item: Item) -> bool:
        """Return whether a problem is part of the job; with `items` set, Latin squares are not."""
        _, _, question = item.reference[0].partition(" : ")
        return not self.items or (BLANK not in question and len(question.split()) >= self.items)


def work(job: Job) -> Result:
    """Measure one setting in this process, on one thread, and return the figures of each family."""
    builder = load(job.path) if job.name in LOSSLESS else load(job.path, pattern="d2f")
    config = DecodeConfig(**{**PUBLISHED, **job.setting})
    task = Lists(job.problems, "held_out", job.seed)
    families = {}
    for family in FAMILIES:
        if items := [item for item in task.items() if job.takes(item) and item.custom_id.endswith(f"-{family}")]:
            answers = answer(builder, config, task, items, 32)
            families[family] = dict(answers.figures)
            if job.name in LOSSLESS:
                families[family]["answers"] = [crc32(json.dumps(tokens).encode()) for tokens in answers.tokens]
    return {name: value for name, value in asdict(job).items() if name != "path"} | {"families": families}


def mean(families: Result, figure: str) -> float:
    """Return the mean of a figure over the families, each of which counts the same."""
    return sum(found[figure] for found in families.values()) / len(families)


def means(results: dict[str, Result]) -> list[Result]:
    """Return a row for each setting: means over the families, and the accuracy compared with plain decoding.

    The comparison, in points, is with plain decoding that has as many tokens per forward, by interpolation.
    """
    rows: list[Result] = [
        {"name": name, **{figure: mean(families, figure) for figure in ("accuracy", "tpf", "rows_per_token")}}
        for name, families in results.items()
    ]
    speeds, accuracies = np.array(sorted((row["tpf"], row["accuracy"]) for row in rows if row["name"] in PLAIN)).T
    for row in rows:
        if speeds[0] <= row["tpf"] <= speeds[-1]:
            row["above"] = f"{100 * (row['accuracy'] - float(np.interp(row['tpf'], speeds, accuracies))):+.1f}"
    return rows


def lossless(results: dict[str, Result]) -> list[Result]:
    """Return a row for each setting: means over the families, and the number of answers equal to those of `ONE`."""

    def answers(name: str) -> list[int]:
        return [number for found in results[name].values() for number in found["answers"]]

    rows = []
    for name, families in results.items():
        equal = sum(one == other for one, other in zip(answers(name), answers(ONE), strict=True))
        figures = {figure: mean(families, figure) for figure in ("accuracy", "tpf", "rows_per_token")}
        rows.append({"name": name, **figures, "equal": f"{equal} of {len(answers(ONE))}"})
    return rows


def main() -> None:
    """Measure what is missing in the file, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lists", help="lists, causal_lists, or a checkpoint folder")
    parser.add_argument("--problems", type=int, default=800)
    parser.add_argument("--seed", type=int, default=1, help="2 is the final test")
    parser.add_argument("--items", type=int, default=0, help="only lists of at least this many")
    parser.add_argument("--block-size", type=int, default=BASE["block_size"])
    parser.add_argument(
        "--only",
        choices=[*SETTINGS, *LOSSLESS],
        action="append",
        help="one setting beside plain decoding, or beside one token at a time; may be repeated",
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    folder = find(options.model, "--model")
    causal = read_config(folder).family == "lopa_causal"
    settings, always = (LOSSLESS, [ONE]) if causal else (SETTINGS, PLAIN)
    names = [name for name in settings if name in always or not options.only or name in options.only]
    asked = options.problems, options.seed, options.block_size, options.items
    jobs = {job.key: job for job in (Job(options.model, name, *asked) for name in names)}
    found = measured("causal_lists" if causal else "lists", folder, jobs, work, options.processes)
    results = {job.name: found[key]["families"] for key, job in jobs.items()}
    last = {"answers of one token at a time": "{equal}"} if causal else {"points above plain": "{above}"}
    columns = {"decoding": "{name}", **COLUMNS, **last}
    del columns["tokens/s"]
    show("means", (lossless if causal else means)(results), columns)
    for figure, form in (("accuracy", ".1%"), ("tpf", ".2f"), ("rows_per_token", ".1f")):
        rows = [
            {"decoding": name}
            | {family: format(found[figure], form) for family, found in families.items()}
            | {"mean": format(mean(families, figure), form)}
            for name, families in results.items()
        ]
        show(figure, rows)


if __name__ == "__main__":
    main()
