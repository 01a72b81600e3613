"""Encodes a task's items as token ids, or finds the reason why an item cannot run."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, takewhile
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerFast

from lopa_dist.config import Config
from lopa_dist.encodable import encodable
from lopa_dist.engine.prefix_rules import cuts_prefix
from lopa_dist.engine.request import Given, Request, request_key
from lopa_dist.jobs.run.beginnings import Beginnings
from lopa_dist.jobs.run.prompt_notes import PromptNotes
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.files import SHIPPED
from lopa_dist.models.tokenizer import tokens_after, tokens_at_end
from lopa_dist.tasks.task import DEFAULT, Item

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
ROLES = {"system", "user", "assistant", "tool", "developer", "function", "ipython"}
REWRITTEN = {"assistant", "tool"}  # roles whose messages a template may change, such as earlier reasoning
OF_EVERY_TEMPLATE = ("messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now")


class Text(NamedTuple):
    """A text to be tokenized, and whether the tokenizer's special tokens are put around it."""

    text: str
    special: bool


class Refusal(Exception):
    """An error with the reason why an item cannot run."""


@dataclass(frozen=True)
class Rejection:
    """An item that never reaches the engine.

    A prompt that the model refuses, such as one that is too long, is rejected once for each of its samples: shards and
    traces count indices in the input, which must not depend on the model.
    """

    index: int
    reason: str
    place: str = ""  # the line of its input, unless the reason names it

    @property
    def message(self) -> str:
        """The reason, with the line."""
        return f"{self.place}: {self.reason}" if self.place else self.reason


class Encoder:
    """Renders prompts with the tokenizer's own chat template and checks them against the model."""

    def __init__(self, config: Config, model: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        mode = config.model.chat_template
        if mode == "always" and not tokenizer.chat_template:
            raise ValueError("model.chat_template=always: this tokenizer has no chat template; use never")
        self.wrap = wraps(tokenizer, mode)
        check_template(config.model.template, str(tokenizer.chat_template or ""))
        self.templated = partial(tokenizer.apply_chat_template, tokenize=False, **config.model.template)
        self.cuts = cuts_prefix(config.decode, config.engine.prefix_cache)
        # in other models a row's last bits depend on where its prompt is cut, so other prompts must not decide that
        self.beginnings = Beginnings() if self.cuts and config.decode.causal else None
        self.words = tokenizer.backend_tokenizer  # finds tokens and nothing else; transformers makes more of each text
        self.words.no_truncation()
        self.words.no_padding()
        # the package's models know a few hundred words, and spell all others in bytes that mean nothing to them
        shipped = config.model.path in SHIPPED
        self.bytes = {i for word, i in tokenizer.get_vocab().items() if shipped and BYTE.fullmatch(word)}
        ends = set(tokenizer.convert_ids_to_tokens(list(model.eos_ids)))
        self.special = set(tokenizer.all_special_tokens) - ends
        self.notes = PromptNotes(config, model, bool(tokenizer.chat_template))
        self.at_end = tokens_at_end(tokenizer)  # left out: no model continues a text that has ended
        self.tokens = lru_cache(8)(lambda text: self.tokenized([text])[text])

    def choose(self, item: Item) -> Item:
        """Return an item with only one form of its prompt.

        If it has both, its messages are kept if prompts go through the chat template, otherwise its text.
        """
        if item.prompt is None or item.messages is None:
            return item
        return replace(item, prompt=None) if self.wrap else replace(item, messages=None, answer_prefix="")

    def encode(self, index: int, item: Item) -> Request | Rejection:
        """Return one item as a request."""
        return self.encode_all(index, [item])[0]

    def encode_all(self, first: int, items: Sequence[Item]) -> list[Request | Rejection]:
        """Return items as requests, the first with index `first`. Many together are tokenized several times as fast."""
        requests: dict[int, Request | Rejection] = {}
        texts: dict[int, list[Text]] = {}
        for index, item in enumerate(items, first):
            try:
                texts[index] = self.texts(item)
            except Refusal as refusal:
                requests[index] = rejected(index, item, refusal)
        tokens = self.tokenized(chain.from_iterable(texts.values()))
        copies = Counter(own[0] for own in texts.values())
        for index, own in texts.items():
            item = items[index - first]
            try:
                if item.continuations:
                    requests[index] = self.scored(index, item, own, tokens)
                    continue
                whole = own
                if self.config.task.truncate:
                    item, own = self.truncated(item, own, tokens)
                request = self.request(index, item, own, tokens)
                if own is not whole:
                    self.notes.cut.add(index)
                if self.beginnings:
                    cut = self.beginnings.cut(request.prompt, request.prefix, copies[own[0]])
                    request = replace(request, prefix=cut)
                requests[index] = request
            except Refusal as refusal:
                requests[index] = rejected(index, item, refusal)
        return [requests[index] for index in sorted(requests)]

    def texts(self, item: Item) -> list[Text]:
        """Return the prompt of an item or, for each of its continuations, the text before it and both together."""
        if item.error:
            raise Refusal(item.error)
        named = item.origin.model if item.origin else None
        if named and named.rpartition("/")[2] != self.config.model.path.rstrip("/").rpartition("/")[2]:
            self.notes.other_models[named] = None
        if not item.continuations:
            return [self.render(item)]
        texts = []
        for continuation in item.continuations:
            prompt, chat = "", self.wrap
            if continuation.after is not None:
                context = self.choose(continuation.after)
                prompt, chat = self.render(context).text, self.is_chat(context)
            text = continuation.text_in_chat if chat else continuation.text
            if not text:
                raise Refusal("the continuation is empty: give at least one character")
            if encodable(text) != text:
                raise Refusal("the continuation has half of a surrogate pair, which is not a character; remove it")
            special = bool(prompt) and not self.begins(prompt, chat)
            before = prompt.rstrip() if continuation.spaces else prompt
            texts += [Text(before, special), Text(prompt + text, special)]
        return texts

    def tokenized(self, texts: Iterable[Text]) -> dict[Text, list[int]]:
        """Return the tokens of each text."""
        tokens: dict[Text, list[int]] = {}
        distinct = dict.fromkeys(texts)
        for special in (False, True):
            alike = [text for text in distinct if text.special == special]
            encodings = self.words.encode_batch_fast([text.text for text in alike], add_special_tokens=special)
            end = None
            if special and alike and self.at_end:
                end, self.notes.at_end = -len(self.at_end), self.tokenizer.convert_ids_to_tokens(self.at_end)
            tokens.update(zip(alike, (encoding.ids[:end] for encoding in encodings), strict=True))
        return tokens

    def truncated(self, item: Item, texts: list[Text], tokens: dict[Text, list[int]]) -> tuple[Item, list[Text]]:
        """Return the item and its text, with its prompt or last message cut until the text fits the model.

        The text's tokens are added to `tokens`. The rest of a text may have more tokens by itself than it had within
        the whole text, so it may be cut several times.
        """
        most = self.config.decode.max_new_tokens if item.max_new_tokens is None else item.max_new_tokens
        room = self.model.max_positions - most
        if room <= 0:  # no prompt leaves room for so many: half of the positions are then the answer's
            room = self.model.max_positions // 2
        if item.suffix is not None:
            room -= len(tokens_after(self.tokenizer, item.suffix))
        content = item.messages[-1]["content"] if item.messages else item.prompt or ""
        offsets = self.words.encode(content, add_special_tokens=False).offsets
        gone, left = 0, self.config.task.truncate == "left"
        while (excess := len(tokens[texts[0]]) - room) > 0:
            gone += excess
            if gone >= len(offsets):  # the template or earlier messages are too long by themselves
                return item, texts
            kept = content[offsets[gone][0] :] if left else content[: offsets[-gone][0]]
            if item.messages:
                item = replace(item, messages=[*item.messages[:-1], {**item.messages[-1], "content": kept}])
            else:
                item = replace(item, prompt=kept)
            texts = [self.render(item)]
            tokens.update(self.tokenized(texts))
        return item, texts

    def scored(self, index: int, item: Item, texts: Sequence[Text], tokens: Mapping[Text, list[int]]) -> Request:
        """Return an item's continuations as a request, checked against the model."""
        self.notes.scores = True
        most, seed, begin = self.model.max_positions, self.config.seed, self.tokenizer.bos_token_id
        first = self.model.eos_ids[0] if begin is None else int(begin)  # what a document without a prompt begins with
        least = int(self.model.shift or self.config.decode.causal)  # tokens that must be before a continuation
        scored: list[tuple[Given, ...]] = []
        for before, both in zip(texts[::2], texts[1::2], strict=True):
            whole = tokens[both]
            gone = max(len(whole) - most, 0)  # tokens too many
            self.check_tokens(whole, "the text")
            if whole == (tokens[before] if before.text else []):
                raise Refusal("the continuation has no token of its own in this model's vocabulary; give it a word")
            # the two are tokenized together, so a token may reach across their border
            cut = max(0, min(len(tokens[before]), len(whole) - 1)) if before.text else 0
            if not before.text:
                parts = list(windows(whole, first, most - 1))
            elif cut < least:
                raise Refusal("no token is before the continuation, and this model predicts from one")
            elif gone and (self.config.task.truncate != "left" or cut - gone < least):
                reason = f"prompt and continuation have {len(whole)} tokens, but the model has {most} positions"
                raise Refusal(f"{reason}; shorten the prompt (in a job, fewer task.fewshot, or task.truncate=left)")
            else:
                if gone:
                    self.notes.cut.add(index)
                parts = [(whole[gone:cut], whole[cut:])]
            scored.append(tuple(Given.seeded(*part, seed) for part in parts))
        count = sum(len(part.answer) for text in scored for part in text)
        prompt = array("i", scored[0][0].prompt)
        return Request(index, prompt, count, self.key(item), scored=tuple(scored))

    def is_chat(self, item: Item) -> bool:
        """Return whether the item goes through the chat template: a plain text with a suffix does not."""
        return item.messages is not None or (self.wrap and item.suffix is None)

    def render(self, item: Item) -> Text:
        """Return the text that the model continues, in which a chat template writes the special tokens itself."""
        if item.error:
            raise Refusal(item.error)
        chat = self.is_chat(item)
        text = self.templated_chat(item) if chat else item.prompt or ""
        if encodable(text) != text:
            raise Refusal("the prompt has half of a surrogate pair, which is not a character; remove it")
        return Text(text, not self.begins(text, chat))

    def begins(self, text: str, chat: bool) -> bool:
        """Return whether a prompt begins as the model expects: from a chat template, or with its first token."""
        first = self.tokenizer.bos_token
        return chat or bool(first and text.startswith(str(first)))

    def templated_chat(self, item: Item) -> str:
        """Return the item's chat, as the template writes it."""
        if not self.tokenizer.chat_template:
            raise Refusal("messages need a chat template and this tokenizer has none; send prompt instead")
        messages = [{"role": "user", "content": item.prompt or ""}] if item.messages is None else item.messages
        if ends_within_answer(item):
            messages = messages[:-1]
        try:
            text = str(self.templated(messages, add_generation_prompt=True))
            self.note_roles(messages, text)
            return text + begun_answer(item)
        except Exception as error:  # a template is a program, and messages may hold anything
            raise Refusal(f"the chat template refused these messages: {error}") from error

    def note_roles(self, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        """Record the roles that templates seldom know, and what the template left out of a chat's `text`."""
        for message in messages:
            role = str(message["role"])
            if message["content"].strip() not in text and role not in REWRITTEN:
                self.notes.left_out.add(f"messages of the role {role!r}")
            elif role not in ROLES:
                self.notes.odd_roles.add(role)
        if any(message.get("tool_calls") for message in messages):
            without = [{key: value for key, value in one.items() if key != "tool_calls"} for one in messages]
            try:
                same = str(self.templated(without, add_generation_prompt=True)) == text
            except Exception:  # a template that needs the calls has read them
                same = False
            if same:
                self.notes.left_out.add("tool_calls")

    def prefix(self, item: Item, text: str, ids: list[int]) -> int:
        """Return how many of a prompt's tokens are its prefix: few-shot examples, or all messages but the last."""
        if not self.is_chat(item):
            end = len(item.prefix) if text.startswith(item.prefix) else 0
        elif item.messages and len(item.messages) > 1:
            try:
                before = str(self.templated(item.messages[:-1]))
            except Exception:  # not every template takes a system prompt alone
                return 0
            end = common_prefix(before, text)
        else:
            end = text.find(item.prefix) + len(item.prefix) if item.prefix in text else 0
        # a token may reach across the end; then the prefix ends before it
        special = not self.begins(text, self.is_chat(item))
        return common_prefix(self.tokens(Text(text[:end], special)), ids) if end else 0

    def request(self, index: int, item: Item, texts: Sequence[Text], tokens: Mapping[Text, list[int]]) -> Request:
        """Return an item's prompt as a request, checked against the model."""
        ids, decode = tokens[texts[0]], self.config.decode
        if not ids:
            raise Refusal("the prompt is empty; give at least one token")
        self.check_tokens(ids, "the prompt")
        most = item.max_new_tokens or decode.max_new_tokens
        if most > decode.max_new_tokens:
            limit = f"decode.max_new_tokens={decode.max_new_tokens}"
            raise Refusal(f"max_tokens={most} is above {limit}; lower it or raise that")
        suffix = self.suffix(item)
        given = len(ids) + len(suffix)
        room = self.model.max_positions - given
        if most >= self.model.max_positions and room > 0:  # no prompt leaves room for so many
            most, self.notes.bounded = room, True
        size = f"the prompt has {given} tokens and {most} are to be generated, but"
        shorter = "in a job, task.truncate does"
        if self.config.task.truncate:
            batch = self.config.task.name == "batch"
            fewer = "fewer task.fewshot, or task.fewshot_as_multiturn=false"
            shorter = f"task.truncate cuts the last message alone: {'shorten those before it' if batch else fewer}"
        remedy = f"shorten the prompt ({shorter}) or lower max_tokens (decode.max_new_tokens)"
        if given + most > self.model.max_positions:
            raise Refusal(f"{size} the model has {self.model.max_positions} positions; {remedy}")
        space = self.config.engine.kv_tokens
        if space is not None and decode.scope.caches_kv and given + most > space:
            raise Refusal(f"{size} engine.kv_tokens={space}; raise that, or shorten the prompt or max_tokens")
        self.notes.special_stops |= self.special.intersection(item.stop)
        sampling = self.sampling(item)
        if self.bytes and not self.bytes.isdisjoint(ids):
            self.note_strange(ids)
        self.notes.note_sampling(item, sampling)
        return Request(
            index,
            array("i", ids),  # 4 bytes per token; a list takes 8, and its numbers more: a job may have a million
            most,
            self.key(item),
            sampling,
            self.prefix(item, texts[0].text, ids) if self.cuts else 0,
            item.token_steps or self.config.logging.token_steps,
            item.stop,
            suffix,
            continues=not self.is_chat(item) or bool(begun_answer(item)),
        )

    def check_tokens(self, ids: Sequence[int], where: str) -> None:
        """Raise a Refusal that begins with `where` if tokens are the mask's, or have no embedding."""
        if (most := max(ids, default=0)) >= self.model.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(most)
            raise Refusal(
                f"{where} contains the tokenizer's token {token!r}, which is number {most}: the model has "
                f"{self.model.vocab_size} tokens. Remove it, or take the tokenizer that the model was trained with"
            )
        if self.model.mask_id in ids:
            mask = self.tokenizer.convert_ids_to_tokens(self.model.mask_id)  # not every tokenizer calls it mask_token
            raise Refusal(f"{where} contains the mask token {mask!r}; remove it")

    def suffix(self, item: Item) -> Sequence[int]:
        """Return the tokens after an item's answer."""
        if item.suffix is None:
            return ()
        decode = self.config.decode
        if decode.scope.window_attention != "full":
            raise Refusal(
                f"suffix: with decode.context={decode.context} no token sees anything after its block, so the answer "
                "cannot lead to the suffix; use decode.context=vanilla, with a model trained to see all of a text"
            )
        if encodable(item.suffix) != item.suffix:
            raise Refusal("the suffix has half of a surrogate pair, which is not a character; remove it")
        ids = tokens_after(self.tokenizer, item.suffix)
        self.check_tokens(ids, "the suffix")
        return array("i", ids)

    def note_strange(self, ids: list[int]) -> None:
        """Count a prompt with words that the model does not know."""
        self.notes.strange_prompts += 1
        if len(self.notes.strange) < 3:
            words = str(self.tokenizer.decode(ids, skip_special_tokens=True)).split()
            tokens = (self.words.encode(f" {word}", add_special_tokens=False).ids for word in words)
            unknown = (word for word, own in zip(words, tokens, strict=True) if not self.bytes.isdisjoint(own))
            self.notes.strange.append(next(unknown, "white space"))

    def warnings(self) -> list[str]:
        """Return warnings about the model and the requests so far, such as unknown words or cut prompts."""
        return list(self.notes.warnings().values())

    def sampling(self, item: Item) -> Sampling | None:
        """Return how the item's tokens are drawn; None if that is as for the whole job."""
        if item.sampling is DEFAULT:
            return None
        decode = self.config.decode
        asked = {name: getattr(item.sampling, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: getattr(decode, name) for name in asked}
        own = {name: given[name] if value is None else value for name, value in asked.items()}
        return None if own == given else Sampling(decode.confidence, **own)

    def key(self, item: Item) -> int:
        """Return what seeds the item's random numbers. With its own seed, its text is the same under any custom_id."""
        seed = item.sampling.seed
        if seed is None:
            return request_key(self.config.seed, item.custom_id)
        return request_key(seed, f"sample-{item.origin.sample if item.origin else 0}")


def ends_within_answer(item: Item) -> bool:
    """Return whether a chat's last message is the beginning of the assistant's answer, which leads to a suffix."""
    return item.suffix is not None and item.messages is not None and item.messages[-1]["role"] == "assistant"


def begun_answer(item: Item) -> str:
    """Return the text with which the assistant's answer to a chat begins; mostly empty."""
    return str(item.messages[-1]["content"]) if item.messages and ends_within_answer(item) else item.answer_prefix


def wraps(tokenizer: PreTrainedTokenizerFast, chat_template: str) -> bool:
    """Return whether plain prompts go through the chat template."""
    return bool(tokenizer.chat_template) and chat_template != "never"


def rejected(index: int, item: Item, refusal: Refusal) -> Rejection:
    """Return the rejection of an item, with the number of its line; an error of the line itself already has it."""
    if not item.origin or item.error:
        return Rejection(index, f"{refusal}")
    where = f" ({item.origin.where})" if item.origin.where else ""
    return Rejection(index, f"{refusal}", f"line {item.origin.line}{where}")


def check_template(given: Mapping[str, Any], template: str) -> None:
    """Raise a ValueError if there are `given` values that the chat template does not read."""
    if not given:
        return
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = meta.find_undeclared_variables(jinja.parse(template))
    except TemplateSyntaxError:  # it has tags of transformers' own
        return
    there = sorted(read - {*jinja.globals, *OF_EVERY_TEMPLATE})
    unknown = sorted(set(given) - set(there))
    if unknown:
        raise ValueError(
            f"model.template has {', '.join(unknown)}, which this tokenizer's chat template does not read; it reads "
            f"{', '.join(there) or 'nothing but the messages'}"
        )


def windows(tokens: Sequence[int], first: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a document's tokens in parts of at most `length`, each after as many of the tokens before it as fit.

    Args:
        tokens: of the document.
        first: the token before the document.
        length: the most tokens that the model can predict in one text.
    """
    text = [first, *tokens]
    for begin in range(1, len(text), length):
        end = min(begin + length, len(text))
        yield text[max(0, end - length - 1) : begin], text[begin:end]


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many elements two sequences have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
