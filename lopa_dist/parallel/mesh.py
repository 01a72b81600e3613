"""The mesh: world = data x branch.

Data replicas take different requests from one queue; the branch ranks of a replica share out the branches of the same
sequences. (A third axis, tensor, would split the weights of a replica.)
"""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.parallel.launcher import LaunchError


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes."""

    data: int
    branch: int

    def place(self, rank: int) -> tuple[int, int]:
        """(data, branch) coordinates of a rank; branch neighbours have neighbouring ranks."""
        return divmod(rank, self.branch)


def resolve(data: int | str, branch: int | str, world: int, requests: int, branches: int) -> Mesh:
    """Turn sizes and ``auto`` into a mesh.

    With both ``auto``, replicas serve throughput: every rank is one, unless fewer requests than ranks would leave some
    idle; then ranks join in branch groups of at most `branches`.

    Raises:
        LaunchError: the sizes do not multiply to the number of ranks.
    """
    if data == "auto" and branch == "auto":
        if requests >= world:
            return Mesh(world, 1)
        branch = max(b for b in range(1, world + 1) if world % b == 0 and b <= max(1, branches))
    if data == "auto":
        data = max(1, world // int(branch))
    if branch == "auto":
        branch = max(1, world // int(data))
    mesh = Mesh(int(data), int(branch))
    if mesh.data * mesh.branch != world:
        raise LaunchError(
            f"parallel.data={mesh.data} x parallel.branch={mesh.branch} = {mesh.data * mesh.branch}, but the job has "
            f"{world} ranks; start {mesh.data * mesh.branch} ranks or set one of the two to auto"
        )
    return mesh
