"""Which rows a forward runs: their layout, and how its records get back to the sequences.

Read `forward_batch` first (the result) and `row_maker` (what a rule needs of its rows), then `window_rows`, the
`structure` that it uses, and `draft_rows`. `causal_rows` says which rows causal models have, and `chain_layout` (in C
`c_layout`) lays them out. `share` says which branch rank runs which branch, and `prefill` is about prompts that share a
prefix.
"""

from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.prefill import SharedPrefixes

__all__ = ["ForwardBatch", "SharedPrefixes"]
