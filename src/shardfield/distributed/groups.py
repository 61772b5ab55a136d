"""Compute the ranks of process groups. Pure: every rank computes the same lists, or raises the same error."""

import math
from collections.abc import Sequence

import torch

from ..errors import WorldError

RankLists = list[list[int]]


def split_groups(parents: RankLists, size: int) -> RankLists:
    """Split every parent group into groups of `size` consecutive ranks.

    >>> split_groups([[0, 1, 2, 3]], 2)
    [[0, 1], [2, 3]]
    """
    length = len(parents[0])
    if size < 1 or length % size:
        raise WorldError(f"{length} ranks cannot be split into groups of {size}")
    return [ranks[i : i + size] for ranks in parents for i in range(0, length, size)]


def orthogonal_groups(groups: RankLists) -> RankLists:
    """Return the groups of ranks at the same position in each of `groups`.

    >>> orthogonal_groups([[0, 1], [2, 3]])
    [[0, 2], [1, 3]]
    """
    return [list(ranks) for ranks in zip(*groups, strict=True)]


def mesh_axis_groups(mesh: torch.Tensor, axes: Sequence[int]) -> RankLists:
    """Return the groups of ranks along some axes of a mesh.

    >>> mesh_axis_groups(torch.arange(8).reshape(2, 2, 2), [0, 1])
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    size = math.prod(mesh.shape[a] for a in axes)
    last = range(mesh.ndim - len(axes), mesh.ndim)
    return mesh.movedim(tuple(axes), tuple(last)).reshape(-1, size).tolist()


def complete_shape(shape: Sequence[int], names: Sequence[str], world_size: int) -> tuple[int, ...]:
    """Return the mesh shape with its -1 filled in; raise if it does not fit the world.

    >>> complete_shape((-1, 2), ("data", "domain"), 8)
    (4, 2)
    """
    mesh_text = f"mesh {tuple(shape)} with axes {tuple(names)}"
    if not shape:
        raise WorldError("a mesh needs at least one axis, and the shape is empty")
    if len(shape) != len(names):
        raise WorldError(f"{mesh_text}: {len(shape)} sizes and {len(names)} names")
    if len(set(names)) != len(names):
        raise WorldError(f"{mesh_text}: two axes have the same name")
    if not all(isinstance(n, str) and n for n in names):
        raise WorldError(f"{mesh_text}: an axis name is a string with at least one letter")
    if any(size < 1 and size != -1 for size in shape):
        raise WorldError(f"{mesh_text}: sizes are at least 1, or -1 for what is left")
    free = [i for i, size in enumerate(shape) if size == -1]
    if len(free) > 1:
        raise WorldError(f"{mesh_text}: only one size can be -1")
    product = math.prod(size for size in shape if size != -1)
    if world_size % product or (not free and product != world_size):
        fit = "divide" if free else "multiply to"
        raise WorldError(f"{mesh_text}: the sizes must {fit} the number of processes, which is {world_size}")
    return tuple(world_size // product if size == -1 else int(size) for size in shape)
