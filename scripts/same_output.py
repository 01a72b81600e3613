"""Compare what two checkouts generate: ``python scripts/same_output.py BEFORE AFTER [--only NAME ...]``.

Use this for changes that must not change any output. Both checkouts run the same fixed jobs through the command line,
on the package's models and on small random checkpoints of other families, with the interpreter that runs this program.
Every line of `results.jsonl` must be the same, apart from times. The figures of `report.json` that do not depend on
time must be the same, too, including the rows that went through the model, and the drafts. If jobs differ, the program
names them and exits with 1.

``--keep FILE`` keeps BEFORE's results, and reads them if the file exists. If a setting has been renamed since BEFORE,
make the file with BEFORE's own copy of this program; jobs are compared by their names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models.small_checkpoints import KINDS, MOE_KINDS, VOCABULARY, reference, weights_of, write

PLAIN, LOPA = ["decode=embedded_plain"], ["decode=embedded_lopa", "decode.branches=3"]
VERIFIED = ["decode=embedded", "decode.branches=0", "decode.drafts=10"]
BRANCHES = ["decode=embedded", "decode.branches=1", "decode.drafts=8"]
CAUSAL = ["decode.context=d2f_causal"]
VANILLA = ["decode.context=vanilla"]
DUAL = ["decode.context=dual", "decode.max_active_blocks=null"]
BLOCKS = ["decode.context=blocks", "decode.max_active_blocks=1"]
BATCH = ["task=batch", "task.input={folder}/prompts.jsonl"]
SMALL = ["decode.block_size=8", "decode.max_new_tokens=32"]
LLADA = ["model.path={folder}/llada", "task=batch", "task.input={folder}/words.jsonl", *SMALL]
SDAR = ["model.path={folder}/sdar", *LLADA[1:], *BLOCKS, "decode.block_size=4"]
EIGHT_DRAFTS = ["model=causal", "decode.drafts=8"]
JOBS: dict[str, list[str]] = {
    "plain": PLAIN,
    "control": ["decode=embedded_control"],
    "left_to_right": [*PLAIN, "decode.max_active_blocks=1", "decode.sub_block_size=1", "decode.confidence=margin"],
    "lopa": ["decode=embedded_lopa"],
    "lopa_tau_look": [*LOPA, "decode.tau_look=0.3"],
    "lopa_sampled": [*LOPA, "decode.temperature=0.7", "decode.top_p=0.9"],
    "lopa_block_causal": [*LOPA, *CAUSAL],
    "verified": VERIFIED,
    "verified_branches": [*VERIFIED, "decode.branches=3", "decode.drafts=1"],
    "verified_both": BRANCHES,
    "verified_block_causal": [*BRANCHES, *CAUSAL],
    "verified_sampled": [*BRANCHES, "decode.temperature=0.7", "decode.top_k=20"],
    "verified_tau_look": [*BRANCHES, "decode.tau_look=0.5"],
    "verified_few_rows": [*BRANCHES, "engine.max_rows=150", "engine.kv_tokens=600"],
    "verified_static": [*BRANCHES, "engine.attention=meta", "engine.graphs=always", "task.limit=4"],
    "vanilla": [*VERIFIED, *VANILLA, "task.limit=4"],
    "dual": [*PLAIN, *DUAL, "decode.max_active_blocks=1"],
    "verified_dual": [*VERIFIED, *DUAL],
    "blocks": [*PLAIN, *BLOCKS, "decode.sub_block_size=8"],
    "verified_blocks": [*BRANCHES, *BLOCKS],
    "lists": ["model=lists", *VERIFIED, "decode.max_new_tokens=144"],
    "lists_branches": ["model=lists", *BRANCHES, "decode.max_new_tokens=144", "decode.tau_look=0.5"],
    "samples": [*BATCH, *BRANCHES, "decode.temperature=0.8"],
    "llada": [*LLADA, *VANILLA, "decode=lopa", "decode.branches=2"],
    "llada_verified": [*LLADA, *VANILLA, *BRANCHES[1:], "decode.verify=agreement"],
    "llada_dual": [*LLADA, *DUAL, "decode=threshold", "decode.max_active_blocks=1"],
    "sdar": [*SDAR, "decode=threshold"],
    "sdar_verified": [*SDAR, *BRANCHES[1:], "decode.verify=agreement", "decode.drafts=3"],
    "experts": ["model.path={folder}/sdar_moe", *SDAR[1:], "decode=threshold"],
    "int8": [*VERIFIED, "model.quantization=int8", "task.limit=4"],
    "fp8": [*VERIFIED, "model.quantization=fp8", "task.limit=4"],
    "one_token": ["model=causal", "decode.drafts=0"],
    "lossless": EIGHT_DRAFTS,
    "lossless_branches": [*EIGHT_DRAFTS, "decode.branches=4", "decode.temperature=0.7"],
    "two_ranks": LOPA,
    "two_ranks_verified": BRANCHES,
    "two_ranks_block_causal": [*BRANCHES, *CAUSAL],
    "two_ranks_lossless": EIGHT_DRAFTS,
    "two_replicas_of_two_ranks": [*BRANCHES, "parallel.data=2", "parallel.branch=2"],
}
RANKS = {name: 4 if name == "two_replicas_of_two_ranks" else 2 for name in JOBS if name.startswith("two_")}
FIXED = ["logging.progress=never", "logging.wandb.mode=disabled", "parallel.threads=1"]
TIMES = ("latency_s",)
FIGURES = (
    "requests", "errors", "accuracy", "completion_tokens", "prompt_tokens", "forwards", "tpf", "branch", "drafts",
    "rows", "rows_per_token", "steps",
)  # fmt: skip

SEVERAL = """
import json, sys
from lopa_dist.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    main()
"""


def write_inputs(folder: Path) -> None:
    """Write prompts that ask for several samples, and small checkpoints with prompts in their own words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    lines = [
        {"custom_id": "a", "prompt": "Mia has 3 apples and buys 4 more . How many apples does Mia have ?", "n": 3},
        {"custom_id": "b", "prompt": "Sam owns 12 pens . Sam gives 5 away . How many are left ?", "n": 2},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lengths = (5, 9, 12, 3, 16, 7)
    words = [" ".join(f"w{(7 * n + 3 * i) % 70}" for i in range(length)) for n, length in enumerate(lengths)]
    (folder / "words.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    for name, kind in {"llada": KINDS["llada"], "sdar": KINDS["sdar"], "sdar_moe": MOE_KINDS["sdar_moe"]}.items():
        write(folder / name, kind, weights_of(kind, reference(kind)))
        vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w78").save_pretrained(folder / name)


def run(checkout: Path, names: list[str]) -> dict[str, Any]:
    """Run jobs in a checkout, and return their result lines and figures, without times.

    All jobs with one rank run in the same process.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        commands = {}
        for name in names:
            arguments = ["task.limit=10", *JOBS[name], *FIXED, f"hydra.run.dir={folder / 'runs' / name}"]
            commands[name] = once([argument.format(folder=folder) for argument in arguments])
        alone = [arguments for name, arguments in commands.items() if name not in RANKS]
        if alone:
            start(checkout, ["-c", SEVERAL, json.dumps(alone)])
        for name in commands:
            if name in RANKS:
                launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[name]}"]
                start(checkout, [*launcher, "-m", "lopa_dist", *commands[name]])
        for name in names:
            at = folder / "runs" / name
            lines = [json.loads(line) for line in (at / "results.jsonl").read_text().splitlines()]
            report = json.loads((at / "report.json").read_text())
            for line in lines:
                for key in TIMES:
                    line.pop(key)
            found[name] = {"lines": lines, "figures": {key: report[key] for key in FIGURES if key in report}}
    return found


def once(arguments: list[str]) -> list[str]:
    """Return the arguments with each key only once, with its last value."""
    return [f"{key}={value}" for key, value in dict(argument.split("=", 1) for argument in arguments).items()]


def start(checkout: Path, arguments: list[str]) -> None:
    """Run Python in a checkout; if it fails, exit with its output."""
    environment = os.environ | {"CI": "1", "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{checkout} failed:\n{done.stdout}\n{done.stderr}")


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the names of the figures and the number of lines in which two jobs differ; empty if they are the same."""
    kinds = dict.fromkeys((*before["figures"], *after["figures"]))
    parts = [key for key in kinds if before["figures"].get(key) != after["figures"].get(key)]
    both = zip(before["lines"], after["lines"], strict=False)
    lines = sum(a != b for a, b in both) + abs(len(before["lines"]) - len(after["lines"]))
    return ", ".join([*parts, *([f"{lines} lines"] if lines else [])])


def main() -> None:
    """Run the jobs in both checkouts, compare them, and print the result for each job."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--keep", type=Path, help="file that holds what BEFORE gave, read where it is there")
    options = parser.parse_args()
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    if missing := [name for name in options.only if name not in kept]:
        kept |= run(options.before, missing)
        if options.keep:
            options.keep.write_text(json.dumps(kept))
    found = run(options.after, options.only)
    different = {name: difference(kept[name], found[name]) for name in options.only}
    for name, what in different.items():
        print(f"{name}: {f'DIFFERENT: {what}' if what else 'same'}", flush=True)
    if any(different.values()):
        raise SystemExit(f"different: {', '.join(name for name, what in different.items() if what)}")


if __name__ == "__main__":
    main()
