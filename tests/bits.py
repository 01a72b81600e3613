"""A mark for tests of what texts rely on where they do not depend on the batch: products with the same bits."""

from __future__ import annotations

import pytest

from lopa_dist.kernels.row_bits import same_bits

same_row_bits = pytest.mark.skipif(
    not same_bits(), reason="this CPU's products depend on how many rows there are, which a job warns of"
)
