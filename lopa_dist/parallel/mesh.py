"""The mesh of ranks: world = data x branch x tensor.

Data replicas take different requests from one queue. The branch ranks of a replica share the branches of the same
sequences. The tensor ranks of a branch rank split its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.parallel.launcher import LaunchError


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh's axes."""

    data: int
    branch: int
    tensor: int = 1

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.data * self.branch * self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's (data, branch, tensor) coordinates.

        Tensor neighbours have adjacent ranks, and so the shortest way to each other: they communicate most.
        """
        replica, tensor = divmod(rank, self.tensor)
        data, branch = divmod(replica, self.branch)
        return data, branch, tensor


def choose_mesh(
    data: int | str, branch: int | str, tensor: int | str, world: int, requests: int, branches: int
) -> Mesh:
    """Return the mesh for sizes, of which some may be ``auto``.

    `tensor` is 1 unless given: only the user knows whether a model must be split. If data and branch are both ``auto``,
    replicas serve throughput: each group of `tensor` ranks is a replica. With fewer requests than replicas, some would
    be idle, so then they join in branch groups of at most `branches`.

    Raises:
        LaunchError: the sizes do not multiply to the number of ranks.
    """
    split = 1 if tensor == "auto" else int(tensor)
    copies = max(1, world // split)  # copies of the model among the ranks
    if data == "auto" and branch == "auto":
        if requests >= copies:
            data, branch = copies, 1
        else:
            branch = max(b for b in range(1, copies + 1) if copies % b == 0 and b <= max(1, branches))
    if data == "auto":
        data = max(1, copies // int(branch))
    if branch == "auto":
        branch = max(1, copies // int(data))
    mesh = Mesh(int(data), int(branch), split)
    if mesh.size != world:
        how = f" (torchrun --nproc-per-node {mesh.size} ...)" if world == 1 else ""
        instead = "" if world % split else ", or set parallel.data or parallel.branch to auto"
        raise LaunchError(
            f"parallel.data={mesh.data} x parallel.branch={mesh.branch} x parallel.tensor={mesh.tensor} = {mesh.size}, "
            f"but the job has {world} rank{'' if world == 1 else 's'}; start {mesh.size} ranks{how}{instead}"
        )
    return mesh
