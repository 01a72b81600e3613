"""One step of LoPA decoding for one sequence, in lists, dictionaries and loops: read `Oracle.step` first.

It says in the plainest words what `lopa_dist/decode` computes for a whole batch in tensor code, and was written
independently of that code, so that the two can be compared. docs/lopa-step.md explains it beside a picture. Where the
published code differs from this project, docs/architecture.md says how and why.

All positions are relative to the end of the prompt: the first generated token has position 0. Use:

    oracle = Oracle(OracleConfig(mask_id=0, eos_ids={1}), prompt_len=9)
    while not oracle.done:
        view = oracle.window()                      # what a forward needs
        records = [{pos: (token, probability, confidence), ...} for branch in view["branches"]]
        oracle.step(records)                        # verify, commit, fill, activate, append, finish, spawn
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

Record = tuple[int, float, float, int, float]  # token, probability, confidence; the second choice and its probability
Records = Sequence[Mapping[int, Record]] | Mapping[int, Mapping[int, Record]]  # [branch][position]


@dataclass(kw_only=True)
class OracleConfig:
    """The `decode` options, and the facts of the model (mask, EOS, logit shift)."""

    branches: int = 7  # k, the number of LOOKAHEAD branches
    verify: str = "confidence"  # confidence | agreement
    drafts: int = 0  # tokens that each branch verifies (agreement)
    window_attention: str = "full"  # full | block_causal
    prompt_attention: str = "self"  # blocks: blocks are counted from the prompt's first token, and all are whole
    block_size: int = 32
    max_new_tokens: int = 512
    max_active_blocks: int | None = None
    tau_add: float = 0.1
    tau_act: float = 0.95
    tau_conf: float = 0.9
    tau_entropy: float | None = None
    tau_edit: float | None = None
    tau_look: float = 0.0
    extra_fill: int = 0
    boundary: str = "fresh"  # fresh | stale | fill
    cache: str = "block"  # block | none | dual
    sub_block_size: int | None = None
    stop_at_eos: bool = True
    mask_id: int
    eos_ids: set[int]
    shift: bool = True

    def __post_init__(self) -> None:
        """Refuse a misspelt choice: it would silently test another rule."""
        choices = {
            "verify": ("confidence", "agreement"),
            "boundary": ("fresh", "stale", "fill"),
            "cache": ("block", "none", "dual"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")


def plain_mean(values: list[float]) -> float:
    """The mean in Python floats; pass another one to `Oracle` to copy float32 rounding."""
    return sum(values) / len(values)


class Oracle:
    """Decoding state of one sequence and the one step that moves it."""

    def __init__(
        self,
        config: OracleConfig,
        prompt_len: int,
        max_new_tokens: int | None = None,
        mean: Callable[[list[float]], float] | None = None,
        known: Sequence[int] = (),
    ) -> None:
        """Append the first block; fully active because the prompt counts as complete.

        `known` tokens of the prompt begin the first block where blocks are counted from the prompt's first token;
        `prompt_len` and the positions are then relative to the end of its whole blocks.
        """
        self.config = config
        self.prompt_len = prompt_len  # positions are relative to it, so no rule needs its value
        self.known = len(known)
        self.max_new_tokens = (config.max_new_tokens if max_new_tokens is None else max_new_tokens) + self.known
        self.mean = mean or plain_mean
        self.room = self.max_new_tokens  # where the last block ends
        if config.prompt_attention == "blocks":
            self.room += -self.room % config.block_size
        self.tokens: list[int] = [*known, *[config.mask_id] * (self.room - self.known)]
        self.committed = -1  # -1: the prompt was not forwarded yet; else generated tokens in the cache
        self.complete = 0  # end of the leading complete blocks of the anchor
        self.end = min(config.block_size, self.room)  # end of the last appended block
        self.full: set[int] = {0}  # fully active blocks
        self.eos = False
        self.checks = 0  # forwards in a row that found no mask (tau_edit)
        self.settled = config.tau_edit is None  # whether what stands in the window stays
        self.edits: list[dict[int, int]] = [{}]  # of each branch of the coming forward; 0 is the anchor
        self.chain: list[tuple[int, int]] = []  # drafts: positions and tokens, in the order of their verification
        self.paths: list[tuple[int, ...]] = [()]  # of each branch: its choices for the first drafts, 1 for a second one
        self.accepted: list[int] = []  # drafts accepted, by step
        self.accepted_with: list[int] = []  # of the last step, see `_with_fewer`
        self.proofs: dict[int, Record] = {}  # what verification last predicted at a draft's position
        self.wins: list[int] = []
        self.last_scores: list[float] = []
        self.last_filled: list[tuple[int, int]] = []
        self.last_edited: list[tuple[int, int]] = []
        self.done = self._is_done()

    def window(self) -> dict[str, Any]:
        """What the coming forward needs; `step` is the number of forwards done so far."""
        return {
            "committed": self.committed,
            "complete": self.complete,
            "end": self.end,
            "step": len(self.wins),
            "branches": [dict(edit) for edit in self.edits],
            "drafts": [self.chain[len(path) :][: self.config.drafts] for path in self.paths],
        }

    def masked(self, pos: int) -> bool:
        return self.tokens[pos] == self.config.mask_id

    def wanted(self) -> list[int]:
        """The positions of the window whose predictions are read: its masks; to edit, all but the prompt's."""
        if self.config.tau_edit is None:
            return self.window_masks()
        return list(range(max(self.complete, self.known), self.end))

    def window_masks(self) -> list[int]:
        """The anchor's masked positions in [complete, end), ascending."""
        return [pos for pos in range(self.complete, self.end) if self.masked(pos)]

    def _fillable(self) -> list[int]:
        """Of every block, the masked positions of its first sub-block that has any (Fast-dLLM v2)."""
        masked, size = self.window_masks(), self.config.sub_block_size
        if size is None:
            return masked
        found = []
        for block in self._blocks():
            inside = [pos for pos in masked if pos in block]
            found += [pos for pos in inside if (pos - block.start) // size == (inside[0] - block.start) // size]
        return found

    def _blocks(self) -> list[range]:
        """The positions of every appended block; the last one may be short."""
        size = self.config.block_size
        return [range(start, min(start + size, self.end)) for start in range(0, self.end, size)]

    def _progress(self, block: range) -> float:
        return sum(not self.masked(pos) for pos in block) / len(block)

    def step(self, records: Records, verified: Mapping[tuple[int, int], Record] | None = None) -> None:
        """Take the records of one forward and move the sequence by one step.

        Args:
            records: `records[branch][pos]` for each position of the window that is `wanted`.
            verified: by branch and number of a draft in it, what the forward predicts at the draft's position in the
                context of the drafts before it. Drafts that are not there take the branch's own record.
        """
        if self.done:
            raise ValueError("the sequence is done: it takes no more steps")
        seen: list[dict[int, Record]] = []  # per branch: the records of its own still masked positions
        for j, edit in enumerate(self.edits):
            still = [pos for pos in self.wanted() if pos not in edit]
            seen.append({pos: records[j][pos] for pos in still})

        # 1, 2. Verify: which branch wins, and which tokens it brings.
        if self.config.verify == "agreement":
            self.accepted_with = self._with_fewer(seen, verified or {})  # with fewer branches: for the report
            winner, brought = self._longest_agreement(seen, verified or {})
        else:  # Ties: the lookahead of smallest index, the anchor last.
            self.last_scores = [self._score(record) for record in seen]
            order = [*range(1, len(self.edits)), 0]
            winner = max(order, key=lambda j: self.last_scores[j])  # max keeps the first of equals
            brought = dict(self.edits[winner])
        self.wins.append(winner)
        record = seen[winner]  # one forward does double duty: it scored, now it fills and proposes

        # 3. Commit: this forward computed everything that was complete before it.
        committing = self.config.cache != "none" and self.committed < self.complete
        if self.config.cache != "none":
            self.committed = self.complete

        # 4. What the winner brings is written. Models that edit replace what was filled before.
        replaced = self._edits(record)
        for pos, token in replaced.items():
            self._write(pos, token)
        filled = dict(brought)
        for pos, token in filled.items():
            self._write(pos, token)

        # 5. Activate the block that follows a nearly full one: after the edits, before the fill.
        blocks = self._blocks()
        self._activate()

        # 6. Fill from the winner's records. All choices are made before anything is written.
        chosen = self._choose_fill(record, forced=not (self.chain and brought))  # what drafts bring is enough
        first = self.complete  # where the cache now ends
        if self.config.boundary == "fill" and self.config.shift and committing and self.masked(first):
            chosen = [first]  # Fast-dLLM: the forward that fills the cache decides the next token, and nothing else
        for pos in chosen:
            filled[pos] = record[pos][0]
            self._write(pos, record[pos][0])
        self.last_filled, self.last_edited = sorted(filled.items()), sorted(replaced.items())
        self.eos = self.settled and any(token in self.config.eos_ids for token in self.tokens[self.known : self.end])

        # 7. Lookahead candidates: what remains masked, by the same records.
        candidates = [pos for pos in self._fillable() if record[pos][1] >= self.config.tau_look]
        candidates.sort(key=lambda pos: -record[pos][2])  # stable: ties by position

        # 8. The frontier of complete blocks, by the anchor's content only.
        for block in blocks:
            if self.settled and block.start == self.complete and not any(self.masked(pos) for pos in block):
                self.complete = block.stop

        # 9. Append at most one block, by the anchor's progress.
        if self._may_append(blocks[-1]):
            self.end = min(self.end + self.config.block_size, self.room)

        # 10, 11. Done, or spawn the branches of the next forward.
        self.done = self._is_done()
        self._spawn([] if self.done else candidates, record)

    def _edits(self, record: Mapping[int, Record]) -> dict[int, int]:
        """What was filled before the forward, and the model is sure enough of another token (LLaDA2.1).

        A block is settled once a forward found no mask in it and changed nothing, or 16 forwards found no mask.
        """
        tau, found = self.config.tau_edit, {}
        if tau is not None:
            for pos in [pos for pos in self.wanted() if not self.masked(pos)]:
                token, probability, *_ = record[pos]
                if token != self.tokens[pos] and probability > tau:
                    found[pos] = token
            self.checks = 0 if self.window_masks() else self.checks + 1
            self.settled = self.checks > 0 and (not found or self.checks == 16)
        return found

    def _score(self, seen: Mapping[int, Record]) -> float:
        """Branch confidence over its still masked positions (LoPA, Eq. 2)."""
        values = [seen[pos][2] for pos in sorted(seen) if self.masked(pos)]
        return self.mean(values) if values else 1.0  # all filled

    def _with_fewer(
        self, seen: Sequence[Mapping[int, Record]], verified: Mapping[tuple[int, int], Record]
    ) -> list[int]:
        """How many drafts are accepted if only the first 1, 2, ... branches ran."""
        found = []
        for count in range(1, len(self.edits) + 1):
            other = copy(self)
            other.edits, other.accepted, other.proofs = self.edits[:count], [], {}
            other._longest_agreement(seen, verified)
            found += other.accepted
        return found

    def _longest_agreement(
        self, seen: Sequence[Mapping[int, Record]], verified: Mapping[tuple[int, int], Record]
    ) -> tuple[int, dict[int, int]]:
        """The branch where verification ends, and the tokens it brings: the accepted drafts, and in place of the one
        that failed what the model predicts there."""
        brought: dict[int, int] = {}
        branch, nth = 0, 0  # where the walk is, and which of the branch's drafts comes next
        for number, (pos, draft) in enumerate(self.chain):
            if nth == self.config.drafts:
                break
            self.proofs[pos] = verified[branch, nth] if (branch, nth) in verified else seen[branch][pos]
            predicted = brought[pos] = self.proofs[pos][0]
            if brought in self.edits:  # a path goes on with this token
                branch, nth = self.edits.index(brought), 0
            elif predicted == draft:
                nth += 1
            else:
                self.accepted.append(number)
                return branch, brought
        self.accepted.append(len(brought))
        return branch, brought

    def _activate(self) -> None:
        """A block that is nearly full lets the next one be fully active; sticky, not chained."""
        for i, block in enumerate(self._blocks()[:-1]):
            if self._progress(block) >= self.config.tau_act:
                self.full.add(i + 1)

    def _choose_fill(self, record: Mapping[int, Record], forced: bool) -> list[int]:
        """The positions to fill: above the threshold, forced, and extra ones."""
        config = self.config

        def best(positions: list[int]) -> int:
            return max(positions, key=lambda pos: record[pos][2])  # ascending positions: ties go left

        masked = self._fillable()
        # The threshold is on the probability and strict, in semi and fully active blocks alike.
        # On the entropy it is not strict.
        if config.tau_entropy is None:
            chosen = [pos for pos in masked if record[pos][1] > config.tau_conf]
        else:
            chosen = [pos for pos in masked if -record[pos][2] <= config.tau_entropy]
        if forced:  # each fully active block without a fill; semi-active never
            for i, block in enumerate(self._blocks()):
                inside = [pos for pos in masked if pos in block]
                if i in self.full and inside and not any(pos in chosen for pos in inside):
                    chosen.append(best(inside))
        for _ in range(config.extra_fill):  # the most confident of the rest
            rest = [pos for pos in masked if pos not in chosen]
            if rest:
                chosen.append(best(rest))
        return chosen

    def _write(self, pos: int, token: int) -> None:
        """Fill one position."""
        if token == self.config.mask_id:
            raise ValueError(f"position {pos} would be filled with the mask token: the records are wrong")
        self.tokens[pos] = token

    def _may_append(self, last: range) -> bool:
        """Whether the anchor's progress earns another block."""
        if self.eos or self.end >= self.room or not self.settled:
            return False
        if not self.window_masks():  # nothing left to fill: a block must come
            return True
        active = sum(block.start >= self.complete for block in self._blocks())
        limit = self.config.max_active_blocks
        return self._progress(last) >= self.config.tau_add and (limit is None or active < limit)

    def _is_done(self) -> bool:
        """No mask left, or an EOS with no mask before it (`stop_at_eos`)."""
        if not self.settled:
            return False
        for pos in range(self.known, min(self.end, self.max_new_tokens)):
            if self.masked(pos):
                return False
            if self.config.stop_at_eos and self.tokens[pos] in self.config.eos_ids:
                return True
        return True

    def _spawn(self, candidates: Sequence[int], record: Mapping[int, Record]) -> None:
        """The anchor and up to k lookaheads on top of it."""
        self.edits, self.chain, self.paths = [{}], [], [()]
        if self.config.verify != "agreement":
            self.edits += [{pos: record[pos][0]} for pos in candidates[: self.config.branches]]
            self.paths = [() for _ in self.edits]
            return
        size = self.config.drafts
        if size > 1 and self.config.window_attention == "block_causal":  # drafts see each other: all in one block
            candidates = [pos for pos in candidates if pos < self.complete + self.config.block_size]
        if not size:
            return
        deepest = max(size, self.config.branches) if self.config.branches else 0
        best = candidates[: size + deepest]
        self.chain = [(pos, record[pos][0]) for pos in best]
        for path in self._best_paths([record[pos] for pos in best[:deepest]], size)[: self.config.branches]:
            choices = zip(best, path, strict=False)
            self.edits.append({pos: record[pos][3 if choice else 0] for pos, choice in choices})
            self.paths.append(path)

    @staticmethod
    def _best_paths(records: Sequence[Record], size: int) -> list[tuple[int, ...]]:
        """All paths, by how probable it is that verification comes that way; of equals the shallower ones first.

        What verification confirmed before makes both choices more probable than the model said.

        A path ends with a second choice, or after `size` drafts of another one, and has at most two second choices.
        """
        first, second = [], []
        for _, p, _, _, q in records:
            accepted = p**0.3
            otherwise = (1 - accepted) * min(1, q / max(1 - p, 1e-9)) ** 0.5
            first.append(math.log(accepted) if accepted else -1e3)
            second.append(math.log(otherwise) if otherwise else -1e3)
        found: list[tuple[float, int, int, int, tuple[int, ...]]] = []
        for depth in range(1, len(records) + 1):
            for earlier in range(-1, depth - 1):
                for last in (0, 1):
                    if not last and (depth - 1 - earlier) % size:
                        continue
                    path = [int(i == earlier) for i in range(depth - 1)] + [last]
                    weight = sum(first[: depth - 1]) + (second if last else first)[depth - 1]
                    if earlier >= 0:
                        weight += second[earlier] - first[earlier]
                    found.append((-round(weight, 9), depth, last, earlier, tuple(path)))
        return [path for *_, path in sorted(found)]
