"""Mixture of experts: many feed-forwards, some of which a router chooses for each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopa_dist.kernels.experts import expert_linear, height_for, weighted_sum
from lopa_dist.kernels.routing import Groups, Router, choose, routed
from lopa_dist.kernels.rows import swiglu
from lopa_dist.models.config import Experts


def router_of(experts: Experts) -> Router:
    """Return how a model's rows choose their experts."""
    sigmoid = experts.router == "grouped_sigmoid"
    of_groups = (experts.scale, experts.groups, experts.chosen_groups) if sigmoid else ()
    return Router(experts.chosen, experts.renormalise, sigmoid, *of_groups)


class Gate(nn.Module):
    """The router: it says which experts suit a row."""

    expert_bias: nn.Parameter | None

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.router = router_of(experts)
        self.weight = nn.Parameter(torch.zeros(experts.count, hidden_size))
        self.expert_bias = nn.Parameter(torch.zeros(experts.count)) if self.router.sigmoid else None
        self.wide: tuple[tuple[int, torch.dtype], Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts that rows ``[R, d]`` choose, ``[R, k]``, and their weights, ``[R, k]`` fp32."""
        return choose(self.logits(x), self.expert_bias, self.router)

    def route(self, x: Tensor, height: int, rows: Tensor | None = None) -> tuple[Tensor, Groups]:
        """Return the weights of rows' experts, and the rows' places in tiles of `height` rows, as `routed` does."""
        return routed(self.logits(x), self.expert_bias, self.router, height, rows)

    def logits(self, x: Tensor) -> Tensor:
        """Return how well each expert suits each row, ``[R, E]``; with sigmoids, computed in fp32."""
        return F.linear(x.float(), self.in_fp32()) if self.router.sigmoid else F.linear(x, self.weight)

    def in_fp32(self) -> Tensor:
        """Return the weight in fp32. It is kept where nothing is trained, to save a cast in every call (`renew`)."""
        weight = self.weight
        if weight.dtype == torch.float32 or torch.is_grad_enabled():
            return weight.float()
        made_from = weight.data_ptr(), weight.dtype
        if self.wide is None or self.wide[0] != made_from:
            self.wide = made_from, weight.detach().float()
        return self.wide[1]

    @torch.inference_mode()
    def renew(self) -> None:
        """Write the weight into its copy in fp32, in place, because CUDA graphs hold its address."""
        if self.wide is not None:
            self.wide[1].copy_(self.weight)


class SparseMLP(nn.Module):
    """SwiGLU feed-forwards, some of which each row goes through; the weights of all are stacked."""

    def __init__(self, hidden_size: int, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.shared_experts = shared  # all rows go through it
        self.gate = Gate(hidden_size, experts)
        self.gate_up = nn.Parameter(torch.zeros(experts.count, 2, experts.size, hidden_size))  # the gates first
        self.down = nn.Parameter(torch.zeros(experts.count, hidden_size, experts.size))
        self.kind = "none"  # of quantisation; with another, each output channel of each expert has a scale
        self.gate_up_scale: Tensor | None
        self.down_scale: Tensor | None
        self.register_buffer("gate_up_scale", None)  # [E, 2, size]
        self.register_buffer("down_scale", None)  # [E, d]
        self.gather: Callable[[Tensor], Tensor] | None = None  # of tensor ranks' parts, the last dimension

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the experts' output for each row: ``[R, d] -> [R, d]``.

        If `x` has no rows, nothing is computed, because a library's grouped product may read beyond an empty tensor.

        Args:
            x: the rows.
            rows: ``[1]`` int32 on the device, how many are real; None: all. What is not of a real row is undefined.
        """
        if not len(x):
            return torch.empty_like(x)
        weights, groups = self.gate.route(x, height_for(len(x) * self.experts.chosen, x, self.down), rows)
        scale = None if self.gate_up_scale is None else self.gate_up_scale.flatten(1)
        hidden = swiglu(expert_linear(x.index_select(0, groups.row), self.gate_up.flatten(1, 2), groups, scale))
        if self.gather is not None:
            hidden = self.gather(hidden[groups.place.flatten()])[groups.choice]
        out = weighted_sum(expert_linear(hidden, self.down, groups, self.down_scale), groups, weights)
        out = out if self.gather is None else self.gather(out)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def allocate(self, kind: str, dtype: torch.dtype) -> None:
        """Replace the weights with empty tensors of `dtype`, and empty scales, for weights quantised as `kind`."""
        self.kind = kind
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            setattr(self, name, nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False))
            setattr(self, f"{name}_scale", weight.new_empty(weight.shape[:-1], dtype=torch.float32))

    def split(self, inner: slice, outer: slice, gather: Callable[[Tensor], Tensor]) -> None:
        """Keep a tensor rank's part of every expert: `inner` of its intermediate numbers and `outer` of its outputs."""
        self.gate_up = nn.Parameter(self.gate_up[:, :, inner].contiguous(), requires_grad=False)
        self.down = nn.Parameter(self.down[:, outer].contiguous(), requires_grad=False)
        self.gather = gather
