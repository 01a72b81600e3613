"""The mesh follows from the sizes that are given and the number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.parallel.launcher import LaunchError
from lopa_dist.parallel.mesh import Mesh, choose_mesh


@pytest.mark.parametrize(
    ("axes", "world", "requests", "branches", "expected"),
    [
        (("auto", "auto", "auto"), 1, 10, 8, Mesh(1, 1)),
        (("auto", "auto", "auto"), 4, 10, 8, Mesh(4, 1)),
        (("auto", "auto", 1), 4, 1, 8, Mesh(1, 4)),
        (("auto", "auto", 1), 4, 1, 2, Mesh(2, 2)),
        (("auto", "auto", 1), 6, 2, 4, Mesh(2, 3)),
        (("auto", "auto", 2), 4, 10, 8, Mesh(2, 1, 2)),
        (("auto", "auto", 2), 4, 1, 8, Mesh(1, 2, 2)),
        (("auto", "auto", 2), 8, 2, 4, Mesh(1, 4, 2)),
        (("auto", 2, "auto"), 4, 10, 8, Mesh(2, 2)),
        (("auto", 2, 2), 8, 10, 8, Mesh(2, 2, 2)),
        ((4, "auto", 1), 8, 10, 8, Mesh(4, 2)),
        ((2, 3, 1), 6, 10, 8, Mesh(2, 3)),
    ],
)
def test_mesh(axes: tuple[int | str, ...], world: int, requests: int, branches: int, expected: Mesh) -> None:
    assert choose_mesh(*axes, world, requests, branches) == expected


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_mesh_places_every_rank_once(data: int, branch: int, tensor: int) -> None:
    mesh = Mesh(data, branch, tensor)
    coordinates = {(d, b, t) for d in range(data) for b in range(branch) for t in range(tensor)}
    assert {mesh.coordinates(r) for r in range(mesh.size)} == coordinates
    assert mesh.size == len(coordinates)


def test_impossible_mesh_names_the_numbers() -> None:
    with pytest.raises(
        LaunchError, match=r"data=2 x parallel\.branch=3 x parallel\.tensor=1 = 6, but the job has 4 ranks"
    ):
        choose_mesh(2, 3, 1, 4, 10, 8)
    with pytest.raises(LaunchError, match="4 ranks"):
        choose_mesh("auto", 3, "auto", 4, 10, 8)
    with pytest.raises(LaunchError, match=r"parallel\.tensor=3 = 3, but the job has 4 ranks"):
        choose_mesh("auto", "auto", 3, 4, 10, 8)
