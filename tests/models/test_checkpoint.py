"""Checkpoints load whole or not at all, and what stands in the way is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from lopa_dist.models.checkpoint import load_model, places
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import EMBEDDED, CheckpointError, find, weight_files
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from tests.models import small_checkpoints
from tests.models.one_checkpoint import config_of, weights_of, write
from training import tokenizer
from training.checkpoint import save

CPU = torch.device("cpu")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_arrives(shards: int, tied: bool, tmp_path: Path) -> None:
    config = config_of(tied)
    weights = weights_of(config)
    model = load_model(write(tmp_path, config, weights, shards), torch.float32, CPU)
    assert model.config == config
    loaded = model.state_dict()
    assert set(loaded) == set(weights) | {"lm_head.weight"}
    assert all(torch.equal(loaded[n], w) for n, w in weights.items())
    assert (model.head_weight is model.model.embed_tokens.weight) == tied
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_that_is_overwritten_changes_no_loaded_weight(tied: bool, tmp_path: Path) -> None:
    """A trainer may save into the folder of the model that a job runs, in place."""
    config = config_of(tied)
    model = load_model(write(tmp_path, config, weights_of(config)), torch.float32, CPU)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as content:
        content.write(bytes(file.stat().st_size))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights_of(config).items())


def test_tensors_are_cast_to_what_is_asked_for(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16, CPU)
    weights = weights_of(config_of())
    assert all(torch.equal(p, weights[n].bfloat16()) for n, p in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_what_embedded_saves_is_loaded_back(tied: bool, tmp_path: Path) -> None:
    config, words = config_of(tied), tokenizer.build()
    weights = Transformer(config).state_dict()
    save(tmp_path / "new" / "folder", config, weights, words)
    model = load_model(tmp_path / "new" / "folder", torch.float32, CPU)
    assert model.config == config
    assert all(torch.equal(p, weights[n].bfloat16().float()) for n, p in model.state_dict().items())
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    text = "<|user|> Alice has 7 apples . Zürich<|assistant|>"
    assert loaded.encode(text) == words.encode(text)
    assert (loaded.mask_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 0, 0)
    assert loaded.chat_template == tokenizer.CHAT_TEMPLATE


def missing(weights: dict[str, Tensor]) -> str:
    del weights["model.layers.1.mlp.up_proj.weight"]
    return r"1 tensors missing: model\.layers\.1\.mlp\.up_proj\.weight"


def missing_head(weights: dict[str, Tensor]) -> str:
    del weights["lm_head.weight"]
    return r"missing: lm_head\.weight"


def unknown(weights: dict[str, Tensor]) -> str:
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(4)
    return r"1 tensors not known: model\.layers\.0\.self_attn\.q_norm\.weight"


def misshaped(weights: dict[str, Tensor]) -> str:
    weights["model.norm.weight"] = torch.ones(17)
    return r"wrong shape: model\.norm\.weight \[17\] instead of \[16\]"


def another_model(weights: dict[str, Tensor]) -> str:
    for name in list(weights):
        weights["transformer." + name] = weights.pop(name)
    return r"27 tensors missing: .*lm_head\.weight"


@pytest.mark.parametrize("spoil", [missing, missing_head, unknown, misshaped, another_model])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_tensors_in_the_way_are_named(
    spoil: Callable[[dict[str, Tensor]], str], shards: int, tmp_path: Path
) -> None:
    weights = weights_of(config_of())
    message = spoil(weights)
    write(tmp_path, config_of(), weights, shards)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(tmp_path, torch.float32, CPU)
    assert str(tmp_path) in str(caught.value)
    assert "fetch the checkpoint again, or correct" in str(caught.value)


def test_a_tied_heads_copy_may_stand_in_the_file_but_no_other(tmp_path: Path) -> None:
    config = config_of(tied=True)
    weights = weights_of(config)
    copy = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    for name in ("copy", "other"):
        (tmp_path / name).mkdir()
    write(tmp_path / "copy", config, copy, 2)
    assert load_model(tmp_path / "copy", torch.float32, CPU).config.tied
    copy["lm_head.weight"][3, 1] += 1
    write(tmp_path / "other", config, copy, 2)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens\.weight\. Set tie_word_emb"):
        load_model(tmp_path / "other", torch.float32, CPU)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles_are_refused(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(weights_of(config_of()), folder / name)
    with pytest.raises(CheckpointError, match=r"pickle.*refused.*safetensors"):
        load_model(folder, torch.float32, CPU)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors missing") as caught:
        load_model(folder, torch.float32, CPU)
    assert "pickle" not in str(caught.value)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, config_of(), weights_of(config_of()), shards=3)
    assert [f.name[:11] for f in weight_files(tmp_path)] == ["model-00001", "model-00002", "model-00003"]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors missing; fetch the checkpoint again"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(folder, torch.float32, CPU)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    write(tmp_path, config_of(), weights_of(config_of()), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_model(tmp_path, torch.float32, CPU)


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)


def test_find_takes_folders_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert find(folder.name).resolve() == folder
    assert find("embedded") == EMBEDDED


@pytest.mark.parametrize("path", ["/no/such/folder", "./no_such_folder", "../no_such_folder"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=rf"model\.path={path}: no such folder"):
        find(path)


def test_a_hub_id_is_downloaded_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("some/model") == tmp_path
    assert asked[0] == "some/model"
    assert "*.safetensors" in asked
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked)


def test_a_hub_that_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("lopa_dist.models.files.why_not_there", lambda path: "")
    with pytest.raises(CheckpointError, match=r"model\.path=some/model: .*no network"):
        find("some/model")


def test_a_name_that_can_be_no_hub_id() -> None:
    with pytest.raises(CheckpointError, match=r"model\.path=outputs/embedded/checkpoint"):
        find("outputs/embedded/checkpoint")


def test_weights_that_others_have_quantised_are_refused(folder: Path) -> None:
    weights = weights_of(config_of())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is of type I8: .*use the original checkpoint"):
        load_model(folder, torch.float32, CPU)


def test_an_index_of_other_files_than_the_one_that_is_there_is_refused(tmp_path: Path) -> None:
    """As transformers takes the one file, and other programs the index."""
    write(tmp_path, config_of(), weights_of(config_of()), 2)
    save_file(weights_of(config_of()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="remove the outdated one"):
        load_model(tmp_path, torch.float32, CPU)


def test_names_are_compared_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(config_of())
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setattr(Tensor, "to", lambda *_: pytest.fail("a weight was loaded"))
    with pytest.raises(CheckpointError, match="1 tensors missing"):
        load_model(folder, torch.float32, CPU)


LOAD = """
import sys, torch
from pathlib import Path
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel.communicator import Solo
def peak():
    with open("/proc/self/status") as lines:
        status = dict(line.split(":", 1) for line in lines)
    return int(status["VmHWM"].split()[0]) * 1024
_, folder, ranks, kind = sys.argv
tensor = Solo()
tensor.size = int(ranks)  # the first of them: loading exchanges nothing
# what torch and others take when they are first used
load_model(EMBEDDED, torch.float32, torch.device("cpu"), quantization=kind)
before = peak()
model = load_model(Path(folder), torch.float16, torch.device("cpu"), None, tensor, kind)
held = [*model.parameters(), *model.buffers()]
print(peak() - before, sum(one.numel() * one.element_size() for one in held))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_loading_takes_little_more_memory_than_the_checkpoint(tmp_path: Path) -> None:
    """In a process of its own: 300 MB of bf16 in 4 shards, all of it converted to fp16."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 3072, "vocab_size": 16384}
    kind = small_checkpoints.KINDS["dream"]
    kind = replace(kind, config=kind.config | sizes)
    small_checkpoints.write(tmp_path, kind, {})
    with torch.device("meta"):
        shapes = Transformer(read_config(tmp_path)).state_dict()
    weights = {n: torch.full(p.shape, 0.5, dtype=torch.bfloat16) for n, p in shapes.items()}
    small_checkpoints.write(tmp_path, kind, weights, shards=4)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*-of-*.safetensors"))
    assert stored > 250e6
    taken, size = taken_and_held(tmp_path)
    assert size == pytest.approx(stored, rel=0.01)
    assert taken > 0.9 * stored  # else nothing was measured
    assert taken < 1.2 * stored


def taken_and_held(folder: Path, ranks: int = 1, kind: str = "none") -> tuple[int, int]:
    """Bytes that loading took at most, and of the weights then, in a process of its own."""
    command = [sys.executable, "-c", LOAD, str(folder), str(ranks), kind]
    taken, size = map(int, subprocess.check_output(command, text=True).split())
    return taken, size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_a_rank_never_holds_its_quantised_experts_in_full(tmp_path: Path) -> None:
    """300 MB of experts, of which a rank of two keeps half, in eight bits a quarter."""
    kind = small_checkpoints.MOE_KINDS["rnd1"]
    sizes = {"hidden_size": 768, "num_hidden_layers": 4, "num_experts": 64, "moe_intermediate_size": 256}
    kind = replace(kind, config=kind.config | sizes)
    small_checkpoints.write(tmp_path, kind, {})
    with torch.device("meta"):
        shapes = {name: place.shape for name, place in places(Transformer(read_config(tmp_path))).items()}
    weights = {name: torch.full(tuple(shape), 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    small_checkpoints.write(tmp_path, kind, weights, shards=4)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*-of-*.safetensors"))
    assert stored > 290e6
    taken, held = taken_and_held(tmp_path, 2, "int8")
    assert held == pytest.approx(stored / 4, rel=0.05)
    assert 0.8 * held < taken < 0.45 * stored


def test_nothing_is_drawn_for_weights_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device that would import torch._dynamo, a third of a small job's start."""

    def fail(*_: object) -> None:
        raise AssertionError("random numbers for an embedding that is read from a file")

    monkeypatch.setattr(torch.nn.init, "normal_", fail)
    load_model(EMBEDDED, torch.float32, CPU)
