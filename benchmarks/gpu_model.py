"""The parts of `gpu_step` that run a whole model: forwards, steps of the engine, and transformers beside them.

- step: the forward alone, as the two CUDA graphs of the static runner (transformer and record head).
  Attention, linears and head are graphs of their own over all layers; rest is what the forward takes more than these:
  embedding, norms, rotation, gates, and the gaps between kernels.
- whole: steps of the engine as a job runs them, one sequence: layout, forward, verify, advance, spawn, the copy to
  the host and commit, from one step's end to the next one's. What they take more than the forward is the host's time
  that the GPU waits for, and the kernels of decoding. With random weights nothing passes a threshold: a step fills the
  best position, and one of lookahead. So blocks pass from all masked to none, half of it on average, as in the
  forwards. A branch has no row but its window's, again as in these (context=d2f computes one
  more).
- eager: ours is the static runner's forward with all that the host prepares for it (tiles of attention, buffers): from
  tokens on the device to records. Theirs is transformers' Qwen2 on the same weights, from the same tokens to the same
  records (token, probability, entropy) of the same positions: branches are batch rows with a prefix of their own, all
  rows see each other, and there is no mask, so torch takes its FlashAttention with grouped heads. Neither decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench, Row
from benchmarks.roofline import BF16, FP8, MODELS, Bar, Case, halved, ratio, step_bar, work
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.buckets import bucket
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.engine.runners import FUSED, Runners
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.rows.forward_batch import ForwardBatch, Predictions

PARTS = ("step", "whole", "eager")
PREFIXES, WINDOWS, BRANCHES = (256, 1024, 2048), (32, 64, 96), (1, 2, 4, 8)
COLUMNS = ("ms", "floor ms", "x floor", "TB/s", "TFLOP/s", "attention", "linears", "head", "rest")
CASES = [Case(p, w, b) for p in PREFIXES for w in WINDOWS for b in BRANCHES]
STEPS = [(model, precision, case) for model in MODELS for precision in (BF16, FP8) for case in CASES]
WHOLE = [(precision, Case(1024, w, b)) for precision in (BF16, FP8) for w, b in ((32, 1), (64, 1), (96, 1), (64, 8))]
EAGER = [Case(1024, 32, 1), Case(1024, 96, 1), Case(1024, 64, 8)]
ENGINES = "Dream-7B"  # the model of WHOLE and EAGER
ALWAYS = EngineConfig(1, attention="meta", graphs="always")
BLOCKS = 2  # that the engine's steps fill: those of the first one warm up

Tables = dict[str, list[Row]]


def run(bench: Bench, name: str, tables: Tables, bars: bool = True) -> None:
    """What needs one model and has a bar, with steps of the engine; or else its other forwards."""
    if not set(PARTS if bars else ("step",)) & set(tables) or bench.deadline.over():
        return
    model = random_model(bench.shape(MODELS[name]), bench.device)
    forwards(bench, model, name, BF16, tables, bars)
    if bars and name == ENGINES:
        eager_part(bench, model, tables)
        whole_part(bench, model, BF16, tables)
    if bars and {"step", "whole"} & set(tables):
        FUSED.pop(model, None)
        quantize(model, "fp8")
        forwards(bench, model, name, FP8, tables, bars)
        if name == ENGINES:
            whole_part(bench, model, FP8, tables)
    FUSED.pop(model, None)
    del model
    bench.free()


def step_row(tables: Tables, name: str, precision: str, case: Case) -> Row:
    """A forward's row."""
    return tables["step"][STEPS.index((name, precision, case))]


def random_model(config: ModelConfig, device: torch.device) -> Transformer:
    """A model of bf16 noise, made where it is to be."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1) if "norm" in name else parameter.data.normal_(0, 0.02)
    return model.requires_grad_(False).eval()


# step


def step_rows() -> list[Row]:
    """Every step."""
    rows = []
    for model, precision, case in STEPS:
        bar = step_bar(precision, case)
        name = f"{model} {precision}, prefix {case.prefix}, {case.branches} x {case.window} rows"
        figures = (*COLUMNS, "halved floor ms", "x halved floor") if precision == FP8 else COLUMNS
        rows.append(Row("step", name, dict.fromkeys(figures), [] if bar is None else [bar]))
    return rows


def importance(case: Case) -> tuple[bool, bool]:
    """Sorts steps: those with a bar in bf16 first, and the usual prefix."""
    return step_bar(BF16, case) is None, case.prefix != 1024


def toy_case(case: Case) -> Case:
    """A step for a toy model."""
    return Case(case.prefix // 16, case.window // 8, case.branches)


def decoding(case: Case) -> DecodeConfig:
    """How a case is decoded: one block of its window at a time."""
    return DecodeConfig(
        verify="confidence", drafts=0, branches=case.branches - 1,
        block_size=case.window, max_active_blocks=1, max_new_tokens=BLOCKS * case.window,
        stop_at_eos=False,
    )  # fmt: skip


def windows(count: int, window: int, prefix: int, mask_id: int, device: torch.device) -> ForwardBatch:
    """A batch of `count` windows of one sequence on `prefix` cached tokens, of which every other position is masked."""
    numbers, total = np.arange(count), count * window
    rows = np.full(count, window)
    head = torch.arange(0, total, 2, device=device)
    return ForwardBatch(
        sequence=0 * numbers, branch=numbers, start=numbers * window, rows=rows,
        shared=np.full(count, prefix), first=np.zeros(count, int),
        hi=np.full(total, window), depth=np.zeros(total, int), tail=None, begin=rows * 0, stop=rows, prefill=None,
        tokens=torch.full((total,), mask_id, device=device),
        positions=prefix + torch.arange(window, device=device).repeat(count),
        head_slots=torch.arange(len(head), device=device),
        head_sequence=np.zeros(len(head), int), predict=lambda: Predictions(head, None, head), local_branches=1,
        columns=len(head),
        width=window, of_commit=None, drafts=None,
    )  # fmt: skip


def prepare(bench: Bench, model: Transformer, case: Case) -> tuple[StaticRunner, ForwardBatch]:
    """A static runner over a pool of noise, and a batch of branches of one sequence."""
    pool = KVPool(model.config, 1, case.prefix, torch.bfloat16, bench.device)
    pool.allocate(0, case.prefix)
    pool.reserve(bucket(case.rows) or case.rows)
    pool.keys.normal_()
    pool.values.normal_()
    runners = Runners(model, decoding(case), ALWAYS)
    runner = runners.make(pool, Sampling(), 1, case.prefix)
    assert isinstance(runner, StaticRunner)
    return runner, windows(case.branches, case.window, case.prefix, model.config.mask_id, bench.device)


def forwards(bench: Bench, model: Transformer, name: str, precision: str, tables: Tables, bars: bool) -> None:
    """A model's forwards that have a bar, or those that have none."""
    if "step" not in tables:
        return
    for case in sorted(CASES, key=importance):
        if (step_bar(precision, case) is not None) == bars:
            row = step_row(tables, name, precision, case)
            bench.fill(row, partial(measure_step, bench, model, MODELS[name], precision, case))


def measure_step(bench: Bench, model: Transformer, config: ModelConfig, precision: str, case: Case, row: Row) -> None:
    """One forward and its parts."""
    needed = work(config, precision, case)
    runner, batch = prepare(bench, model, toy_case(case) if bench.toy else case)
    with torch.inference_mode():
        runner.forward(runner.prepare(batch))
        size = bucket(len(batch.tokens)) or 0
        body, head = runner.bodies[size], runner.heads[bucket(len(batch.head_slots)) or 0]
        body_replay = partial(body.replay, partial(body.run, runner), bench.device, runner.memory)
        head_replay = partial(head.replay, partial(head.run, runner), bench.device, runner.memory)

        def whole() -> None:
            body_replay()
            head_replay()

        network, pool = runner.network, runner.pool
        shape = model.config
        made = torch.empty(size, shape.hidden_size, dtype=torch.bfloat16, device=bench.device).normal_()
        between = made.new_empty(size, shape.intermediate_size).normal_()
        q = made.new_empty(size, shape.heads, shape.head_dim).normal_()

        def attention() -> None:
            for number in range(shape.layers):  # in place, as the runner does
                attend_tiles(q, pool.keys[number], pool.values[number], body.plan, q)

        def linears() -> None:
            for layer in network.layers:
                network.project(layer.qkv, made, body.rows)
                network.project(layer.out, q.flatten(1), body.rows)
                network.project(layer.gate_up, made, body.rows)
                network.project(layer.down, between, body.rows)

        spent = bench.replays(whole)
        parts = {
            "attention": bench.graph(attention),
            "linears": bench.graph(linears),
            "head": bench.replays(head_replay),
        }
    floor = None if bench.machine is None else 1e3 * needed.floor(bench.machine, precision)
    row.figures |= parts
    row.figures |= {
        "ms": spent,
        "floor ms": floor,
        "x floor": ratio(spent, floor),
        "TB/s": ratio(needed.bytes / 1e9, spent),
        "TFLOP/s": ratio(needed.flops / 1e9, spent),
        "rest": None if spent is None else spent - sum(t for t in parts.values() if t is not None),
    }
    if precision == FP8:
        half = None if bench.machine is None else 1e3 * halved(config, case).floor(bench.machine, precision)
        row.figures |= {"halved floor ms": half, "x halved floor": ratio(spent, half)}


# whole


def whole_rows() -> list[Row]:
    """Steps of the engine."""
    names = ("ms", "forward ms", "x forward")
    return [
        Row("whole", f"{ENGINES} {p}, prefix {c.prefix}, {c.branches} x {c.window} rows, engine", dict.fromkeys(names))
        for p, c in WHOLE
    ]


def whole_part(bench: Bench, model: Transformer, precision: str, tables: Tables) -> None:
    """Steps of one precision."""
    for (found, case), row in zip(WHOLE, tables.get("whole", []), strict=False):
        if found == precision:
            forward = step_row(tables, ENGINES, precision, case).figures["ms"] if "step" in tables else None
            bench.fill(row, partial(measure_whole, bench, model, case, forward))


def measure_whole(bench: Bench, model: Transformer, case: Case, forward: float | None, row: Row) -> None:
    """Steps of one sequence whose last block sees the case's prefix; `forward` milliseconds each is known to take."""
    case = toy_case(case) if bench.toy else case
    config = decoding(case)
    engine = Engine(model, config, Solo(), ALWAYS)
    prompt = torch.randint(model.config.mask_id, (case.prefix - (BLOCKS - 1) * case.window,)).tolist()
    request = Request(0, prompt, config.max_new_tokens, 0)

    def steps(mark: Callable[[], None]) -> None:
        engine.on_step = [lambda engine: mark()]
        list(engine.generate([request]))

    spent = bench.laps(steps)
    row.figures |= {"ms": spent, "forward ms": forward, "x forward": ratio(spent, forward)}


# eager


def eager_rows() -> list[Row]:
    """Steps that transformers takes, too."""
    names = ("ms", "eager ms", "x eager")
    return [
        Row(
            "eager", f"{ENGINES} bf16, prefix {c.prefix}, {c.branches} x {c.window} rows, host included",
            dict.fromkeys(names), [Bar("x eager", 4, False)],
        )
        for c in EAGER
    ]  # fmt: skip


def eager_part(bench: Bench, model: Transformer, tables: Tables) -> None:
    """Both, one after the other, on the same weights."""
    made: list[Any] = []

    def measure(case: Case, row: Row) -> None:
        if not made:
            made.append(qwen2(model, bench.device))
        case = toy_case(case) if bench.toy else case
        runner, batch = prepare(bench, model, case)
        with torch.inference_mode():
            ours = bench.wall(lambda: runner.forward(runner.prepare(batch)))
            theirs = bench.wall(eager_step(made[0], model.config, case, bench.device))
        row.figures |= {"ms": ours, "eager ms": theirs, "x eager": ratio(theirs, ours)}

    for row, case in zip(tables.get("eager", []), EAGER, strict=False):
        bench.fill(row, partial(measure, case))


def qwen2(model: Transformer, device: torch.device) -> Any:
    """Qwen2 of transformers with a model's weights, in the same memory; its rows see all others."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    shape = model.config
    config = Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, rms_norm_eps=shape.rms_eps, rope_theta=shape.rope_theta, tie_word_embeddings=False,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        made = Qwen2ForCausalLM(config).to(torch.bfloat16)
    made.load_state_dict(model.state_dict(), assign=True)
    made.model.rotary_emb = Qwen2RotaryEmbedding(config=config).to(device)
    for layer in made.model.layers:
        layer.self_attn.is_causal = False
    return made.requires_grad_(False).eval()


def eager_step(model: Any, shape: ModelConfig, case: Case, device: torch.device) -> Callable[[], object]:
    """A step as plain code takes it: branches as batch rows, logits of every other position, their records."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(shape.layers):
        k, v = (
            torch.empty(case.branches, shape.kv_heads, case.prefix, shape.head_dim, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        )
        cache.update(k.normal_(), v.normal_(), layer)
    tokens = torch.full((case.branches, case.window), shape.mask_id, device=device)
    positions = (case.prefix + torch.arange(case.window, device=device)).expand(case.branches, -1)
    wanted = torch.arange(0, case.window, 2, device=device)

    def run() -> Tensor:
        found = model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=wanted,
            attention_mask={"full_attention": None},  # none is made: a mask keeps torch from FlashAttention
        )  # fmt: skip
        cache.crop(-case.window)
        probabilities = found.logits.float().softmax(-1)
        confidence, token = probabilities.max(-1)
        entropy = (probabilities * (probabilities + 1e-10).log()).sum(-1)
        return torch.stack([token.float(), confidence, entropy])

    return run
