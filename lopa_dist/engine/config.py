"""How the model is run (config group `engine`), checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.checks import Reader, check_options, option
from lopa_dist.kernels.attention import NAMES as ATTENTION

# which decode configs read an option
CACHING = Reader(lambda decode: decode.scope.stores_kv, "contexts that cache keys and values")
SHARING = Reader(lambda decode: decode.scope.prefills_apart, "contexts whose prompts see no answer")
CUTTING = Reader(lambda decode: decode.scope.cuts_prompts, "contexts that read prompts by blocks or causally")


@dataclass
class EngineConfig:
    """What is in flight at once, and which kernels run it.

    `prefix_cache` says whose K/V serve several requests:

    - exact: those that change no text (of samples' common prompt; of few-shot examples and system prompts, on models
      that read prompts block by block).
    - none: every request computes its own.

    `kernels` decides for all operations that have a Triton form: attention, rotation, norms, gate, record head, and
    products that are reproducible or in eight bits. With ``auto``, each kernel that a run needs is launched once on a
    GPU when the model has been loaded, and compared with torch. One that does not compile, or gives other numbers, runs
    in torch's form, and a warning says so with the remedy. ``triton`` ends the job instead. ``torch`` launches no
    Triton kernel, and so excludes `attention=meta` and graphs: much slower, and a way to find out whether a kernel is
    at fault.

    `graphs` are CUDA graphs over fixed buffers: ``auto`` means on a GPU, with meta-attention and one rank a model;
    ``always`` takes the same fixed buffers on a CPU, without a graph (slower, for tests).

    `prefill_chunk`: long prompts are computed in chunks, one between two steps, so that other sequences never wait for
    a complete one. This is exact, and needs `decode.context=blocks` or `causal`, and a prefix cache; otherwise a prompt
    is computed at once. `max_rows` does not bound chunks.

    `reproducible`: a sequence has the same bits in any batch, on any number of branch ranks. On a CPU it always has. On
    a GPU all products are then computed on real rows only (`vgemm`), no tile of attention holds rows of two segments
    that would change each other's bits, and no tile's columns are split, because padding, tiles and splits depend on
    the batch.

    Raises:
        ValueError: a value outside its range or choices; the message names the key and what is allowed.
    """

    max_sequences: int = option(16, "sequences in flight at once; on a GPU fewer where its memory is short", least=1)
    max_rows: int | None = option(
        None,
        "rows of one forward on one rank: sequences beyond them wait a step; null: as many as memory has room for",
        least=1,
    )
    kv_tokens: int | None = option(
        None,
        "tokens of K/V space of a rank; requests wait for it. null: enough for max_sequences",
        least=1,
        reader=CACHING,
    )
    attention: str = option(
        "auto",
        "the kernel: torch, meta (Triton), plain (the oracle); auto: meta on a GPU whose heads it takes, else torch",
        ("auto", *ATTENTION),
    )
    graphs: str = option("auto", "CUDA graphs over fixed buffers", ("auto", "always", "never"))
    prefix_cache: str = option(
        "exact", "whose keys and values serve several requests", ("exact", "none"), reader=SHARING
    )
    prefill_chunk: int | None = option(
        2048,
        "prompt tokens computed at a time, where prompts are read by blocks or causally; null: all of them at once",
        least=1,
        reader=CUTTING,
    )
    reproducible: bool = option(
        False, "on a GPU, too, the same text in any batch and at any world size, bit for bit; slower"
    )
    kernels: str = option(
        "auto",
        "Triton's kernels or torch's operations; auto: on a GPU, the Triton kernels that agree with torch",
        ("auto", "triton", "torch"),
    )

    def __post_init__(self) -> None:
        check_options("engine", self)
