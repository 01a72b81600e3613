"""Does a 7B model load and step on a machine with 24 GB of memory? A manual benchmark.

    python -m benchmarks.load_7b FOLDER [--branches 3] [--threads 2]

Writes a checkpoint of Dream-7B's shape with random bf16 weights (15 GB in 4 shards) into FOLDER, unless it is there,
then loads it and takes two steps on the CPU: the prefill, and one with lookahead branches. Prints times and the peak of
resident memory. bf16 weights stay mapped to their files on a CPU: the first step is what reads them from the disk, and
the memory they take are pages that the system could drop.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.models.checkpoint import load_model, read_config
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo

DREAM_7B = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "mask_token_id": 151666,
    "eos_token_id": 151643,
    "pad_token_id": 151643,
}
SHARDS, PROMPT, STEPS = 4, 64, 2


class EnoughError(Exception):
    """Ends the generation after `STEPS` steps."""


def write(folder: Path) -> None:
    """The checkpoint, one shard in memory at a time; config.json comes last, when all is there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(DREAM_7B))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(read_config(folder)).state_dict().items()}
    config.unlink()
    generator = torch.Generator().manual_seed(0)
    names = list(shapes)
    share, weight_map = -(-len(names) // SHARDS), {}
    for i in range(SHARDS):
        file = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        shard = {}
        for name in names[i * share : (i + 1) * share]:
            tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
            shard[name] = tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02, generator=generator)
            weight_map[name] = file
        save_file(shard, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.write_text(json.dumps(DREAM_7B, indent=2))


def peak() -> float:
    """Peak of resident memory so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Write, load, step, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not (options.folder / "config.json").exists():
        began = time.perf_counter()
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(options.folder,))
        writer.start()  # in a process of its own, whose memory does not count
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"{options.folder}: could not be written")
        print(f"written in {time.perf_counter() - began:.0f} s")
    stored = sum(file.stat().st_size for file in options.folder.glob("*.safetensors")) / 1e9

    began = time.perf_counter()
    model = load_model(options.folder, torch.bfloat16, torch.device("cpu"))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e9:.3f}e9 parameters, {stored:.2f} GB in {SHARDS} shards")
    print(f"loaded in {time.perf_counter() - began:.1f} s, peak {peak():.2f} GB")

    began = time.perf_counter()

    def observe(engine: Engine) -> None:
        seconds, step = time.perf_counter() - began, engine.statistics.steps
        print(f"step {step} done after {seconds:.1f} s, peak {peak():.2f} GB = {peak() / stored:.2f} x stored")
        if step == STEPS:
            raise EnoughError

    prompt = torch.randint(0, 150_000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    config = DecodeConfig(verify="confidence", drafts=0, branches=options.branches, max_new_tokens=64)
    engine = Engine(model, config, Solo(), EngineConfig(1), on_step=observe)
    try:
        list(engine.generate([Request(0, prompt, 64, 0)]))
    except EnoughError:
        rows = (options.branches + 1) * config.block_size
        print(f"prefill of {PROMPT} tokens and a step of {options.branches + 1} branches (at least {rows} rows) done")


if __name__ == "__main__":
    main()
