"""From items to token ids: what a prompt may not contain."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lopa_dist.composing import composed
from lopa_dist.config import Config, ModelOptions, TaskConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Generation, Request
from lopa_dist.jobs.run.answers import finished_text
from lopa_dist.jobs.run.prompts import Encoder, Rejection
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.task import Continuation, Item, Origin
from tests.conftest import SMALL
from tests.models.test_tokenizer import llama_2

WORDS = replace(SMALL, vocab_size=496)  # as many as the embedded model's tokenizer needs


@pytest.mark.parametrize("called", [None, "<|mdm_mask|>"], ids=["LLaDA", "Dream"])
def test_a_literal_mask_token_is_that_requests_error(called: str | None) -> None:
    """Whether or not the tokenizer calls it its mask token; LLaDA's and iLLaDA's do not."""
    raw = Tokenizer(models.WordLevel({"say": 0, "it": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken("<|mdm_mask|>", normalized=False, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, mask_token=called)
    encoder = Encoder(Config(), replace(SMALL, mask_id=raw.token_to_id("<|mdm_mask|>")), tokenizer)
    rejection = encoder.encode(4, Item("a", prompt="say <|mdm_mask|> it"))
    assert rejection == Rejection(4, "the prompt contains the mask token '<|mdm_mask|>'; remove it")
    accepted = encoder.encode(5, Item("b", prompt="say it", max_new_tokens=8))
    assert isinstance(accepted, Request)
    assert list(accepted.prompt) == [0, 1]


def test_a_token_without_an_embedding_is_that_requests_error() -> None:
    """Tokenizers may have tokens that were added after the checkpoint was saved."""
    raw = Tokenizer(models.WordLevel({"say": 0, "far": SMALL.vocab_size, "?": 1}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    scope = DecodeConfig(max_new_tokens=8, context="vanilla")
    encoder = Encoder(replace(Config(), decode=scope), SMALL, PreTrainedTokenizerFast(tokenizer_object=raw))
    number = f"token 'far', which is number {SMALL.vocab_size}: the model has {SMALL.vocab_size} tokens"
    given = {
        "the prompt": Item("a", prompt="say far"),
        "the suffix": Item("b", prompt="say", suffix="far"),
        "the text": Item("c", prompt="say", continuations=(Continuation("far", "far", Item("c", prompt="say ")),)),
    }
    for where, item in given.items():
        rejection = encoder.encode(0, item)
        assert isinstance(rejection, Rejection)
        assert rejection.message.startswith(f"{where} contains the tokenizer's {number}")


@pytest.mark.parametrize("text", ["say it", "<s>say it"])
def test_a_prompt_begins_once(text: str) -> None:
    """As where it comes from a chat template; the tokenizer would put its first token before it again."""
    raw = Tokenizer(models.WordLevel({"say": 0, "it": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(["<s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    encoder = Encoder(Config(decode=DecodeConfig(max_new_tokens=8)), SMALL, tokenizer)
    request = encoder.encode(0, Item("a", prompt=text))
    assert isinstance(request, Request)
    assert list(request.prompt) == [3, 0, 1]
    context = Item("a", prompt=text)
    scored = encoder.encode(0, replace(context, continuations=(Continuation(" it", " it", context),)))
    assert isinstance(scored, Request)
    assert [list(part.prompt) + list(part.answer) for part in scored.scored[0]] == [[3, 0, 1, 1]]


def test_no_prompt_ends_with_an_end_of_text_of_the_tokenizer_s() -> None:
    """A continuation would be scored a token too late, and no model goes on after the end of a text."""
    words, model = [llama_2(ends) for ends in (False, True)], replace(SMALL, vocab_size=1000, mask_id=999)
    encoders = [Encoder(Config(decode=DecodeConfig(max_new_tokens=8)), model, one) for one in words]
    prompt = Item("a", prompt="Sam has", prefix="Sam")
    scored = replace(prompt, continuations=(Continuation(" 12", " 12", prompt),))
    assert encoders[0].encode(0, prompt) == encoders[1].encode(0, prompt)
    found = [encoder.encode(1, scored) for encoder in encoders]
    assert found[0] == found[1]
    assert isinstance(found[0], Request)
    assert words[0].convert_ids_to_tokens(found[0].scored[0][0].answer) == ["▁", "1", "2"]
    told = ["puts </s> after every text" in " ".join(encoder.warnings()) for encoder in encoders]
    assert told == [False, True]


def test_what_continues_a_text_is_told_from_a_message(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    """And a suffix has no space but its own."""
    vanilla = DecodeConfig(max_new_tokens=8, context="vanilla")
    plain = Encoder(Config(decode=vanilla), replace(SMALL, vocab_size=1000, mask_id=999), llama_2())
    chat = Encoder(Config(decode=vanilla), WORDS, embedded_tokenizer)
    turns = [{"role": "user", "content": "Tom has 3 coins ."}]
    items = [
        (plain, Item("a", prompt="Sam has"), True), (plain, Item("b", prompt="Sam has", suffix=" coins"), True),
        (chat, Item("c", messages=turns), False), (chat, Item("d", prompt="Tom has 3"), False),
        (chat, Item("e", messages=turns, answer_prefix="Tom"), True),
        (chat, Item("f", messages=turns, suffix=" coins"), False),
        (chat, Item("g", messages=[*turns, {"role": "assistant", "content": "Tom"}], suffix=" coins"), True),
    ]  # fmt: skip
    for encoder, item, continues in items:
        request = encoder.encode(0, item)
        assert isinstance(request, Request), item
        assert request.continues == continues, item
        if item.custom_id == "b":
            assert "".join(encoder.tokenizer.convert_ids_to_tokens(list(request.suffix))) == "▁coins"


def test_a_vocabulary_that_does_not_know_letters_is_taken_as_it_is() -> None:
    """As of DNA or sums, without a token for what is unknown: a probe lost tokens of prompts, or ended the job."""
    dna = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "A": 2, "C": 3, "G": 4, "T": 5}, []))
    sums = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "+": 2, "=": 3, "7": 4}, "[UNK]"))
    sums.pre_tokenizer = pre_tokenizers.Whitespace()
    for raw, text, wanted in ((dna, "ACGT", [0, 2, 3, 4, 5]), (sums, "7 + 7 =", [0, 4, 2, 4, 3])):
        raw.add_special_tokens(["<s>", "</s>"])
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        words = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
        scope = DecodeConfig(max_new_tokens=8, context="vanilla")
        encoder = Encoder(Config(decode=scope), replace(SMALL, vocab_size=1000, mask_id=999), words)
        request = encoder.encode(0, Item("a", prompt=text, suffix=text))
        assert isinstance(request, Request)
        assert (list(request.prompt), list(request.suffix)) == (wanted, wanted[1:])
        generation = Generation(request, wanted[1:], "length", 5, 1.0, 0.1, 9)
        assert finished_text(words, generation, []) == (generation, words.decode(wanted[1:]))


def test_stop_strings_that_no_text_has_are_told(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(Config(), WORDS, embedded_tokenizer)
    special = str(embedded_tokenizer.all_special_tokens[-1])
    ends = set(embedded_tokenizer.convert_ids_to_tokens(list(WORDS.eos_ids)))
    encoder.encode(0, Item("a", prompt="Tom", stop=("x",)))
    assert "special tokens" not in "".join(encoder.warnings())
    encoder.encode(0, Item("a", prompt="Tom", stop=(special, "x")))
    assert (f"stop strings that are special tokens ('{special}')" in "".join(encoder.warnings())) == (
        special not in ends
    )


def test_white_space_before_a_continuation_is_the_prompt_s(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    """As a chat template's; except in the harness's tasks, where it is scored."""
    encoder = Encoder(Config(model=ModelOptions(chat_template="never")), WORDS, embedded_tokenizer)
    before = Item("a", prompt="Tom has\n")
    counts = []
    for spaces in (False, True):
        continuation = Continuation("3", "3", before, spaces)
        request = encoder.encode(0, replace(before, continuations=(continuation,)))
        assert isinstance(request, Request)
        counts.append(len(request.scored[0][0].answer))
    assert counts[1] > counts[0]


@pytest.mark.parametrize(("before", "text"), [("Tom has", " "), (None, " "), (" ", "  ")])
def test_a_continuation_without_a_token_is_that_request_s_error(
    embedded_tokenizer: PreTrainedTokenizerFast, before: str | None, text: str
) -> None:
    """A tokenizer may drop white space: the prompt's own last token would be scored, or nothing."""
    words = copy.deepcopy(embedded_tokenizer)
    words.backend_tokenizer.normalizer = normalizers.Strip()
    encoder = Encoder(Config(model=ModelOptions(chat_template="never")), WORDS, words)
    after = None if before is None else Item("a", prompt=before)
    item = Item("a", prompt="", continuations=(Continuation(text, text, after), Continuation("Tom", "Tom", after)))
    request = encoder.encode(0, item)
    assert isinstance(request, Rejection)
    assert "no token of its own" in request.message


TURNS = [
    {"role": "user", "content": "Tom has 3 coins ."},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "Ann has 4 coins ."},
]


@pytest.mark.parametrize(
    ("item", "template", "begins"),
    [
        (Item("a", prompt="Tom has 3 coins . Ann has 4", prefix="Tom has 3 coins ."), "never", "Tom has 3 coins ."),
        (Item("b", prompt="Tom has 31 coins", prefix="Tom has 3"), "never", "Tom has"),  # a token reaches over the end
        (Item("c", prompt="Tom has 3 coins", prefix=""), "never", ""),
        (Item("d", prompt="Tom has 3 coins", prefix="Ann"), "never", ""),
        (Item("e", messages=TURNS), "auto", "<|user|> Tom has 3 coins .<|assistant|> 3<|endoftext|>"),
        (Item("f", messages=TURNS[:1], prefix="Tom has"), "auto", "<|user|> Tom has"),
        (Item("g", messages=TURNS[:1]), "auto", ""),
        (Item("h", prompt="Tom has 3 coins"), "auto", ""),
    ],
    ids=lambda value: value.custom_id if isinstance(value, Item) else "",
)
def test_prefixes(embedded_tokenizer: PreTrainedTokenizerFast, item: Item, template: str, begins: str) -> None:
    config = Config(model=ModelOptions(chat_template=template), engine=EngineConfig())
    config = replace(config, decode=DecodeConfig(max_new_tokens=64, context="blocks"))
    request = Encoder(config, WORDS, embedded_tokenizer).encode(0, item)
    assert isinstance(request, Request)
    prompt = list(request.prompt)
    found = embedded_tokenizer.decode(prompt[: request.prefix])
    assert found.startswith(begins)
    assert bool(begins) == bool(found)
    assert len(found) <= len(begins) + len("<|user|>")  # of the next turn's beginning, where the template has one
    alone = replace(config, engine=EngineConfig(prefix_cache="none"))
    assert Encoder(alone, WORDS, embedded_tokenizer).encode(0, item) == replace(request, prefix=0)


@pytest.mark.parametrize(("context", "cache"), [("causal", "exact"), ("blocks", "exact"), ("causal", "none")])
def test_what_prompts_begin_alike_with_is_cut_off_in_causal_models(
    embedded_tokenizer: PreTrainedTokenizerFast, context: str, cache: str
) -> None:
    """Elsewhere a row's last bits depend on where prompts are cut, so a cut does not depend on other prompts."""
    plain = ModelOptions(chat_template="never")
    config = Config(model=plain, decode=DecodeConfig(max_new_tokens=64, context=context, drafts=0))
    encoder = Encoder(replace(config, engine=EngineConfig(prefix_cache=cache)), WORDS, embedded_tokenizer)
    task = "Tom has 3 coins ." + " Tom has 3 coins ." * 4
    requests = encoder.encode_all(0, [Item(own, prompt=task + own) for own in (" Ann has 4", " Sue", " Leo has 2")])
    alike = len(embedded_tokenizer(task).input_ids) if (context, cache) == ("causal", "exact") else 0
    assert [request.prefix for request in requests if isinstance(request, Request)] == [0, alike, alike]


@pytest.mark.parametrize(("where", "said"), [("", ""), ("b.csv, line 2", " (b.csv, line 2)")])
def test_a_line_that_is_refused_is_found_in_its_file(
    embedded_tokenizer: PreTrainedTokenizerFast, where: str, said: str
) -> None:
    item = Item("a", prompt="", origin=Origin(7, "a", where=where))
    encoder = Encoder(Config(model=ModelOptions(chat_template="never")), WORDS, embedded_tokenizer)
    assert encoder.encode(3, item) == Rejection(3, "the prompt is empty; give at least one token", f"line 7{said}")


def test_words_that_the_embedded_model_does_not_know_are_told(
    embedded_model: Any, embedded_tokenizer: PreTrainedTokenizerFast
) -> None:
    own = list(Batch(str(Path(__file__).parents[3] / "examples" / "prompts.jsonl"), score="exact").items())
    short = DecodeConfig(max_new_tokens=64)
    encoder = Encoder(Config(decode=short), embedded_model.config, embedded_tokenizer)
    assert not any(isinstance(one, Rejection) for one in encoder.encode_all(0, own))
    assert encoder.warnings() == []
    strange = [Item(name, f"{name} has {count} pens .") for name, count in (("Sam", 127), ("Tom", 3), ("Sam", 3))]
    encoder.encode_all(0, strange)
    assert "model=embedded does not know ('127', 'Tom'): 2. Its answers" in encoder.warnings()[0]
    other = Encoder(Config(model=ModelOptions(path="my/own"), decode=short), embedded_model.config, embedded_tokenizer)
    other.encode_all(0, strange)
    assert other.warnings() == []


def test_answers_that_repeat_one_another_are_told(
    tmp_path: Path, embedded_model: Any, embedded_tokenizer: PreTrainedTokenizerFast
) -> None:
    problem, warm = "Sam has 3 books .", {"temperature": 1}
    lines = [{"prompt": problem, "n": 3}, {"prompt": problem, "n": 2} | warm, {"prompt": problem}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = list(Batch(str(tmp_path / "in.jsonl")).items())
    for temperature, told in ((0.0, "2 answers only repeat another answer to the same prompt"), (1.0, "")):
        decode = DecodeConfig(max_new_tokens=64, temperature=temperature)
        encoder = Encoder(Config(decode=decode), embedded_model.config, embedded_tokenizer)
        encoder.encode_all(0, items)
        assert "".join(encoder.warnings()).startswith(told)
        assert len(encoder.warnings()) == bool(told)


@pytest.mark.parametrize(("own", "told"), [({}, True), ({"temperature": 0.7}, False)])
def test_filters_of_a_job_that_draws_nothing_are_told(
    tmp_path: Path,
    embedded_model: Any,
    embedded_tokenizer: PreTrainedTokenizerFast,
    own: dict[str, float],
    told: bool,
) -> None:
    """Not where a line has a temperature of its own."""
    lines = [{"prompt": "Sam has 3 books ."}, {"prompt": "Ann has 4 books ."} | own]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    decode = DecodeConfig(max_new_tokens=64, top_k=1, top_p=0.9)
    encoder = Encoder(Config(decode=decode), embedded_model.config, embedded_tokenizer)
    encoder.encode_all(0, list(Batch(str(tmp_path / "in.jsonl")).items()))
    said = [warning for warning in encoder.warnings() if warning.startswith("decode.top_p=0.9 and decode.top_k=1: ")]
    assert len(said) == told


@pytest.mark.parametrize(
    ("decode", "own", "told"),
    [
        ({"temperature": 1.0}, {}, ""),
        ({"temperature": 0.7}, {}, "a top_p or a top_k: 1. decode.tau_conf and the ranking"),
        ({"temperature": 1.0, "top_k": 1}, {}, "a top_p or a top_k: 1. decode.tau_conf"),
        ({"temperature": 0.7, "tau_entropy": 0.5}, {}, "a top_p or a top_k: 1. decode.tau_entropy"),
        ({"temperature": 0.7, "context": "causal", "drafts": 2}, {}, ""),
        ({}, {"temperature": 0.5}, "a top_p or a top_k: 1. decode.tau_conf"),
        ({}, {"top_p": 0.5}, "requests with a top_p or top_k of their own at temperature 0: 1."),
    ],
)
def test_what_sampling_does_to_thresholds_is_said(
    tmp_path: Path,
    embedded_model: Any,
    embedded_tokenizer: PreTrainedTokenizerFast,
    decode: dict[str, Any],
    own: dict[str, Any],
    told: str,
) -> None:
    """A masked model fills what is above a threshold, of the probabilities after temperature and filters."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Sam has 3 books ."} | own))
    config = Config(decode=DecodeConfig(max_new_tokens=64, **({"verify": "confidence", "drafts": 0} | decode)))
    encoder = Encoder(config, embedded_model.config, embedded_tokenizer)
    encoder.encode_all(0, list(Batch(str(tmp_path / "in.jsonl")).items()))
    said = [warning for warning in encoder.warnings() if warning.startswith("requests with a ")]
    assert len(said) == bool(told)
    assert told in "".join(said)


@pytest.mark.parametrize("pattern", ["vanilla", "d2f", "block_diffusion"])
@pytest.mark.parametrize("context", ["d2f_causal", "vanilla", "dual", "d2f", "blocks"])
def test_masks_that_training_did_not_show_are_told(
    embedded_tokenizer: PreTrainedTokenizerFast, pattern: str, context: str
) -> None:
    """The shipped model is right in 100 % of 60 answers with context d2f, in 77 % with vanilla and 57 % with dual."""
    config = Config(model=ModelOptions(pattern=pattern), decode=DecodeConfig(max_new_tokens=8, context=context))
    warnings = Encoder(config, WORDS, embedded_tokenizer).warnings()
    told = [warning for warning in warnings if "was trained to see no masks after its block" in warning]
    assert len(told) == (pattern != "vanilla" and context in ("vanilla", "dual"))


def test_a_format_without_a_temperature_is_told(
    tmp_path: Path, embedded_model: Any, embedded_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Before the job spends an hour on answers that cannot be tried again; not where one try is what was asked for."""
    line, warm = {"prompt": "Sam has 3 books ."}, {"temperature": 1}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (line, line | warm, line)))
    for tries, formats, told in (
        (3, "json_object", "at temperature 0: 2. An"), (1, "json_object", ""), (3, None, ""),
        (5, None, "task.tries=5 has no effect: no request has a response_format"),
    ):  # fmt: skip
        items = list(Batch(str(tmp_path / "in.jsonl"), response_format=formats, tries=tries).items())
        task = TaskConfig("batch", input=str(tmp_path / "in.jsonl"), tries=tries)
        job = Config(task=task, decode=DecodeConfig(max_new_tokens=64))
        encoder = Encoder(job, embedded_model.config, embedded_tokenizer)
        encoder.encode_all(0, items)
        assert told in "".join(encoder.warnings())
        assert len(encoder.warnings()) == bool(told)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_is_too_long_is_cut_where_that_is_wished(
    embedded_tokenizer: PreTrainedTokenizerFast, side: str
) -> None:
    """The chat template and earlier messages stay; what fits is not changed."""
    words = " ".join(f"Tom has {n % 10} coins ." for n in range(60))
    small = replace(SMALL, max_positions=128, vocab_size=496, mask_id=1)
    config = replace(composed([f"task.truncate={side}"]), decode=DecodeConfig(max_new_tokens=32))
    encoder = Encoder(config, small, embedded_tokenizer)
    items = [Item("a", words), Item("b", messages=[*TURNS[:2], {"role": "user", "content": words}]), Item("c", "Tom")]
    items.append(Item("d", messages=[{"role": "user", "content": words}, TURNS[0]]))
    vanilla = replace(config, decode=DecodeConfig(max_new_tokens=32, context="vanilla"))
    before = Encoder(vanilla, small, embedded_tokenizer).encode(0, Item("e", words, suffix="Tom has 3 coins ."))
    assert isinstance(before, Request)
    assert 92 <= len(before.prompt) + len(before.suffix) <= 96, "with room for what comes after"
    for item, request in zip(items, encoder.encode_all(0, items), strict=True):
        if item.custom_id == "d":
            assert isinstance(request, Rejection)
            assert (
                "shorten the prompt (task.truncate cuts the last message alone: fewer task.fewshot" in request.message
            )
            continue
        assert isinstance(request, Request)
        text = str(embedded_tokenizer.decode(list(request.prompt)))
        turns = ["Tom has 3 coins ."] if item.custom_id == "b" else []
        head = "".join(f"<|user|> {turn}<|assistant|> 3<|endoftext|>" for turn in turns) + "<|user|>"
        assert text.startswith(head)
        assert text.endswith("<|assistant|>")
        own = text.removeprefix(head).removesuffix("<|assistant|>").strip()
        if item.custom_id == "c":
            assert own == "Tom"
        else:
            assert 92 <= len(request.prompt) <= 96
            assert (words.endswith if side == "left" else words.startswith)(own)
    where = "beginning, where instructions may stand" if side == "left" else "end"
    assert encoder.warnings()[-1].endswith(f"cut (task.truncate={side}: at their {where}): 2")
    plain = Encoder(replace(config, task=composed([]).task), small, embedded_tokenizer)
    assert isinstance(plain.encode(0, items[0]), Rejection)


def test_a_template_that_refuses_what_is_left_of_a_prompt_costs_no_other_request(
    embedded_tokenizer: PreTrainedTokenizerFast,
) -> None:
    strict = copy.deepcopy(embedded_tokenizer)
    strict.chat_template = (
        "{% if messages[-1]['content'][:3] != 'Tom' %}{{ raise_exception('say Tom first') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    config = replace(composed(["task.truncate=left"]), decode=DecodeConfig(max_new_tokens=32))
    encoder = Encoder(config, replace(SMALL, max_positions=64, vocab_size=496, mask_id=1), strict)
    items = [Item("a", messages=[{"role": "user", "content": "Tom" + " has 3 coins ." * 30}]), Item("b", "Tom")]
    cut, other = encoder.encode_all(0, items)
    assert isinstance(cut, Rejection)
    assert "say Tom first" in cut.message
    assert isinstance(other, Request)


def test_messages_that_a_template_leaves_out_are_told(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(embedded_tokenizer)
    tokenizer.chat_template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    encoder = Encoder(Config(decode=DecodeConfig(max_new_tokens=8)), SMALL, tokenizer)
    turns = [{"role": "assistant", "content": "Yes ."}, {"role": "user", "content": " Tom has 3 coins ."}]
    encoder.encode(0, Item("a", messages=turns))
    assert "are not in their prompts" not in "".join(encoder.warnings())
    encoder.encode(1, Item("b", messages=[{"role": "bot", "content": "Sam has 4 coins ."}, *turns]))
    call = {"type": "function", "function": {"name": "o", "arguments": "{}"}}  # the prompt has this letter
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    encoder.encode(2, Item("c", messages=[called, {"role": "user", "content": "Tom has 3 coins ."}]))
    assert "messages of the role 'bot' and tool_calls of chats are not in their prompts" in "".join(encoder.warnings())
    assert "may treat other roles as the user's" not in "".join(encoder.warnings())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder.encode(3, Item("d", messages=[{"role": "agent", "content": "Tom has 3 coins ."}]))
    assert "messages of the role 'agent': many chat templates know system, user" in "".join(encoder.warnings())


def test_models_that_lines_name_are_told(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    """The job's own name, also with an owner before it, is no other model's."""
    path = Config().model.path
    for names, said in ((["", path, f"me/{path}"], ""), (["gpt-4o", "x", "gpt-4o"], "the model 'gpt-4o', 'x': model=")):
        encoder = Encoder(Config(), WORDS, embedded_tokenizer)
        for number, name in enumerate(names):
            origin = Origin("1", number + 1, "completion", model=name or None)
            encoder.encode(number, Item("1", prompt="Tom has 3", origin=origin))
        [told] = [text for text in encoder.warnings() if "lines ask for" in text] or [""]
        assert said in told
        assert bool(said) == bool(told)


def test_a_missing_chat_template_is_told(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    """The texts of an instruct model that lost its own are garbage; who wants none says so."""
    tokenizer = copy.deepcopy(embedded_tokenizer)
    for mode, template, told in (("auto", None, 1), ("never", None, 0), ("auto", embedded_tokenizer.chat_template, 0)):
        tokenizer.chat_template = template
        config = Config(model=ModelOptions(path="my/own", chat_template=mode), decode=DecodeConfig(max_new_tokens=8))
        warnings = Encoder(config, SMALL, tokenizer).warnings()
        assert len(warnings) == told
        assert all("model=my/own has no chat template: prompts go in as they are" in warning for warning in warnings)


def test_what_a_checkpoint_asks_for_and_does_not_get_is_told(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    told = Encoder(Config(), replace(WORDS, not_applied=("repetition_penalty=1.05",)), embedded_tokenizer).warnings()
    assert any("generation_config.json has repetition_penalty=1.05: not applied here" in warning for warning in told)


THINKING = (
    "{% for m in messages %}<|user|> {{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
)


def test_the_template_gets_its_variables(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(embedded_tokenizer)
    tokenizer.chat_template = THINKING

    def rendered(**given: Any) -> Any:
        config = Config(model=ModelOptions(template=given), decode=DecodeConfig(max_new_tokens=8))
        return Encoder(config, SMALL, tokenizer).render(Item("a", messages=TURNS[:1])).text

    assert rendered() == rendered(enable_thinking=True) == "<|user|> Tom has 3 coins .<|assistant|>"
    assert rendered(enable_thinking=False) == rendered() + "<think>\n\n</think>"
    with pytest.raises(ValueError, match=r"has thinking, which .* does not read; it reads enable_thinking"):
        rendered(thinking=False)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="it reads nothing but the messages"):
        rendered(enable_thinking=False)
    assert composed(["model.template={enable_thinking: false}"]).model.template == {"enable_thinking": False}
    with pytest.raises(ValueError, match=r"model\.template"):
        composed(["model.template=thinking"])


def test_a_limit_that_no_prompt_could_have_is_bounded_by_the_model(
    embedded_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The default is 512, and so many positions have some models; a limit that could be had is not changed."""
    small = replace(SMALL, max_positions=512, vocab_size=496, mask_id=1)
    config = replace(Config(), model=ModelOptions(chat_template="never"))
    encoder = Encoder(config, small, embedded_tokenizer)
    found = encoder.encode(0, Item("a", prompt="Tom has 3 coins"))
    assert isinstance(found, Request)
    assert found.max_new_tokens == 512 - len(found.prompt)
    warning = encoder.warnings()[-1]  # the first is of a word that the package's models do not know
    assert "decode.max_new_tokens=512: the model has 512 positions" in warning
    asked = Encoder(replace(config, decode=DecodeConfig(max_new_tokens=511)), small, embedded_tokenizer)
    assert isinstance(asked.encode(0, Item("a", prompt="Tom has 3 coins")), Rejection)
    own = encoder.encode(0, Item("a", prompt="Tom has 3 coins", max_new_tokens=511))
    assert isinstance(own, Rejection)
