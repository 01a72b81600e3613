"""A naive engine for one sequence: the oracle's decisions over plain forwards, one branch at a time.

Caches are lists of tensors, attention is written out, sequences are whole: nothing of the engine's segments, pool,
packing or commit is used. Greedy only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.models.transformer import Transformer
from tests.decode.oracle import Oracle, OracleConfig, Record

Cache = list[tuple[Tensor, Tensor]]


def confidence_of(probabilities: Tensor, kind: str) -> float:
    if kind == "probability":
        return float(probabilities.max())
    if kind == "margin":
        first, second = probabilities.topk(2).values.tolist()
        return first - second
    return float((probabilities * (probabilities + 1e-30).log()).sum())


class Naive:
    """Generates like `Engine`, slowly."""

    def __init__(self, model: Transformer, config: DecodeConfig, prompt: list[int], max_new_tokens: int) -> None:
        self.model, self.config, self.prompt = model, config, prompt
        ids = model.config
        shared = set(OracleConfig.__dataclass_fields__) & set(DecodeConfig.__dataclass_fields__)
        options = {k: getattr(config, k) for k in shared}
        rules = OracleConfig(**options, mask_id=ids.mask_id, eos_ids=set(ids.eos_ids), shift=ids.shift)
        self.oracle = Oracle(rules, len(prompt), max_new_tokens)
        self.cache: Cache = []
        self.cached = 0

    def visible(self, position: int) -> int:
        """The end of what a row sees, positions relative to the prompt's end."""
        end = self.oracle.end
        if position < 0 and self.config.prompt_attention == "self":
            return 0
        if self.config.window_attention == "block_causal":
            return min((position // self.config.block_size + 1) * self.config.block_size, end)
        return end

    def forward(self, tokens: list[int], first: int) -> tuple[dict[int, Tensor], Cache]:
        """Distributions by row position for rows [first, first + n), against the cache below `first`."""
        n, below = len(tokens), first + len(self.prompt)
        new: Cache = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new.append((k, v))
            if self.cache:
                k = torch.cat([self.cache[layer][0][:below], k])
                v = torch.cat([self.cache[layer][1][:below], v])
            out = torch.zeros_like(q)
            group = q.shape[1] // k.shape[1]
            for r in range(n):
                stop = below + self.visible(first + r) - first
                for h in range(q.shape[1]):
                    weights = (k[:stop, h // group] @ q[r, h] / q.shape[2] ** 0.5).softmax(0)
                    out[r, h] = weights @ v[:stop, h // group]
            return out

        positions = torch.arange(below, below + n)
        hidden = self.model(torch.tensor(tokens), positions, attend)
        logits = hidden @ self.model.head_weight.T
        logits[:, self.model.config.mask_id] = -1e30
        return {first + r: row for r, row in enumerate(logits.softmax(-1))}, new

    def generate(self) -> tuple[list[int], list[int]]:
        """Tokens of all appended blocks, and the branch chosen in every step."""
        oracle, shift = self.oracle, int(self.model.config.shift)
        size = len(self.prompt)
        while not oracle.done:
            view = oracle.window()
            caching = self.config.cache == "block"
            first = -size if view["committed"] < 0 else view["committed"]
            boundary = caching and view["committed"] >= 0 and view["committed"] == view["finished"] and shift
            fresh = boundary and self.config.boundary == "fresh"
            records: list[dict[int, Record]] = []
            caches: list[Cache] = []
            for edits in view["branches"]:
                tokens = self.prompt + oracle.tokens[: view["end"]]
                for position, token in edits.items():
                    tokens[size + position] = token
                start = first - 1 if fresh else first
                rows, cache = self.forward(tokens[size + start :], start)
                if fresh:  # the recomputed row's K/V are not kept
                    cache = [(k[1:], v[1:]) for k, v in cache]
                caches.append(cache)
                found: dict[int, Record] = {}
                for position in range(view["finished"], view["end"]):
                    if oracle.tokens[position] != self.model.config.mask_id or position - shift not in rows:
                        continue
                    p = rows[position - shift]
                    found[position] = (
                        int(p.argmax()),
                        float(p.max()),
                        confidence_of(p, self.config.confidence),
                    )
                records.append(found)
            committing = view["finished"] - first if caching else 0
            oracle.step(records)
            if committing > 0:
                winner = caches[oracle.wins[-1]]
                kept = [(k[:committing], v[:committing]) for k, v in winner]
                old = self.cache or [(k[:0], v[:0]) for k, v in kept]
                self.cache = [
                    (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(old, kept, strict=True)
                ]
        return oracle.tokens[: oracle.end], oracle.wins
