"""What is resolved before a job runs; test_config.py has what auto comes to by the model."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from lopa_dist.composing import composed
from lopa_dist.config import Config
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.setup.resolve import by_model, resolve, sequences_of_replica
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import EMBEDDED, find

CPU = torch.device("cpu")


def config(*overrides: str) -> Config:
    return composed([*overrides, "parallel.threads=1"])


def test_no_auto_is_left_and_the_rest_stays() -> None:
    asked = config("decode=verified", "decode.tau_conf=0.7", "engine.max_sequences=3")
    shape = read_config(EMBEDDED)
    resolved = resolve(asked, shape, CPU)
    for section in (resolved.decode, resolved.engine):
        in_every_step = ("graphs", "kernels", "draft_from")
        assert "auto" not in {key: value for key, value in vars(section).items() if key not in in_every_step}.values()
    assert (resolved.decode.tau_conf, resolved.engine.max_sequences) == (0.7, 3)
    for key, (value, reason) in by_model(asked, shape, CPU).items():
        section, name = key.split(".")
        assert reason
        if section != "model":  # what the model is loaded with is resolved where it is loaded
            assert getattr(getattr(resolved, section), name) == value


def test_attention_whose_bits_depend_on_drafts_is_refused_where_texts_must_not() -> None:
    shape, causal = read_config(EMBEDDED), read_config(find("causal"))
    with pytest.raises(ValueError, match=r"engine\.attention=plain: .* causal model .* drafts"):
        resolve(config("model=causal", "engine.attention=plain"), causal, CPU)
    assert resolve(config("engine.attention=plain"), shape, CPU).engine.attention == "plain"
    assert resolve(config("model=causal"), causal, CPU).engine.attention == "torch"


@pytest.mark.parametrize(
    "setting",
    [
        "verify=confidence", "block_size=16", "max_active_blocks=2", "sub_block_size=8", "tau_add=0.5", "tau_act=0.5",
        "tau_conf=0.7", "tau_entropy=0.5", "tau_edit=0.5", "confidence=margin", "fill=rule.py:mine",
    ],
)  # fmt: skip
def test_what_fills_masks_is_refused_where_none_are_filled(setting: str) -> None:
    asked = config("model=causal", "decode.drafts=0", f"decode.{setting}")
    with pytest.raises(ValueError, match=rf"^decode\.{setting}: has no effect here: only models that fill masks"):
        resolve(asked, read_config(find("causal")), CPU)


@pytest.mark.parametrize("value", ["0.9", "0.7"])  # the default, which changes nothing either, and another one
def test_what_was_typed_is_told_from_what_a_preset_says(value: str) -> None:
    causal = read_config(find("causal"))
    asked = config("model=causal", f"decode.tau_conf={value}")
    with pytest.raises(ValueError, match=rf"decode\.tau_conf={value}: has no effect here: .*; leave it out$"):
        resolve(asked, causal, CPU, {"model", "decode.tau_conf"})
    assert resolve(config("model=causal"), causal, CPU, {"model"}).decode.causal
    with pytest.raises(ValueError, match=r"verify=confidence: .*; it comes from a preset: choose another decode="):
        resolve(config("model=causal", "decode=threshold"), causal, CPU, {"model", "decode"})
    asked = config("decode.context=vanilla", "engine.prefix_cache=exact")
    with pytest.raises(ValueError, match=r"engine\.prefix_cache=exact: has no effect here: .*; leave it out$"):
        resolve(asked, read_config(find("embedded")), CPU, {"engine.prefix_cache"})


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        ("tau_conf=0.7", "fill=rule.py:mine"), ("tau_conf=0.9", "tau_entropy=0.3"),
        ("tau_add=0.5", "max_active_blocks=1"), ("tau_act=0.5", "max_active_blocks=1"),
    ],
)  # fmt: skip
def test_what_was_typed_beside_what_decides_is_refused(typed: str, other: str) -> None:
    """Not what a preset says, in whose place another value was typed."""
    asked, shape = config(f"decode.{typed}", f"decode.{other}"), read_config(EMBEDDED)
    with pytest.raises(ValueError, match=rf"^decode\.{typed}: has no effect: decode\.{other} decides; leave"):
        resolve(asked, shape, CPU, {f"decode.{part.partition('=')[0]}" for part in (typed, other)})
    assert resolve(asked, shape, CPU, {f"decode.{other.partition('=')[0]}"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model=causal", "decode.tau_look=0.3"], "decode.tau_look=0.3: .* only lookahead in masked models read"),
        (["decode=d2f", "decode.tau_look=0.3"], "decode.tau_look=0.3: .* only lookahead in masked models read"),
        (["decode.context=vanilla", "engine.kv_tokens=900"], "engine.kv_tokens=900: .* only contexts that cache"),
        (["decode.context=dual", "engine.prefix_cache=none"], "engine.prefix_cache=none: .* whose prompts see no"),
        (["engine.prefill_chunk=64"], "engine.prefill_chunk=64: .* only contexts that read prompts by blocks"),
        (["engine.prefill_chunk=null"], "engine.prefill_chunk=null: .* or at 2048"),
    ],
)
def test_what_has_no_effect_here_is_refused(settings: list[str], message: str) -> None:
    shape = read_config(find("causal") if "model=causal" in settings else EMBEDDED)
    with pytest.raises(ValueError, match=rf"^{message}"):
        resolve(config(*settings), shape, CPU)


def test_where_drafts_come_from_is_refused_where_masks_alone_give_them() -> None:
    with pytest.raises(
        ValueError, match=r"^decode\.draft_from=text: .* only causal models with decode\.drafts above 0 read it"
    ):
        resolve(config("decode.draft_from=text"), read_config(EMBEDDED), CPU)
    with pytest.raises(ValueError, match=r"^decode\.draft_from=text: has no effect here"):
        resolve(config("model=causal", "decode.drafts=0", "decode.draft_from=text"), read_config(find("causal")), CPU)


def test_every_decode_option_that_a_rule_alone_reads_says_so() -> None:
    """Those that both read: lookahead, length, sampling, and what rows see."""
    both = {"rule", "branches", "drafts", "max_new_tokens", "context", "stop_at_eos", "temperature", "top_p", "top_k"}
    assert {entry.name for entry in fields(DecodeConfig) if entry.metadata["reader"] is None} == both


def test_causal_models_are_not_decoded_as_masked_ones() -> None:
    """And one without masks drafts from text."""
    shape = replace(read_config(EMBEDDED), family="qwen3")
    shape = replace(shape, mask_id=shape.vocab_size)
    plain = resolve(config("model=local", "model.path=x", "decode.drafts=0"), shape, CPU)
    assert plain.decode.causal
    for name in ("qwen3_8b", "qwen2_5_7b", "llama_3_1_8b"):
        asked = resolve(config(f"model={name}"), shape, CPU).decode
        assert (asked.causal, asked.drafts) == (True, "auto")
    with pytest.raises(ValueError, match=r"decode\.context=vanilla: the model is causal; set it to auto"):
        by_model(config("model=local", "model.path=x", "decode=vanilla"), shape, CPU)
    with pytest.raises(ValueError, match=r"decode\.draft_from=masks needs a mask token"):
        by_model(config("decode=verified", "decode.context=causal", "decode.draft_from=masks"), shape, CPU)
    with pytest.raises(ValueError, match=r"model\.pattern=d2f: qwen3 models are causal"):
        by_model(config("decode=vanilla"), shape, CPU)
    unshifted = replace(read_config(EMBEDDED), family="llada", shift=False)
    with pytest.raises(ValueError, match=r"model\.pattern=causal: in llada models a row predicts its own position"):
        by_model(config("decode=vanilla", "model.pattern=causal"), unshifted, CPU)


def test_a_replica_decodes_its_share_of_few_requests() -> None:
    engine = config("engine.max_sequences=8").engine
    assert [sequences_of_replica(engine, requests, 4) for requests in (0, 5, 32, 99)] == [1, 2, 8, 8]
