"""How the model is run (config group `engine`), checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.checks import Reader, check_options, option

ATTENTION = ("torch", "meta", "plain")  # the backends (`kernels.attention.make`)

# which decode configs read an option
CACHING = Reader(lambda decode: decode.scope.caches_kv, "contexts that cache keys and values")
SHARING = Reader(lambda decode: decode.scope.prefills_apart, "contexts whose prompts see no answer")
CUTTING = Reader(lambda decode: decode.scope.cuts_prompts, "contexts that read prompts by blocks or causally")


@dataclass
class EngineConfig:
    """What is in flight at once, and which kernels run it.

    `prefix_cache` says which K/V requests share:

    - exact: K/V whose sharing changes no text: those of the prompt that samples have in common; on models that read
      prompts block by block, also those of few-shot examples and system prompts; on causal models, also those of any
      beginning that prompts have in common.
    - none: every request computes its own.

    `kernels` applies to all operations that have a Triton version: attention, rotation, norms, gate, record head, and
    products that are reproducible or in eight bits. With ``auto``, each kernel that a run needs is launched once on a
    GPU after the model is loaded, and compared with torch. If one does not compile, or gives other numbers, torch's
    version replaces it, and a warning names the remedy. ``triton`` ends the job instead. ``torch`` launches no Triton
    kernels, and so excludes `attention=meta` and graphs: much slower, but it shows whether a kernel is at fault.

    `graphs` are CUDA graphs over fixed buffers: ``auto`` means on a GPU, with meta-attention and one rank per model;
    ``always`` uses the same fixed buffers on a CPU, without a graph (slower, for tests).

    `prefill_chunk`: long prompts are computed in chunks, one between two steps, so that other sequences never wait for
    a complete prompt. This is exact, and needs `decode.context=blocks` or `causal`, and a prefix cache; otherwise a
    prompt is computed at once. `max_rows` does not limit chunks.

    `reproducible`: a sequence has the same bits in any batch, on any number of branch ranks. On a CPU this is always
    so. On a GPU, all products are then computed only on real rows (`vgemm`), no attention tile holds rows of two
    segments that would change each other's bits, and no tile's columns are split, because padding, tiles and splits
    depend on the batch.

    Raises:
        ValueError: a value outside its range or choices; the message names the key and what is allowed.
    """

    max_sequences: int = option(16, "sequences in flight at once; fewer on a GPU that is short of memory", least=1)
    max_rows: int | None = option(
        None,
        "rows per forward pass on one rank: sequences beyond them wait a step; null: as many as fit into memory",
        least=1,
    )
    kv_tokens: int | None = option(
        None,
        "tokens of K/V space per rank; requests wait for it. null: enough for max_sequences",
        least=1,
        reader=CACHING,
    )
    attention: str = option(
        "auto",
        "the kernel: torch, meta (Triton), plain (the oracle); auto: meta on a GPU if it supports the model's heads, "
        "else torch",
        ("auto", *ATTENTION),
    )
    graphs: str = option("auto", "CUDA graphs over fixed buffers", ("auto", "always", "never"))
    prefix_cache: str = option("exact", "which keys and values requests share", ("exact", "none"), reader=SHARING)
    prefill_chunk: int | None = option(
        2048,
        "prompt tokens computed at a time, if prompts are read by blocks or causally; null: all of them at once",
        least=1,
        reader=CUTTING,
    )
    reproducible: bool = option(
        False, "the same text in any batch and at any world size, bit for bit, on a GPU, too; slower"
    )
    kernels: str = option(
        "auto",
        "Triton kernels or torch operations; auto: on a GPU, the Triton kernels that agree with torch",
        ("auto", "triton", "torch"),
    )

    def __post_init__(self) -> None:
        check_options("engine", self)
