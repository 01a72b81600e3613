"""What is odd about a job's prompts, or about its settings with these prompts, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from lopa_dist.config import Config
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import training_pattern
from lopa_dist.tasks.response_format import TRIES
from lopa_dist.tasks.task import Item


@dataclass
class PromptNotes:
    """What the encoder has noticed about prompts so far.

    Attributes:
        has_template: whether the tokenizer has a chat template.
    """

    config: Config
    model: ModelConfig
    has_template: bool
    at_end: list[str] = field(default_factory=list)  # tokens that the tokenizer puts after a text; they are left out
    strange: list[str] = field(default_factory=list)  # the first words that the model does not know, one per prompt
    strange_prompts: int = 0
    bounded: bool = False  # whether the model's positions bound an answer below `decode.max_new_tokens`
    cut: set[int] = field(default_factory=set)  # indices of prompts that were too long, by `task.truncate`
    left_out: set[str] = field(default_factory=set)  # what the chat template left out of chats
    odd_roles: set[str] = field(default_factory=set)  # roles that templates seldom know
    other_models: dict[str, None] = field(default_factory=dict)  # models that lines name, but this job does not load
    special_stops: set[str] = field(default_factory=set)  # stop strings that no text has, and that end no answer
    formats: int = 0  # requests with a format
    greedy_formats: int = 0  # requests with a format for which another try would give the same text
    draws: bool = False  # whether any request draws its tokens
    scores: bool = False  # whether texts are scored: a masked model's masks are drawn by the seed
    greedy_samples: int = 0  # further answers to a prompt, which will equal the first one
    greedy_filters: int = 0  # requests with a top_p or top_k that draw no token
    sharpened: int = 0  # requests of a masked model whose sampling changes the probabilities that fill tokens

    def note_sampling(self, item: Item, sampling: Sampling | None) -> None:
        """Count what follows from how an item's tokens are drawn; None: as for the whole job."""
        decode, wanted = self.config.decode, item.response_format
        way = sampling or decode
        self.draws |= way.temperature > 0
        own_thresholds = not decode.causal and decode.fill is None and decode.rule is None
        if own_thresholds and way.temperature and (way.temperature != 1 or way.top_p < 1 or way.top_k):
            self.sharpened += 1
        self.formats += wanted is not None
        if not way.temperature:
            self.greedy_filters += sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0)
            self.greedy_samples += bool(item.origin and item.origin.sample)
            self.greedy_formats += wanted is not None and wanted.tries > 1

    def warnings(self) -> dict[str, str]:
        """Return warnings about the model and the requests so far, such as unknown words or cut prompts, by kind.

        Warnings that differ only in numbers, or in which words are unknown, are of one kind.
        """
        messages: dict[str, str] = {}
        if not self.has_template and self.config.model.chat_template != "never":
            messages["template"] = (
                f"model={self.config.model.path} has no chat template: prompts go in as they are. That is right for a "
                "base model (model.chat_template=never says so); an instruct model's tokenizer_config.json or "
                "chat_template.jinja is missing, and its texts will be worse"
            )
        if self.model.not_applied and not self.scores:
            messages["generation config"] = (
                f"the model's generation_config.json has {', '.join(self.model.not_applied)}: not applied here; "
                "transformers may write other texts, even in greedy decoding"
            )
        if self.at_end:
            messages["ends"] = (
                f"the tokenizer puts {' '.join(self.at_end)} after every text: left out, because a prompt that has "
                "ended would not be continued"
            )
        decode, pattern = self.config.decode, training_pattern(self.model, self.config.model.pattern)
        if pattern.scope.kv_is_final and not decode.scope.kv_is_final:
            messages[f"context {decode.context}"] = (
                f"decode.context={decode.context}: model={self.config.model.path} was trained to see no masks after "
                "its block, and sees them here: its answers are likely to be worse than with decode.context="
                f"{pattern.context} (model.pattern says how a model was trained)"
            )
        if self.other_models:
            names = ", ".join(map(repr, islice(self.other_models, 3))) + (", ..." if len(self.other_models) > 3 else "")
            messages[f"models {names}"] = (
                f"lines ask for the model {names}: model={self.config.model.path} answers them. batch_output.jsonl "
                "repeats the name that a line gave"
            )
        if self.strange_prompts:
            words = ", ".join(repr(word) for word in dict.fromkeys(self.strange))
            messages["words"] = (
                f"prompts with words that model={self.config.model.path} does not know ({words}): "
                f"{self.strange_prompts}. Its answers to them mean nothing: it is a small model for trying things out. "
                "The repository's examples/prompts.jsonl has prompts that it reads; model=... or model.path=... takes "
                "another model"
            )
        if self.bounded:
            messages["bounded"] = (
                f"decode.max_new_tokens={self.config.decode.max_new_tokens}: the model has "
                f"{self.model.max_positions} positions, so an answer has at most as many tokens as its prompt leaves"
            )
        if self.special_stops:
            stops = ", ".join(map(repr, sorted(self.special_stops)))
            messages[f"stops {stops}"] = (
                f"stop strings that are special tokens ({stops}): no effect, because texts have no special tokens; the "
                "model's generation_config.json says which of them end answers"
            )
        if self.left_out:
            parts = " and ".join(sorted(self.left_out))
            messages[f"left out {parts}"] = (
                f"{parts} of chats are not in their prompts: the model's chat template leaves them out"
            )
        if self.odd_roles:
            roles = ", ".join(map(repr, sorted(self.odd_roles)))
            messages[f"roles {roles}"] = (
                f"messages of the role {roles}: many chat templates know "
                "system, user and assistant alone, and may treat other roles as the user's"
            )
        if self.cut:
            side = self.config.task.truncate
            gone = ", where instructions may stand" if side == "left" else ""
            messages[f"cut {side}"] = (
                f"prompts that were too long for the model, and were cut (task.truncate={side}: "
                f"at their {'beginning' if side == 'left' else 'end'}{gone}): {len(self.cut)}"
            )
        filters = [f"seed={self.config.seed}"] if self.config.seed else []
        filters += [f"decode.top_p={decode.top_p}"] if decode.top_p < 1 else []
        filters += [f"decode.top_k={decode.top_k}"] if decode.top_k else []
        if filters and not self.draws and not self.scores:
            keys = " ".join(one.partition("=")[0] for one in filters)
            messages[f"no effect {keys}"] = (
                f"{' and '.join(filters)}: no effect: at temperature 0 no token is drawn; set decode.temperature"
            )
        if self.greedy_filters:
            messages["filters of requests"] = (
                f"requests with a top_p or top_k of their own at temperature 0: {self.greedy_filters}. These have no "
                "effect: at temperature 0 no token is drawn"
            )
        if self.sharpened:
            threshold = "decode.tau_conf" if decode.tau_entropy is None else "decode.tau_entropy"
            messages["sharpened"] = (
                f"requests with a temperature other than 1, a top_p or a top_k: {self.sharpened}. {threshold} and the "
                "ranking of positions use probabilities after temperature and filters (as Dream's own program does): "
                "the sharper these are, the more tokens are filled at once, and unverified ones may be worse; compare "
                "with temperature 1"
            )
        if self.greedy_samples:
            messages["samples"] = (
                f"{self.greedy_samples} answers only repeat another answer to the same prompt: at temperature 0, all "
                "answers to a prompt are equal; set decode.temperature"
            )
        if self.greedy_formats:
            messages["formats"] = (
                f"requests with a response_format at temperature 0: {self.greedy_formats}. An answer of another form "
                "is not generated again, because that would give the same text; set decode.temperature"
            )
        if self.config.task.tries != TRIES and not self.formats:
            messages["tries"] = (
                f"task.tries={self.config.task.tries} has no effect: no request has a response_format, so every answer "
                "is the first one"
            )
        return messages
