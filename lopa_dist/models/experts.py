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
        """The experts that rows ``[R, d]`` choose, ``[R, k]``, and their weights, ``[R, k]`` fp32."""
        return ROUTERS[self.experts.router](x, self)


def softmax(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """The most probable experts, each with its probability, which may be made to sum to 1 (Qwen3-MoE)."""
    probability = F.linear(x, gate.weight).softmax(-1, dtype=torch.float32)
    weights, chosen = probability.topk(gate.experts.chosen, -1)
    return chosen, weights / weights.sum(-1, keepdim=True) if gate.experts.renormalise else weights


ROUTERS: dict[str, Callable[[Tensor, Gate], tuple[Tensor, Tensor]]] = {"softmax": softmax}
"""How experts are chosen, by name."""


class SparseMLP(nn.Module):
    """SwiGLU feed-forwards of which each row goes through some; the weights of all are stacked."""

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.gate = Gate(hidden_size, experts)
        self.gate_up = nn.Parameter(torch.zeros(experts.count, 2, experts.size, hidden_size))  # the gates first
        self.down = nn.Parameter(torch.zeros(experts.count, hidden_size, experts.size))
        self.gather: Callable[[Tensor], Tensor] | None = None  # what tensor ranks have of the last dimension

    def forward(self, x: Tensor) -> Tensor:
        """``[R, d] -> [R, d]``."""
        chosen, weights = self.gate(x)
        groups = grouped(chosen, self.experts.count)
        rows = x.index_select(0, groups.choice // self.experts.chosen)
        hidden = swiglu(expert_linear(rows, self.gate_up.flatten(1, 2), groups))
        if self.gather is not None:
            hidden = self.gather(hidden[groups.place.flatten()])[groups.choice]
        out = weighted_sum(expert_linear(hidden, self.down, groups), groups, weights)
        return out if self.gather is None else self.gather(out)

    def keep(self, inner: slice, outer: slice, gather: Callable[[Tensor], Tensor]) -> None:
        """Keep a tensor rank's part of every expert: of its inner rows, and of its outputs."""
        self.gate_up = nn.Parameter(self.gate_up[:, :, inner].contiguous(), requires_grad=False)
        self.down = nn.Parameter(self.down[:, outer].contiguous(), requires_grad=False)
        self.gather = gather
