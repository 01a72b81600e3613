"""The first run on a GPU, without one: every stage runs as a toy, and what breaks costs nobody else's facts."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import first_kernels, first_model, first_ranks, first_stages, gpu_first, gpu_shapes
from benchmarks.first_facts import brief, compared, perform
from benchmarks.first_graphs import Graphs
from benchmarks.first_kernels import compiled, tried
from benchmarks.first_model import Forward, against
from benchmarks.first_stages import STAGES
from benchmarks.first_texts import agreement
from benchmarks.gpu_first import Journal, Stage, run
from benchmarks.gpu_shapes import CPU, models
from lopa_dist.engine.static_runner import Body, StaticRunner
from lopa_dist.kernels import rows
from lopa_dist.kernels.attention import Meta
from lopa_dist.kernels.dispatch import KERNELS
from lopa_dist.kernels.preflight import VARIANTS
from lopa_dist.models import quantize
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Transformer

BROKEN = "tests.benchmarks.broken_stages"


def facts(stage: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    perform(STAGES[stage], CPU)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["begun"] for line in lines[::2]] == [line["fact"] for line in lines[1::2]]
    return lines[1::2]


@pytest.mark.parametrize(
    ("stage", "least"),
    [
        ("environment", 3), ("compiled", 1), ("preflight", 1), ("engines", 16), ("kernels", 42), ("graphs", 7),
        ("texts", 4), ("layers", 7), ("ranks", 3), ("sanitizer", 2),
    ],
)  # fmt: skip
def test_a_toy_of_every_stage_finds_all_as_it_should_be(
    stage: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = facts(stage, capsys)
    assert len(found) >= least
    assert all(fact["ok"] for fact in found), [fact for fact in found if not fact["ok"]]


def test_a_toy_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = {fact["fact"]: fact for fact in facts("speed", capsys)}
    assert all(fact["ok"] for fact in found.values())
    steps = [fact for name, fact in found.items() if "sequence" in name]
    assert len(steps) == 8
    assert all(fact["steps"] > 0 and fact["ms a step"] is None for fact in steps)
    assert "aten::" in found["profile"]["table"]


def test_processes_share_the_facts_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Each fact is one process's, but for those that others need."""
    done: list[list[str]] = []
    for number in range(3):
        perform(STAGES["graphs"], CPU, share=(number, 3))
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        done.append([line["fact"] for line in lines if "fact" in line])
    every = [name for name, _ in STAGES["graphs"](CPU)]
    assert sorted(name for names in done for name in names if name != "weights") == sorted(every[1:])
    assert all("weights" in names for names in done)


def test_what_is_compiled_ahead_may_end_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    ended = first_stages.ahead(CPU, {"environment": 1, "no such stage": 1}, 60)["exit statuses"]
    assert ended.pop("environment 0") == 0
    assert ended.pop("no such stage 0") not in (0, None)
    assert not ended
    assert first_stages.ahead(CPU, {"engines": 1}, 0)["exit statuses"] == {"engines 0": None}, "it is not waited for"


def test_the_stages_fit_into_ten_minutes() -> None:
    assert [stage.name for stage in (*gpu_first.STAGES, gpu_first.SANITIZER)] == list(STAGES)
    assert sum(stage.seconds for stage in gpu_first.STAGES) < 600


def test_preflight_tries_all_that_some_model_runs() -> None:
    found = [(kernel, name) for kernel, name, _ in tried(models(CPU)["Dream-7B"], torch.bfloat16)]
    assert len(found) == len(set(found))
    assert {kernel for kernel, _ in found} == set(KERNELS)
    assert {*found} >= {(kernel, name) for name, variant in VARIANTS.items() for kernel in variant.kernels}


def test_wrong_numbers_are_found_and_their_place_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        made = rows.swiglu(gate_up)
        made[4:6, 9] += 3
        return made

    shape = models(CPU)["Dream-7B"]
    assert first_kernels.gate(CPU, shape, 24)["ok"]
    monkeypatch.setattr(first_kernels, "swiglu", wrong)
    found = first_kernels.gate(CPU, shape, 24)
    assert not found["ok"]
    assert found["worst"] in ([4, 9], [5, 9])
    assert (found["wrong rows"], found["wrong columns"]) == ("2: 4-5", "1: 9")


@pytest.mark.parametrize("kernel", ["head", "attention", "product"])
def test_a_kernel_that_is_wrong_in_one_row_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = models(CPU)["Dream-7B"]
    given: dict[str, tuple[str, Any]] = {
        "head": ("record_head", (24, "margin")),
        "attention": ("attend_tiles", (first_kernels.Case(25, 20, 3, tail=30, drafts=3),)),
        "product": ("vgemm", (24, "vgemm", True)),
    }
    name, arguments = given[kernel]
    right = getattr(first_kernels, name)

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        result = right(*args, **options)
        result[2] = result[3]
        return result

    assert getattr(first_kernels, kernel)(CPU, shape, *arguments)["ok"]
    monkeypatch.setattr(first_kernels, name, wrong)
    found = getattr(first_kernels, kernel)(CPU, shape, *arguments)
    assert not found["ok"]
    assert found["wrong rows"].startswith("1: ")


def test_the_first_layer_that_is_wrong_is_named() -> None:
    def forward(*layers: float) -> Forward:
        ones = torch.ones(4, 6)
        return Forward([ones * value for value in layers], torch.arange(4), torch.full((4,), 0.5))

    right = against(lambda: forward(1, 2, 3), lambda: forward(1, 2, 3), 1e-3)
    assert right["ok"]
    found = against(lambda: forward(1, 2.5, 9), lambda: forward(1, 2, 3), 1e-3)
    assert not found["ok"]
    assert found["first wrong layer"] == 1
    assert found["layers"] == [0.0, 0.25, 2.0]
    assert (found["found"], found["wanted"]) == (2.5, 2.0)


def test_a_graph_that_reads_what_it_should_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = Body.run, []

    def races(body: Body, runner: StaticRunner) -> None:
        run(body, runner)
        runs.append(body)
        runner.hidden[0] += len(runs) % 5 == 0

    def reads_pads(body: Body, runner: StaticRunner) -> None:
        run(body, runner)
        runner.hidden[0] += runner.pool.keys[0, runner.pool.scratch + 90].sum()

    made = Graphs(CPU)
    assert made.many(96, 9)["ok"]
    assert made.pads(96)["ok"]
    monkeypatch.setattr(Body, "run", races)
    assert made.many(96, 9)["differ"] in (1, 2)
    monkeypatch.setattr(Body, "run", reads_pads)
    assert made.pads(96) == {"ok": False, "NaN": 64}


def test_on_a_gpu_the_variants_of_kernels_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_triton = pytest.importorskip("lopa_dist.kernels.rows_triton")
    variant = SimpleNamespace(n_regs=40, n_spills=0, metadata=SimpleNamespace(shared=1024, num_warps=4))
    caches = {0: ({"*bf16": variant}, {})}
    monkeypatch.setattr(rows_triton.swiglu_kernel, "device_caches", caches, raising=False)
    assert compiled() == [
        {"kernel": "swiglu_kernel", "registers": 40, "spills": 0, "shared": 1024, "warps": 4, "of": "*bf16"}
    ]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_sanitizers_words_are_kept(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that does as it is told: runs the small kernels, and says whether it saw something."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "at = sys.argv.index(sys.executable)\n"
        f"subprocess.run(sys.argv[at:], check=True) if {not wrong} else print('\"fact\"')\n"
        f"print('========= ERROR SUMMARY: {int(wrong)} errors')\n"
        f"sys.exit({9 * wrong})\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(Path(__file__).parents[2])
    found = dict(STAGES["sanitizer"](CPU))["memcheck"]()
    assert found["ok"] is not wrong
    assert wrong or found["facts"] >= 42
    assert found["said"] == f"========= ERROR SUMMARY: {int(wrong)} errors"


def test_a_rank_that_dies_is_named_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_ranks, "tokens_of", lambda *_: [[1]])
    monkeypatch.setattr(first_ranks, "load_model", lambda *_: None)
    monkeypatch.setattr(first_ranks.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="rank 0: "):
        first_ranks.two_ranks(CPU)


def test_what_no_time_is_left_for_is_said(tmp_path: Path) -> None:
    journal = run([Stage("crash", 60, BROKEN)], tmp_path, toy=True, total=0)
    assert [line["error"] for line in journal.lines] == ["no time left"]
    assert "- crash: the process: no time left" in (tmp_path / "first.md").read_text()


def test_the_page_says_what_was_measured_and_what_is_wrong(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "bench")
    journal.put({"stage": "steps", "fact": "fast", "ok": True, "measured": "ms 3.2"})
    journal.put({"stage": "steps", "fact": "slow", "ok": False, "error": "not x floor <= 1.25", "measured": "ms 9"})
    journal.write_screen()
    wrong, measured = (tmp_path / "bench.md").read_text().split("## Wrong")[1].split("## Measured")
    assert wrong.strip() == "- steps: slow: not x floor <= 1.25"
    assert measured.split("\n") == ["", "", "- fast: ms 3.2", "- slow: ms 9", ""]
    assert len((tmp_path / "bench.jsonl").read_text().splitlines()) == 2


def test_answers_agree_by_position() -> None:
    assert agreement([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 1
    assert agreement([[1, 2, 3], [4]], [[1, 9, 3, 5], [4]]) == 3 / 5


def test_what_is_no_number_is_wrong() -> None:
    x = torch.ones(3, 4)
    spoilt = x.clone()
    spoilt[1, 2] = torch.nan
    assert compared(x, x, 1e-5)["ok"]
    found = compared(spoilt, x, 1e-5)
    assert not found["ok"]
    assert found["worst"] == [1, 2]
    assert brief([*range(0, 40, 2)]).endswith("18, and more")


def test_stages_that_break_leave_their_facts_and_the_others(tmp_path: Path) -> None:
    stages = [Stage(name, 10 if name == "hang" else 60, BROKEN) for name in ("crash", "hang", "memory", "gpu")]
    run(stages, tmp_path, toy=True)
    lines = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    ends = [(line["stage"], line["ended"]) for line in lines if "ended" in line]
    died = ("crash", "died (SIGSEGV)")
    broken = ("gpu", "died (exit status 1)")
    assert ends == [
        died, ("crash", "fine"), ("hang", "time limit"), ("memory", "fine"), broken, ("gpu", "fine"), died, broken
    ], "what dies goes on behind the fact, which is tried again at the end"  # fmt: skip
    found = [(line["stage"], line["fact"], line["ok"], line["blocking"]) for line in lines if "fact" in line]
    assert found == [
        ("crash", "weights", True, False),
        ("crash", "before", True, False),
        ("crash", "weights", True, False),
        ("crash", "after", True, False),
        ("hang", "before", True, False),
        ("memory", "too large", False, False),
        ("memory", "after", True, False),
        ("gpu", "bad access", False, False),
        ("gpu", "after", True, False),
        ("crash", "weights", True, True),
        ("gpu", "bad access", False, True),
    ]
    errors = (tmp_path / "first-errors.txt").read_text()
    for title, place in (
        ("## crash: died (SIGSEGV) in illegal access\n", "in illegal_access"),
        ("## crash: died (SIGSEGV) in illegal access, with blocking launches\n", "in illegal_access"),
        ("## hang: time limit in endless\n", "in endless"),
        ("## memory: too large\n", "broken_stages.py"),
    ):
        assert place in errors.split(title)[1].split("\n## ")[0], errors
    screen = (tmp_path / "first.md").read_text()
    assert "- crash: the process: died (SIGSEGV) in illegal access" in screen
    assert "- memory: fine, 2 facts, 1 wrong" in screen


@pytest.mark.parametrize("ok", [True, False])
def test_the_commands_status_says_what_was_found(ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(stages: list[Stage], folder: Path, toy: bool, name: str) -> Journal:
        assert [stage.name for stage in stages] == ["texts"]
        assert toy
        return Journal(folder, name, [{"stage": "texts", "fact": "bf16", "ok": ok}])

    monkeypatch.setattr(gpu_first, "run", ran)
    monkeypatch.setattr(gpu_first, "MODULE", "json")  # imported once before the stages, which takes seconds
    with pytest.raises(SystemExit) as left:
        gpu_first.main(["--out", str(tmp_path), "--toy", "--stage", "texts"])
    assert bool(left.value.code) is not ok


@pytest.mark.parametrize("faulty", [None, 20])
def test_right_layers_in_bf16_are_no_alarm_and_wrong_ones_are(
    faulty: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dream's depth and gains: rounding alone takes two right ways further apart than a fixed bound."""
    shape = replace(
        gpu_shapes.DREAM, hidden_size=512, intermediate_size=2048, heads=4, kv_heads=1, vocab_size=2048, mask_id=2047,
        eos_ids=(2046,), pad_id=2046,
    )  # fmt: skip

    def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
        model = Transformer(config).to(dtype)
        for name, weight in model.named_parameters():
            weight.data.fill_(1) if "norm" in name else weight.data.normal_(0, 0.053)
        return model.requires_grad_(False).eval()

    attend = first_model.Watched.attend

    def attended(self: Any, *given: Any) -> torch.Tensor:
        result = attend(self, *given)
        if faulty is not None and len(self.results) == 1 + faulty and isinstance(self.kernel, Meta):
            self.results[-1][3] *= -1  # one row of a tile
        return result

    # weights by row, since torch multiplies bf16 by columns at a twentieth of the speed on CPUs with AVX2 alone
    monkeypatch.setattr(quantize, "suits_c", lambda weight: False)
    monkeypatch.setattr(gpu_shapes, "random_model", random_model)
    monkeypatch.setattr(first_model, "models", lambda device: {"Dream-7B": shape})
    monkeypatch.setattr(first_model, "dtype_of", lambda device: torch.bfloat16)
    monkeypatch.setattr(first_model, "ROWS", {"Dream-7B": (20,)})
    monkeypatch.setattr(first_model.Watched, "attend", attended)
    torch.manual_seed(0)
    with torch.inference_mode():
        found = {name: function() for name, function in first_model.layers(CPU)}
    [torch_form, theirs] = [found[f"Dream-7B, 20 rows, against {other}"] for other in ("torch", "transformers")]
    assert max(torch_form["layers"]) > first_model.BOUND[torch.bfloat16]
    for one in (torch_form, theirs):
        assert one["ok"] == (faulty is None), one
        assert one.get("first wrong layer") == faulty
