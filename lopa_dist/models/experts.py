"""Mixture of experts: a feed-forward of many, of which a router chooses some for each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa_dist.kernels.experts import expert_linear, grouped, weighted_sum
from lopa_dist.kernels.rows import swiglu
from lopa_dist.models.config import Experts


class Gate(nn.Module):
    """The router's weights."""

    expert_bias: nn.Parameter | None

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.zeros(experts.count, hidden_size))
        biased = experts.router == "grouped_sigmoid"
        self.expert_bias = nn.Parameter(torch.zeros(experts.count)) if biased else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts that rows ``[R, d]`` choose, ``[R, k]``, and their weights, ``[R, k]`` fp32."""
        return ROUTERS[self.experts.router](x, self)


def softmax(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Return the most probable experts, each with its probability, which may be made to sum to 1 (Qwen3-MoE)."""
    probability = F.linear(x, gate.weight).softmax(-1, dtype=torch.float32)
    weights, chosen = probability.topk(gate.experts.chosen, -1)
    return chosen, weights / weights.sum(-1, keepdim=True) if gate.experts.renormalise else weights


def grouped_sigmoid(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """The experts with the highest scores and biases, in the groups whose best two have most (DeepSeek-V3, LLaDA2).

    An expert's score is the sigmoid of its logit, in fp32. The bias only decides who is chosen, the score alone how
    much an expert weighs.
    """
    experts = gate.experts
    score = F.linear(x.float(), gate.weight.float()).sigmoid()
    assert gate.expert_bias is not None
    rank = (score + gate.expert_bias.float()).unflatten(-1, (experts.groups, -1))  # [R, groups, experts of a group]
    best = rank.topk(2, -1).values.sum(-1).topk(experts.chosen_groups, -1).indices
    open_groups = torch.zeros_like(rank[..., 0], dtype=torch.bool).scatter(-1, best, True)
    chosen = rank.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2).topk(experts.chosen, -1).indices
    weights = score.gather(-1, chosen)
    if experts.renormalise and experts.chosen > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * experts.scale


ROUTERS: dict[str, Callable[[Tensor, Gate], tuple[Tensor, Tensor]]] = {
    "softmax": softmax,
    "grouped_sigmoid": grouped_sigmoid,
}
"""How experts are chosen, by name."""


class SparseMLP(nn.Module):
    """SwiGLU feed-forwards of which each row goes through some; the weights of all are stacked."""

    def __init__(self, hidden_size: int, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.shared_experts = shared  # all rows go through it
        self.gate = Gate(hidden_size, experts)
        self.gate_up = nn.Parameter(torch.zeros(experts.count, 2, experts.size, hidden_size))  # the gates first
        self.down = nn.Parameter(torch.zeros(experts.count, hidden_size, experts.size))
        self.kind = "none"  # of quantisation; else each output channel of each expert has a scale
        self.gate_up_scale: Tensor | None
        self.down_scale: Tensor | None
        self.register_buffer("gate_up_scale", None)  # [E, 2, size]
        self.register_buffer("down_scale", None)  # [E, d]
        self.gather: Callable[[Tensor], Tensor] | None = None  # what tensor ranks have of the last dimension

    def forward(self, x: Tensor) -> Tensor:
        """``[R, d] -> [R, d]``."""
        chosen, weights = self.gate(x)
        groups = grouped(chosen, self.experts.count)
        rows = x.index_select(0, groups.choice // self.experts.chosen)
        scale = None if self.gate_up_scale is None else self.gate_up_scale.flatten(1)
        hidden = swiglu(expert_linear(rows, self.gate_up.flatten(1, 2), groups, scale))
        if self.gather is not None:
            hidden = self.gather(hidden[groups.place.flatten()])[groups.choice]
        out = weighted_sum(expert_linear(hidden, self.down, groups, self.down_scale), groups, weights)
        out = out if self.gather is None else self.gather(out)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def allocate(self, kind: str, dtype: torch.dtype) -> None:
        """Put empty tensors for weights quantised as `kind`, in numbers of `dtype`, in place of the present ones."""
        self.kind = kind
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            setattr(self, name, nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False))
            setattr(self, f"{name}_scale", weight.new_empty(weight.shape[:-1], dtype=torch.float32))

    def split(self, inner: slice, outer: slice, gather: Callable[[Tensor], Tensor]) -> None:
        """Keep a tensor rank's part of every expert: of its inner rows, and of its outputs."""
        self.gate_up = nn.Parameter(self.gate_up[:, :, inner].contiguous(), requires_grad=False)
        self.down = nn.Parameter(self.down[:, outer].contiguous(), requires_grad=False)
        self.gather = gather
