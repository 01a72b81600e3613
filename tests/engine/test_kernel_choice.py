"""`engine.kernels`: what is checked, what a kernel that fails costs, and what cannot be had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import first_engines
from benchmarks.gpu_shapes import DREAM
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine import kernel_choice, runner, runners
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kernel_choice import needed, plain_kernels
from lopa_dist.engine.likelihood import Scorer
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Given, Likelihood, Request
from lopa_dist.engine.scoring import ScoringEngine
from lopa_dist.kernels import dispatch
from lopa_dist.kernels.attention import Grouped, suited
from lopa_dist.kernels.dispatch import KERNELS, fused
from lopa_dist.kernels.preflight import Fault, Widths
from lopa_dist.models.config import Experts
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
REQUEST = Request(0, [1, 2, 3], 32, 7)
FAULT = Fault("there is no C compiler", "install gcc")


def test_sums_are_never_rounded_to_the_products_precision(small_model: Transformer) -> None:
    """The library's split of a long sum follows the shape, and so bits would follow the batch."""
    flags = torch.backends.cuda.matmul
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = True
    runners.Runners(small_model, DecodeConfig(), EngineConfig())
    assert not flags.allow_bf16_reduced_precision_reduction
    assert not flags.allow_fp16_reduced_precision_reduction


def test_what_is_needed_follows_model_and_options(small_model: Transformer) -> None:
    assert needed(small_model, EngineConfig(), 16) == ("attention", "rotation", "norm", "swiglu", "head")
    assert needed(small_model, EngineConfig(reproducible=True), None) == (
        "rotation",
        "norm",
        "swiglu",
        "head",
        "vgemm",
    )


def test_on_a_gpu_what_fails_runs_in_torchs_form(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(kernel_choice, "refused", lambda *given: asked.append(given) or frozenset({"norm"}))
    assert plain_kernels(small_model, EngineConfig(), GPU, 16) == {"norm"}
    [(widths, dtype, device, wanted)] = asked
    assert widths == Widths(32, 48, 4, 2, 8, 16)
    assert (dtype, device) == (torch.float32, GPU)
    assert "vgemm" not in wanted
    plain_kernels(small_model, EngineConfig(reproducible=True), GPU, 16, 1, True)
    assert asked[1][0] == widths._replace(bounded=True, whole=False)


@pytest.mark.parametrize(("kernels", "ranks", "why"), [("triton", 1, r"engine\.kernels=triton"), ("auto", 2, "ranks")])
def test_where_nothing_else_will_do_a_fault_ends_it(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, kernels: str, ranks: int, why: str
) -> None:
    monkeypatch.setattr(kernel_choice, "faults", lambda *_: {"head": FAULT})
    with pytest.raises(ValueError, match=why + r".*head: there is no C compiler: install gcc; engine\.kernels=torch"):
        plain_kernels(small_model, EngineConfig(kernels=kernels), GPU, 16, ranks)
    monkeypatch.setattr(kernel_choice, "faults", lambda *_: {})
    assert plain_kernels(small_model, EngineConfig(kernels=kernels), GPU, 16, ranks) == frozenset()


def test_what_cannot_go_together_is_refused(small_model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"engine\.kernels=triton: .* on a cpu; leave it at auto"):
        plain_kernels(small_model, EngineConfig(kernels="triton"), CPU, None)
    with pytest.raises(ValueError, match=r"engine\.kernels=torch: engine\.attention=meta"):
        plain_kernels(small_model, EngineConfig(kernels="torch", attention="meta"), GPU, 16)
    with pytest.raises(ValueError, match=r"engine\.graphs=always.*engine\.kernels"):
        Engine(small_model, DecodeConfig(), Solo(), EngineConfig(kernels="torch", attention="meta", graphs="always"))


def test_torch_leaves_attention_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_dist.kernels.attention.TRITON", True)
    assert suited(GPU, 128) == "meta"
    assert suited(GPU, 128, "torch") == "torch"


@pytest.mark.parametrize(
    ("plain", "static"),
    [(("norm", "swiglu", "head"), True), (("rotation",), False), (("vgemm",), False), (tuple(KERNELS), False)],
    ids=str,
)
def test_graphs_are_given_up_only_where_a_form_waits_for_the_device(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, plain: tuple[str, ...], static: bool
) -> None:
    monkeypatch.setattr(runners, "plain_kernels", lambda *_: frozenset(plain))
    options = EngineConfig(attention="meta", graphs="always")
    with contextlib.nullcontext() if static else pytest.raises(ValueError, match=r"engine\.graphs=always"):
        assert Engine(small_model, DecodeConfig(), Solo(), options).runners.static


def test_experts_in_torchs_form_have_no_graph_where_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A100, L40S and 4090: torch's grouped product asks for every group's size, which a capture must not."""
    shape = replace(
        DREAM, vocab_size=32, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=16
    )
    model = Transformer(replace(shape, experts=Experts(4, 2, 16, "softmax", True))).bfloat16()
    waits = {}
    for capability in ((8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        waits[capability] = kernel_choice.without_graphs(model, frozenset({"experts"}), GPU)
        assert not kernel_choice.without_graphs(model, frozenset(), GPU)
        assert "experts" in needed(model, EngineConfig(), 16), "routing, wherever the products are"
        monkeypatch.setattr(kernel_choice, "refused", lambda *given: frozenset(map(str, given[0].experts)))
        assert bool(plain_kernels(model, EngineConfig(), GPU, 16)) == waits[capability], (
            "what preflight multiplies with"
        )
    assert waits == {(8, 0): True, (8, 9): True, (9, 0): False}


def test_a_mixture_in_bf16_runs_over_fixed_buffers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked what its library can do: where there is none, that is an error."""

    def ask(device: torch.device) -> tuple[int, int]:
        raise AssertionError(f"{device} is no GPU")

    monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
    model = first_engines.model_of("router of softmax", CPU, torch.bfloat16)
    engine = Engine(model, first_engines.BLOCKS, Solo(), EngineConfig(1, attention="meta", graphs="always"))
    assert engine.runners.static


def test_a_mixture_on_a_gpu_is_not_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library chooses its tiles by the number of rows, as for the router; weights on a GPU that is not there."""
    monkeypatch.setattr(runners, "plain_kernels", lambda *_: frozenset())
    with torch.device("meta"):
        model = Transformer(first_engines.MODELS["router of softmax"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cuda").requires_grad_(False)
        with pytest.raises(ValueError, match=r"engine\.reproducible=true .* mixture of experts on a GPU.*router"):
            runners.Runners(model, first_engines.BLOCKS, EngineConfig(reproducible=True))
        assert runners.Runners(model, first_engines.BLOCKS, EngineConfig()).static


def test_every_forward_runs_the_chosen_forms(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    during = []

    @contextlib.contextmanager
    def noted(kernels: frozenset[str]) -> Iterator[None]:
        during.append(kernels)
        yield

    monkeypatch.setattr(runner, "by_torch", noted)
    monkeypatch.setattr(runners, "plain_kernels", lambda *_: frozenset({"norm"}))
    for options in (EngineConfig(), EngineConfig(attention="meta", graphs="always")):
        engine = Engine(small_model, DecodeConfig(max_new_tokens=32), Solo(), options)
        list(engine.generate([REQUEST]))
        assert set(during) == {frozenset({"norm"})}
        during.clear()


def test_texts_are_scored_by_the_chosen_forms(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails, or that `engine.kernels=torch` excludes, would be launched there."""
    found = []

    def score(scorer: Scorer, given: Sequence[Given]) -> list[Likelihood]:
        found.append([fused(OnGpu(), kernel) for kernel in KERNELS])
        return [Likelihood(-1.0, 0.0, True, 1)] * len(given)

    class OnGpu:
        is_cuda, requires_grad = True, False

    monkeypatch.setattr(Scorer, "score", score)
    monkeypatch.setattr(dispatch, "TRITON", True)
    monkeypatch.setattr(runners, "plain_kernels", lambda *_: frozenset({"norm", "experts"}))
    engine = ScoringEngine(small_model, DecodeConfig(), EngineConfig(), masks=1)
    request = replace(REQUEST, scored=((Given([1, 2], [3], 0),),))
    assert [generation.finish_reason for generation in engine.generate([request])] == ["scored"]
    assert found == [[kernel not in ("norm", "experts") for kernel in KERNELS]]


def test_the_texts_are_those_of_auto(small_model: Transformer) -> None:
    texts = []
    for kernels in ("auto", "torch"):
        engine = Engine(small_model, DecodeConfig(max_new_tokens=32), Solo(), EngineConfig(kernels=kernels))
        assert kernels == "auto" or isinstance(engine.runners.attention, Grouped)
        [made] = engine.generate([REQUEST])
        texts.append(made.tokens)
    assert texts[0] == texts[1]
