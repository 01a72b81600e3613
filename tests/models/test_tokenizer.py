"""Tokenizers load from whichever files a checkpoint has, and never run its code."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

from lopa_dist.models.files import CheckpointError
from lopa_dist.models.tokenizer import (
    CLASS_WARNING,
    anchor,
    load_tokenizer,
    special_tokens,
    text_of,
    tokens_after,
    tokens_at_end,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    "The cat has 12345 apples.  Don't you?\n\n def f(x):\n\treturn x",
    "Zürich, e\u0301, नमस्ते, 你好, 🙂",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<|mask|><|mask|>",
    " leading, trailing ",
)


def dream_tokenizer(vocabulary: int) -> dict[str, Any]:
    """`tokenizer_config.json` as Dream has it."""
    options = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {
        "add_bos_token": False,
        "added_tokens_decoder": {str(vocabulary + i): {"content": name} | options for i, name in enumerate(SPECIAL)},
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "mask_token": "<|mask|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }


def llama_2(ends: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's: it puts a space before a text, and its decoder drops one."""
    letters = [chr(number) for number in range(33, 127)]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁", "▁▁", "at"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [("▁", "▁"), ("a", "t")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    single = "<s> $A </s>" if ends else "<s> $A"
    special = [("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same tokenizer twice: vocab.json and merges.txt as Dream ships it, and tokenizer.json."""
    separate, single = tmp_path_factory.mktemp("separate"), tmp_path_factory.mktemp("single")
    pattern = Qwen2TokenizerFast().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = pattern.normalizer, pattern.pre_tokenizer
    tokenizer.decoder = pattern.decoder
    alphabet = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 324) if c != 173]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.model.save(str(separate))
    config = dream_tokenizer(tokenizer.get_vocab_size())
    ids = {token["content"]: int(number) for number, token in config["added_tokens_decoder"].items()}
    (separate / "added_tokens.json").write_text(json.dumps(ids))
    (separate / "tokenization_dream.py").write_text("raise SystemExit('remote code was run')")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    tokenizer.save(str(single / "tokenizer.json"))
    for folder in (separate, single):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return separate, single


def test_both_forms_are_the_same_tokenizer(folders: tuple[Path, Path]) -> None:
    separate, single = (load_tokenizer(folder) for folder in folders)
    raw = Tokenizer.from_file(str(folders[1] / "tokenizer.json"))
    assert len(separate) == len(single) == raw.get_vocab_size()
    for text in TEXTS:
        ids = separate(text).input_ids
        assert ids == single(text).input_ids == raw.encode(text).ids
        assert separate.decode(ids) == single.decode(ids)
        assert separate.decode(ids, skip_special_tokens=True) == single.decode(ids, skip_special_tokens=True)
    for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id", "chat_template"):
        assert getattr(separate, name) == getattr(single, name) is not None


def test_special_tokens_are_one_id_each(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        tokenizer = load_tokenizer(folder)
        ids = [tokenizer(name).input_ids for name in SPECIAL]
        assert ids == [[special_tokens(folder)[name]] for name in SPECIAL]
        assert tokenizer.mask_token_id == ids[-1][0]


def test_special_tokens_from_any_one_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = special_tokens(folders[0])
    sources = [(folders[0], "added_tokens.json"), (folders[0], "tokenizer_config.json"), (folders[1], "tokenizer.json")]
    for i, (folder, name) in enumerate(sources):
        alone = tmp_path / str(i)
        alone.mkdir()
        (alone / name).write_text((folder / name).read_text())
        assert special_tokens(alone) == wanted
    assert special_tokens(tmp_path) == {}


def test_chat_template(folders: tuple[Path, Path]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for folder in folders:
        text = load_tokenizer(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_half_a_tokenizer_is_none(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text((folders[0] / "vocab.json").read_text())
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and no vocab\.json with merges\.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["    return x", " the dog", "the dog", "é", " é\n", "\n  x", "."])
def test_a_text_within_another_keeps_its_white_space(
    text: str, folders: tuple[Path, Path], embedded_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The oracle is what the tokens add to a text before them."""
    llama, qwen = llama_2(), load_tokenizer(folders[1])
    for tokenizer, known in ((llama, True), (qwen, True), (embedded_tokenizer, text.isascii())):
        tokens = tokens_after(tokenizer, text)
        begun = tokenizer("def f(x):\n", add_special_tokens=False).input_ids
        whole, before = (tokenizer.decode(ids) for ids in (begun + tokens, begun))
        assert whole[len(before) :] == text_of(tokenizer, tokens, anchor(tokenizer))
        assert text_of(tokenizer, tokens, anchor(tokenizer)) == text or not known
    assert tokens_after(qwen, text) == qwen(text).input_ids
    alone = text_of(llama, llama(text, add_special_tokens=False).input_ids)
    assert alone == text, "a text of its own has one space more, and loses it"


def test_what_a_tokenizer_puts_after_a_text_is_known(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokens_at_end(llama_2(ends=True)) == [2]
    assert tokens_at_end(llama_2()) == tokens_at_end(embedded_tokenizer) == []


def test_transformers_4_does_not_warn_of_every_tokenizer(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "propagate", True)
    logger.addHandler(caplog.handler)

    def warns(*_: Any, **__: Any) -> None:
        logger.warning("%s as the class this function is called from", CLASS_WARNING)
        logger.warning("another one")

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", warns)
    load_tokenizer(folders[1])
    assert {*caplog.messages} == {"another one"}
    warns()
    logger.removeHandler(caplog.handler)
    assert any(message.startswith(CLASS_WARNING) for message in caplog.messages), "elsewhere it is shown"
