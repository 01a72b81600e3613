"""The baselines in plain loops: vanilla, Fast-dLLM (no cache, and its dual one), SDAR and Fast-dLLM v2.

Written from the published algorithms, one sequence at a time, positions absolute. Nothing is shared with the package
but the weights: the transformer below attends row by row, and a cache is a dictionary from (layer, position). All stop
as soon as there is an EOS with nothing masked before it; what is published decodes the rest, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lopa_dist.models.transformer import Transformer

KeysValues = dict[tuple[int, int], Sequence[Tensor]]  # of (layer, position)
Predictions = dict[int, Tensor]  # position -> distribution that its row gives
Sees = Callable[[int], Iterable[int]]  # position of a row -> the positions that it sees
NOTHING: KeysValues = {}


class PlainModel:
    """The transformer of the checkpoint's family, over dictionaries."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.weights = model.config, model.state_dict()

    def project(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_eps).rsqrt() * weight

    def turn(self, x: Tensor, positions: list[int]) -> Tensor:
        """Rotary embedding of heads ``[R, H, D]``: dimension i is paired with i + D/2."""
        half = x.shape[2] // 2
        angle = torch.tensor(positions)[:, None, None] * self.config.rope_theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 2)

    def forward(self, tokens: dict[int, int], sees: Sees, kept: KeysValues = NOTHING) -> tuple[Predictions, KeysValues]:
        """Distributions of the rows of `tokens` and their K/V; what else they see is in `kept`."""
        config, fresh, positions = self.config, KeysValues(), list(tokens)
        x = self.weights["model.embed_tokens.weight"][list(tokens.values())]  # [R, C]
        for layer in range(config.layers):
            at = f"model.layers.{layer}"
            y = self.norm(f"{at}.input_layernorm", x)
            q, k, v = (
                self.project(f"{at}.self_attn.{part}_proj", y).view(len(x), -1, config.head_dim)
                for part in ("q", "k", "v")
            )
            queries = self.turn(self.norm(f"{at}.self_attn.q_norm", q), positions)
            keys = self.turn(self.norm(f"{at}.self_attn.k_norm", k), positions)
            fresh |= {(layer, p): pair for p, *pair in zip(positions, keys, v, strict=True)}
            rows = []
            for p, query in zip(positions, queries, strict=True):
                pairs = [fresh[layer, s] if s in tokens else kept[layer, s] for s in sees(p)]
                seen, values = (torch.stack(one, 1) for one in zip(*pairs, strict=True))  # [Hkv, seen, D]
                scores = query.view(config.kv_heads, -1, config.head_dim) @ seen.mT / config.head_dim**0.5
                rows.append((scores.softmax(2) @ values).flatten())
            x = x + self.project(f"{at}.self_attn.o_proj", torch.stack(rows))
            y = self.norm(f"{at}.post_attention_layernorm", x)
            gate, up = (self.project(f"{at}.mlp.{part}_proj", y) for part in ("gate", "up"))
            x = x + self.project(f"{at}.mlp.down_proj", gate * gate.sigmoid() * up)
        logits = self.norm("model.norm", x) @ self.weights["lm_head.weight"].T
        logits[:, config.mask_id] = -torch.inf  # the mask is no answer
        return dict(zip(positions, logits.softmax(1), strict=True)), fresh


class Decoder:
    """One sequence that is being filled."""

    def __init__(self, model: Transformer, prompt: list[int], count: int) -> None:
        self.model, self.config = PlainModel(model), model.config
        self.prompt, self.end = len(prompt), len(prompt) + count
        self.tokens = prompt + [self.config.mask_id] * count
        self.shift = int(self.config.shift)
        self.forwards = 0

    def masked(self, begin: int, end: int) -> list[int]:
        """What is to be filled; nothing once the answer has ended."""
        for token in self.tokens[self.prompt :]:
            if token == self.config.mask_id:
                break
            if token in self.config.eos_ids:
                return []
        return [p for p in range(begin, end) if self.tokens[p] == self.config.mask_id]

    def forward(self, begin: int, end: int, sees: Sees, kept: KeysValues = NOTHING) -> tuple[Predictions, KeysValues]:
        self.forwards += 1
        return self.model.forward({p: self.tokens[p] for p in range(begin, end)}, sees, kept)

    def fill(self, found: Predictions, position: int) -> None:
        self.tokens[position] = int(found[position - self.shift].argmax())

    def fill_above(self, found: Predictions, positions: list[int], threshold: float) -> None:
        """Every position above the threshold, and the most probable one in any case."""
        sure = {p: float(found[p - self.shift].max()) for p in positions}
        best = max(positions, key=lambda p: sure[p])
        for p in positions:
            if p == best or sure[p] > threshold:
                self.fill(found, p)

    def result(self) -> tuple[list[int], int]:
        """The answer up to its first EOS, and the forwards that it took."""
        answer = self.tokens[self.prompt :]
        stops = [i for i, t in enumerate(answer) if t in self.config.eos_ids]
        return answer[: stops[0]] if stops else answer, self.forwards


def vanilla(model: Transformer, prompt: list[int], count: int, entropy: bool) -> tuple[list[int], int]:
    """One token per step: where the model is surest, by probability or (Dream) by entropy."""
    at = Decoder(model, prompt, count)
    while masked := at.masked(at.prompt, at.end):
        found, _ = at.forward(0, at.end, lambda p: range(at.end))

        def sure(p: int, found: Predictions = found) -> float:
            row = found[p - at.shift]
            return float((row * (row + 1e-30).log()).sum()) if entropy else float(row.max())

        at.fill(found, max(masked, key=sure))
    return at.result()


def fast_dllm(
    model: Transformer, prompt: list[int], count: int, block: int, threshold: float, cache: str
) -> tuple[list[int], int]:
    """Fast-dLLM: block after block on the whole canvas. With a cache, a block's first forward computes everything.

    Of that, prefix keeps what is before the block and recomputes all from the block on; dual keeps everything and
    recomputes the block. With the logit shift (its Dream code), a block's first forward fills its first position only.
    """
    at = Decoder(model, prompt, count)

    def everything(p: int) -> range:
        return range(at.end)

    for start in range(at.prompt, at.end, block):
        stop = min(start + block, at.end)
        if not at.masked(start, stop):
            break
        found, kept = at.forward(0, at.end, everything)
        if at.shift and cache != "none":
            at.fill(found, start)
        else:
            at.fill_above(found, at.masked(start, stop), threshold)
        while masked := at.masked(start, stop):
            if cache == "none":
                found, _ = at.forward(0, at.end, everything)
            else:
                found, _ = at.forward(start, stop, everything, kept)
            at.fill_above(found, masked, threshold)
    return at.result()


def block_diffusion(
    model: Transformer, prompt: list[int], count: int, block: int, part: int, threshold: float
) -> tuple[list[int], int]:
    """SDAR and Fast-dLLM v2, without any cache: a row sees up to the end of its own block, counted from position 0.

    The blocks of SDAR are one part each. With the shift (Fast-dLLM v2) the pass over a complete block, the prompt's
    last one included, gives the next block's first token, whatever its probability. The last block is whole, though the
    answer may end within it.
    """
    end = len(prompt) + count
    at = Decoder(model, prompt, -(-end // block) * block - len(prompt))
    while masked := at.masked(at.prompt, end):
        start = masked[0] // block * block
        stop = start + block
        found, _ = at.forward(0, stop, lambda p: range((p // block + 1) * block))
        if at.shift and masked[0] == start:
            at.fill(found, start)
            continue
        first = masked[0] // part * part
        at.fill_above(found, at.masked(first, first + part), threshold)
    tokens, forwards = at.result()
    return tokens[:count], forwards
