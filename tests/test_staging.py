"""Arrays arrive on the device as they are, however many are on their way at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.staging import ALIGNED, Staging, pinned, to_host_later


@given(st.lists(st.tuples(st.sampled_from([np.int64, np.int32, np.bool_]), st.integers(0, 200)), max_size=12))
def test_what_is_staged_is_the_array_and_does_not_overlap_the_one_before(sizes: list[tuple[type, int]]) -> None:
    staging, before = Staging(4 * ALIGNED, torch.device("cpu")), (torch.empty(0), torch.empty(0))
    for number, (kind, size) in enumerate(sizes):
        array = (np.arange(size) + number).astype(kind)
        part = staging.take(array)
        if part is None:
            assert array.nbytes > 4 * ALIGNED
            continue
        assert part.dtype == torch.from_numpy(array).dtype
        assert part.tolist() == array.tolist()
        if part.data_ptr() > before[0].data_ptr():  # the memory did not begin again
            assert torch.equal(*before)
        before = part, part.clone()
    assert staging.take(np.zeros((2, 3))).shape == (2, 3)  # type: ignore[union-attr]


@pytest.mark.gpu
def test_arrays_on_their_way_to_a_gpu_are_not_overwritten() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arrays = [np.full(1 << 18, number) for number in range(40)]  # ten times as much as is staged at a time
    sent = [pinned(array, device).to(device, non_blocking=True) for array in arrays]
    assert all(bool((one == number).all()) for number, one in enumerate(sent))
    assert device.type == "cpu" or pinned(arrays[0], device).is_pinned()
    assert pinned(np.zeros(1 << 24), device).shape == (1 << 24,), "more than is staged"


@pytest.mark.gpu
def test_a_copy_to_the_host_waits_for_no_later_work() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor = torch.arange(5, device=device)
    copied = to_host_later(tensor)
    tensor += 1  # on a GPU, after the copy
    if device.type == "cuda":
        torch.cuda._sleep(2_000_000_000)  # about a second
        began = torch.cuda.Event()
        began.record()
        assert copied().tolist() == [0, 1, 2, 3, 4]
        assert not began.query(), "the device is not done yet"
    else:
        assert copied() is tensor


def test_memory_that_was_pinned_in_inference_serves_learning() -> None:
    with torch.inference_mode():
        staging = Staging(4 * ALIGNED, torch.device("cpu"))
    part = staging.take(np.arange(3.0))
    assert part is not None
    assert (part * torch.ones(3, dtype=torch.float64, requires_grad=True)).sum().requires_grad
