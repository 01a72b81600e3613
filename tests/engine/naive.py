"""A naive engine for one sequence: the oracle's decisions over plain forwards, one branch at a time.

Caches are lists of tensors, attention is written out, sequences are whole: nothing of the engine's segments, pool,
packing or commit is used. Greedy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.request import Request
from lopa_dist.models.transformer import Transformer
from tests.decode.oracle import Oracle, OracleConfig, Record

Cache = list[tuple[Tensor, Tensor]]
Texts = dict[int, tuple[list[int], int]]
"""Tokens and forwards of every request."""

LOGITS_DIFFER = 1e-5
"""Logits of two kernels differ by less."""


def confidence_of(probabilities: Tensor, kind: str) -> float:
    if kind == "probability":
        return float(probabilities.max())
    if kind == "margin":
        first, second = probabilities.topk(2).values.tolist()
        return first - second
    return float((probabilities * (probabilities + 1e-30).log()).sum())


def close(value: float, others: list[float]) -> bool:
    """Whether others differ from it by no more than rounding may: of probabilities near 0 or 1, that is less.

    Equal ones count: what is equal here may differ by a bit where it is computed in another order.
    """
    most = LOGITS_DIFFER * (min(value, 1 - value) if 0 <= value <= 1 else abs(value)) + 2e-7
    return any(abs(value - other) < most for other in others)


def any_close(values: list[float], bounds: tuple[float, ...] = ()) -> bool:
    """Whether a value is close to another one, or to one of `bounds`."""
    return any(close(value, [*values[:i], *bounds]) for i, value in enumerate(values))


class Naive:
    """Generates like `Engine`, slowly."""

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        prompt: list[int],
        max_new_tokens: int,
        suffix: Sequence[int] = (),
    ) -> None:
        self.suffix = list(suffix)
        known = len(prompt) % config.block_size if config.scope.prompt_attention == "blocks" else 0
        self.model, self.config, self.prompt = model, config, prompt[: len(prompt) - known]
        ids = model.config
        options = vars(config.scope) | vars(config)
        shared = {name: options[name] for name in OracleConfig.__dataclass_fields__ if name in options}
        rules = OracleConfig(**shared, mask_id=ids.mask_id, eos_ids=set(ids.eos_ids), shift=ids.shift)
        self.oracle = Oracle(rules, len(prompt) - known, max_new_tokens, known=prompt[len(prompt) - known :])
        if suffix:  # all of the answer is seen from the start
            self.oracle.end = max_new_tokens
        self.cache: Cache = []
        self.of_commit: Record = 0, 0.0, 0.0, 0, 0.0  # what the last commit's forward predicts after the cache
        self.near_tie = False  # two tokens, branches or positions so close that rounding may choose either
        self.thresholds = tuple(t for t in (config.tau_conf, config.tau_add, config.tau_act, config.tau_edit) if t)
        if config.tau_entropy is not None:
            self.thresholds += (-config.tau_entropy,)

    def visible(self, position: int) -> int:
        """The end of what a row sees, positions relative to the prompt's end."""
        config, scope, end = self.config, self.config.scope, self.oracle.end
        of_its_block = (position // config.block_size + 1) * config.block_size
        if position < 0 and scope.prompt_attention != "joint":
            return 0 if scope.prompt_attention == "self" else of_its_block
        if scope.window_attention == "block_causal":
            return min(of_its_block, end)
        return (end if scope.kv_is_final else self.oracle.max_new_tokens) + len(self.suffix)

    def forward(self, tokens: list[int], at: list[int], first: int) -> tuple[dict[int, Tensor], Cache]:
        """Distributions by row position for rows `at`, against the cache before `first` and after them."""
        sees = [[c < self.visible(r) for c in at] for r in at]
        rows, new = self.run(tokens, at, sees, first)
        return dict(zip(at, rows, strict=True)), new

    def verify(self, tokens: list[int], at: list[int], first: int, drafts: list[tuple[int, int]]) -> dict[int, Tensor]:
        """Distributions at the drafts but the first, each in the context of the drafts before it, by their number.

        `tokens` are the window's, at positions `at`, with masks at the drafts. Beside these rows there are a row
        for each draft's token (but the last's), and one for each prediction. Each sees what the definition says: the
        window without the masks of the drafts up to its own, and the rows of these drafts' tokens. Drafts whose
        predicting row lies before `first` are left out: no draft can change their prediction.
        """
        n, m, shift = len(tokens), len(drafts), int(self.model.config.shift)
        positions = [position for position, _ in drafts]
        predicts = [position - shift for position in positions]
        ids, window_at, at = list(tokens), at, list(at)
        sees = [[c < self.visible(r) for c in at] + [False] * (2 * m - 2) for r in at]
        after = []  # by number of drafts in the context: what a row sees then
        for count in range(1, m):
            hidden = set(positions[:count])
            window = [c < self.visible(positions[0]) and c not in hidden for c in window_at]
            after.append(window + [i < count for i in range(m - 1)] + [False] * (m - 1))
        for i in range(m - 1):
            ids.append(drafts[i][1])
            at.append(positions[i])
            sees.append(after[i])
        for i in range(1, m):
            placed = dict(drafts[:i])
            inside = self.sees_drafts(first) <= predicts[i]
            window_token = dict(zip(window_at, tokens, strict=True))[predicts[i]] if inside else tokens[0]
            ids.append(placed.get(predicts[i], window_token))
            at.append(predicts[i] if inside else first)
            sees.append(after[i - 1])
        rows, _ = self.run(ids, at, sees, first, n)
        return {i: rows[n + m - 2 + i] for i in range(1, m) if self.sees_drafts(first) <= predicts[i]}

    def sees_drafts(self, first: int) -> int:
        """The first of the rows from position `first` on that sees what is drafted in the open blocks."""
        if self.config.scope.window_attention == "block_causal":
            return max(first, self.oracle.complete)
        return first if self.config.scope.prompt_attention == "joint" else max(first, 0)

    def run(
        self, tokens: list[int], at: list[int], sees: list[list[bool]], first: int, span: int | None = None
    ) -> tuple[Tensor, Cache]:
        """Distributions of rows at positions `at`, and their K/V; rows see the cache but for `span` slots from `first`
        on, and one another as `sees` says."""
        n, below = len(tokens), first + len(self.prompt)
        span = n if span is None else span
        new: Cache = []
        own = torch.tensor(sees)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new.append((k, v))
            if self.cache:
                old_k, old_v = self.cache[layer]
                k = torch.cat([old_k[:below], k, old_k[below + span :]])
                v = torch.cat([old_v[:below], v, old_v[below + span :]])
            after = len(k) - n - below if self.cache else 0  # cached tokens after the rows' own
            ends = torch.tensor([self.visible(max(position, first)) for position in at])
            later = torch.arange(after) + first + span < ends[:, None]
            seen = torch.cat([torch.ones(n, len(k) - n - after, dtype=torch.bool), own, later], 1)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("rhd,chd->hrc", q, k) / q.shape[2] ** 0.5
            return torch.einsum("hrc,chd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

        positions = torch.tensor(at) + len(self.prompt)
        hidden = self.model(torch.tensor(tokens), positions, attend)
        logits = hidden @ self.model.head_weight.T
        logits[:, self.model.config.mask_id] = -1e30
        return logits.softmax(-1), new

    def record(self, p: Tensor) -> Record:
        """The record of a distribution; a near tie is remembered."""
        (first, second, third), tokens = (x.tolist() for x in p.topk(3))
        self.near_tie |= close(first, [second]) or (self.config.second_choices and close(second, [third]))
        return tokens[0], first, confidence_of(p, self.config.confidence), tokens[1], second

    def generate(self) -> tuple[list[int], list[int]]:
        """Tokens of all appended blocks, and the branch chosen in every step."""
        oracle, shift = self.oracle, int(self.model.config.shift)
        size = len(self.prompt)
        while not oracle.done:
            view = oracle.window()
            caching, growing = self.config.scope.cache, self.config.scope.kv_is_final
            commits = caching != "none" and view["committed"] < view["complete"]
            anew = view["committed"] < 0 or (commits and caching != "block")
            first = -size if anew else view["committed"]
            whole = not growing and (anew or caching != "dual")
            stop = oracle.max_new_tokens if whole else view["end"]
            waits = caching != "none" and not commits and shift and oracle.masked(view["complete"])
            fresh, stale = (waits and self.config.scope.boundary == boundary for boundary in ("fresh", "stale"))
            records: list[dict[int, Record]] = []
            verified: dict[tuple[int, int], Record] = {}
            caches: list[Cache] = []
            for branch, edits in enumerate(view["branches"]):
                tokens = self.prompt + oracle.tokens[:stop]
                if whole or growing:
                    tokens += self.suffix
                for position, token in edits.items():
                    tokens[size + position] = token
                start = first - 1 if fresh else first
                at = list(range(start, len(tokens) - size))
                ids = [tokens[size + position] for position in at]
                rows, cache = self.forward(ids, at, start)
                if fresh:  # the recomputed row's K/V are not kept
                    cache = [(k[1:], v[1:]) for k, v in cache]
                caches.append(cache)
                found: dict[int, Record] = {}
                for position in range(view["complete"], view["end"]):
                    if position not in oracle.wanted() or position - shift not in rows:
                        continue
                    found[position] = self.record(rows[position - shift])
                if stale:
                    found[view["complete"]] = self.of_commit
                records.append(found)
                drafts = view["drafts"][branch]
                for number, p in self.verify(ids, at, start, drafts).items() if len(drafts) > 1 else ():
                    verified[branch, number] = self.record(p)
            count = (stop if caching == "dual" else view["complete"]) - first
            if caching == "dual" and whole:
                count += len(self.suffix)
            oracle.step(records, verified)
            if commits and view["complete"] in records[oracle.wins[-1]]:
                self.of_commit = records[oracle.wins[-1]][view["complete"]]
            ranked = [record[2] for record in records[oracle.wins[-1]].values()]
            if self.config.verify == "confidence":
                best, *others = sorted(oracle.last_scores, reverse=True)
                self.near_tie |= close(best, others)
            self.near_tie |= any_close(ranked, self.thresholds)
            if commits:
                kept = [(k[:count], v[:count]) for k, v in caches[oracle.wins[-1]]]
                old = [(k[: first + size], v[: first + size]) for k, v in self.cache or kept]
                self.cache = [
                    (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(old, kept, strict=True)
                ]
        return oracle.tokens[oracle.known : min(oracle.end, oracle.max_new_tokens)], oracle.wins


def check_same(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    found: Texts,
    wanted: Texts,
) -> None:
    """Two ways of computing gave the same text; a request may differ where rounding chooses between near ties.

    Sampled text is taken as it is: the naive engine is greedy.
    """
    assert found.keys() == wanted.keys()
    for request in requests:
        if found[request.index] != wanted[request.index]:
            naive = Naive(model, config, list(request.prompt), request.max_new_tokens, request.suffix)
            naive.generate()
            assert naive.near_tie, (request, found[request.index], wanted[request.index])
            assert not config.temperature
