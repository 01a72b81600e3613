"""Which rows a forward runs: their layout, and the way of its records back to the sequences.

Read `forward_batch` first (what comes out), then `layout` and the `structure` that it asks for, and `draft_rows`.
`causal_rows` lays out the rows of causal models. `prefill` is about prompts that share a prefix; `sizes` only counts.
"""

from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.layout import layout, unpack
from lopa_dist.rows.prefill import SharedPrefixes

__all__ = ["ForwardBatch", "SharedPrefixes", "layout", "unpack"]
