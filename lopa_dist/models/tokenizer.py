"""Loading tokenizers without remote code."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_dist.models.files import CheckpointError, read_json_if_there

if TYPE_CHECKING:  # special tokens are read without transformers, which takes a second to import
    from transformers import PreTrainedTokenizerFast

RESERVED = re.compile(r"[<\[]\W*(reserved|unused|special|extra_id)\w*\W*[>\]]", re.IGNORECASE)
"""How tokenizers spell tokens that are reserved for later use."""

CLASS_WARNING = "The tokenizer class you load from this checkpoint is not the same type"
"""What transformers 4 says of every tokenizer that is read from its file, whichever class wrote it."""

SPACE = "▁"
"""How tokens are spelt that begin with a space, where a decoder may drop it."""

LETTERS = "a", "A", "1", "0"
"""Texts with which a tokenizer's behaviour is tested; one that can encode none of them is used without corrections."""

ANCHORS = "a", "\n", "1", "."
"""Texts to put before another text, to find the tokens that it has in the middle of a text (`tokens_after`)."""


def load_tokenizer(folder: Path, merged: Path | None = None) -> PreTrainedTokenizerFast:
    """Return the checkpoint's own tokenizer.

    It is read from `tokenizer.json`, else from `vocab.json` and `merges.txt`, which is all that Dream has: its
    tokenizer class is remote code, but equals Qwen2's byte-level BPE.

    Args:
        folder: of the checkpoint.
        merged: folder of an adapter that is merged into it, whose chat template counts if the checkpoint has none.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast
    if not (folder / "tokenizer.json").exists():
        if not (folder / "vocab.json").exists() or not (folder / "merges.txt").exists():
            raise CheckpointError(f"{folder}: no tokenizer.json, and no vocab.json with merges.txt")
        from transformers import Qwen2TokenizerFast  # it takes a tenth of a process's start-up, and few need it

        kind = Qwen2TokenizerFast
    try:
        with without(CLASS_WARNING):
            tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its libraries' errors for damaged files have no common type
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: its tokenizer cannot be read ({reason}); fetch the files again") from error
    if merged and not tokenizer.chat_template and (own := chat_templates(merged)):
        tokenizer.chat_template = own.get("default", own)
    return tokenizer


@contextmanager
def without(warning: str) -> Iterator[None]:
    """Leave out a warning of transformers about tokenizers, by how it begins."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(warning)

    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of tokens added to the vocabulary, by their text, from whichever files the checkpoint has.

    What `tokenizer.json` says counts, as in transformers: other files may be left over from another tokenizer.
    """
    ids = dict(read_json_if_there(folder / "added_tokens.json"))
    decoder = read_json_if_there(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    ids |= {token["content"]: int(number) for number, token in decoder.items()}
    whole = read_json_if_there(folder / "tokenizer.json")
    if ids and (known := vocabulary(whole)):
        taken = {*known.values()}
        ids = {text: known.get(text, number) for text, number in ids.items() if text in known or number not in taken}
    return ids | {token["content"]: token["id"] for token in whole.get("added_tokens", [])}


def words(folder: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's vocabulary, to which tokens are added, by their text."""
    return vocabulary(read_json_if_there(folder / "tokenizer.json")) or read_json_if_there(folder / "vocab.json")


def vocabulary(whole: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the vocabulary in a `tokenizer.json`, of which `whole` is the content; empty if it has none."""
    found = whole.get("model", {}).get("vocab") or {}
    return found if isinstance(found, dict) else {text: i for i, (text, _) in enumerate(found)}


def end_of_text(folder: Path, special: dict[str, int]) -> int | None:
    """Return the id of the tokenizer's `eos_token`, if it names one; `special` is from `special_tokens`."""
    files = (read_json_if_there(folder / f"{name}.json") for name in ("tokenizer_config", "special_tokens_map"))
    named = next((eos for file in files if (eos := file.get("eos_token"))), None)
    if named is None:
        return None
    text = named["content"] if isinstance(named, dict) else str(named)
    return special[text] if text in special else words(folder).get(text)


def chat_templates(folder: Path) -> dict[str, str]:
    """Return a tokenizer's chat templates by their names; a single one is the ``default``."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    written = read_json_if_there(folder / "tokenizer_config.json").get("chat_template")
    if written is None:
        written = read_json_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(written, str):
        return {"default": written}
    return {str(one["name"]): str(one["template"]) for one in written or ()}


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
    """Return the text of tokens, without special ones.

    Args:
        tokenizer: the model's.
        tokens: of the text.
        after: tokens of a text that this one continues (`anchor`). Without them, some decoders (Llama 2's) drop the
            space with which the text begins.
    """
    before, text = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (after, [*after, *tokens]))
    return text[len(before) :]


def anchor(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the token of a letter or digit, which stands for any text that another one continues; else nothing."""
    for text in LETTERS:
        last = encoded(tokenizer, text)[-1:]
        if text_of(tokenizer, last).strip() == text:
            return last
    return []


def begins_with_space(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> bool:
    """Return whether a text's first token has a space of its own, which a decoder may drop at the text's beginning."""
    return bool(tokens) and str(tokenizer.convert_ids_to_tokens(int(tokens[0]))).startswith(SPACE)


def encoded(tokenizer: PreTrainedTokenizerFast, text: str, special: bool = False) -> list[int]:
    """Return the tokens of a text, perhaps with special ones around it; empty if the tokenizer cannot encode it."""
    try:
        return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids)
    except Exception:  # the vocabulary has no token for unknown text; the library's errors have no type of their own
        return []


def tokens_after(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text that stands after another one.

    Some tokenizers (Llama 2's) put a space before every text, which does not belong within one.
    """
    before = anchor(tokenizer)
    text_before = str(tokenizer.decode(before))

    def read(tokens: list[int]) -> str:
        return str(tokenizer.decode([*before, *tokens]))[len(text_before) :]

    alone = list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    if read(alone) == text:
        return alone
    for first in ANCHORS:
        begun, whole = encoded(tokenizer, first), encoded(tokenizer, first + text)
        rest = whole[len(begun) :]
        if whole[: len(begun)] == begun and read(rest) == text:
            return rest
    return alone


def tokens_at_end(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the special tokens that a tokenizer puts after a text, such as an end-of-text; most put none."""
    for text in LETTERS:
        plain, whole = encoded(tokenizer, text), encoded(tokenizer, text, special=True)
        for begin in range(len(whole)) if plain else ():
            if whole[begin : begin + len(plain)] == plain:
                return whole[begin + len(plain) :]
    return []


def unused_token(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> int:
    """Return a token that no text has: the last one that the tokenizer does not know, or reserves.

    If there is none, return the first id after the vocabulary.

    Args:
        tokenizer: the model's.
        vocabulary: how many tokens have an embedding.
    """
    known = {number: text for text, number in tokenizer.get_vocab().items()}
    for number in reversed(range(vocabulary)):
        if number not in known or RESERVED.fullmatch(known[number]):
            return number
    return vocabulary
