"""Where rows go that are written into a tensor that is whole on every rank, as zeros that messages are added to.

The rows of a graph's nodes are cut in some way, but the zeros that their messages are summed into do not tell: they are
as long as the nodes are many, and that is all. So the cut is remembered of every dim that entries are taken from or
written to, by its length, and given to the sums. Where none is known, and bytes do not speak against it, each rank
keeps addends of the whole: Partial.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import trace_state
from ..._compat import is_sole_reference
from ...comm import consensus
from ...debug import explain
from ...layout import DimSharding, Layout, nested_chunk
from ...tensor import ShardTensor

MESSAGE_COST_BYTES = 1 << 15  # bytes that take as long as one message more
PlacementHint = tuple[
    bool, torch.Size, torch.Size
]  # whether the target may be cut though it is written in place; axes, lengths
NO_HINT: PlacementHint = (False, torch.Size(()), torch.Size(()))

_SHARDING_BY_SIZE: dict[tuple[Any, int], DimSharding] = {}


def record_sharding(layout: Layout, dims: Sequence[int]) -> None:
    """Remember how dims are cut that entries are taken from or written to. All ranks see the same calls."""
    for d in dims:
        if layout.is_sharded(d) and len(layout.dims[d]) == 1:
            _SHARDING_BY_SIZE[layout.mesh, layout.shape[d]] = layout.dims[d][0]


def find_placement_hint(
    target: Tensor, dim: int, written: Sequence[Tensor], mesh: Any, in_place: bool
) -> PlacementHint:
    """What is known of where rows of a whole tensor could go, for `written`: the index and what it writes."""
    cut = any(isinstance(t, ShardTensor) and t._layout.nontrivial_axes(t._layout.shard_axes) for t in written)
    if not cut or (isinstance(target, ShardTensor) and not target._layout.is_replicated):
        return NO_HINT
    known = _SHARDING_BY_SIZE.get((mesh, target.shape[dim]))
    axes, lengths = (known.axes, known.shard_sizes) if known else ((), ())
    return in_place and _may_reshard(target, mesh), torch.Size(axes), torch.Size(lengths)


def _may_reshard(target: Tensor, mesh: Any) -> bool:
    """Whether a tensor that is written in place may be cut, since nobody looks at its memory.

    All ranks must say the same. Of a tensor that may have been sent they do not: a backend's threads let go of its
    memory when they get to it. So they tell each other.
    """
    held = _has_aliases(target)
    if getattr(target, "_unsent", False) or not consensus.checks_enabled():
        return not held
    return not consensus.any_rank([held], [mesh.get_group(a) for a in range(mesh.ndim) if mesh.size(a) > 1])[0]


def _has_aliases(target: Tensor) -> bool:
    """Whether autograd or other tensors look at the memory of a tensor."""
    if target.__class__ is ShardTensor:
        users = sys.getrefcount(target.__dict__["_local_tensor"])  # of its own: the dict, and this call
        return users > 2 or bool(target._copied_view) or _has_aliases(target._local_tensor)
    trace_state.drop_fake_reference(target)
    leaf = target.is_leaf and target.requires_grad
    return not trace_state.is_plain(target) or leaf or target._is_view() or not is_sole_reference(target)


def swap_value(target: Tensor, value: ShardTensor) -> None:
    """Let a tensor that nobody else looks at be `value` from now on."""
    if target.__class__ is ShardTensor:
        target._local_tensor, target._layout, target._reduced_cache = value._local_tensor, value._layout, None
        target._unsent = False
    else:
        torch.utils.swap_tensors(target, value)


def choose_result_layout(
    target: Layout, dim: int, entry_axes: tuple[int, ...], count: int, item: int, accumulate: bool, hint: PlacementHint
) -> Layout:
    """A layout for a target that is whole along `dim`, for `count` entries that are cut over the axes `entry_axes`.

    adds: what is written to one place adds up, and may stay in addends.
    """
    size, parts = target.shape[dim], [target.mesh.size(a) for a in entry_axes]
    _, axes, lengths = hint
    taken = {*target.shard_axes, *target.partial_axes}
    over = [(a, "sum") for a in entry_axes if a not in axes]
    if sum(lengths) == size and axes and (accumulate or not over) and not taken & set(axes):
        dims = [(DimSharding(size, tuple(axes), tuple(lengths)),) if d == dim else f for d, f in enumerate(target.dims)]
        return Layout.make(target.mesh, dims, [*target.partial, *over])
    row = target.numel // max(size, 1) * item
    # the sum of addends, against distinct rows at most, and three messages to find out which
    apart = min(count // math.prod(parts), size) * (row + 8) + 3 * MESSAGE_COST_BYTES
    if accumulate and (size < 2 or 2 * size * row <= apart):
        return Layout.make(target.mesh, target.dims, [*target.partial, *((a, "sum") for a in entry_axes)])
    return target.with_dim(dim, DimSharding(size, entry_axes, nested_chunk(size, parts)))


def report_placement(before: Layout, after: Layout) -> None:
    """For reports: what was made of a target that was whole."""
    if len(after.partial) > len(before.partial):
        explain.record_outcome("rule: addends of the whole", nested=True)
