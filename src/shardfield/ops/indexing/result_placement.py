"""Choose the sharding of a replicated tensor that sharded rows are written into.

The common case is message passing on a graph: messages along edges are added to zeros, one row per node. The zeros do
not show how the nodes are sharded, but the messages do. Rows that were selected from nodes carry an `Origin` through
products, norms and concatenations. A target of the origin's size takes the sharding of the nodes. Rows without an
origin are placed by the bytes sent: the target becomes Partial, or is chunked along the indexed dim. Both decisions
depend only on the layouts of the operands, so all ranks choose the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import trace_state
from ..._compat.storage import is_sole_holder, is_sole_reference
from ...comm import consensus
from ...debug import explain
from ...layout import DimSharding, Layout, Origin, nested_chunk
from ...tensor import ShardTensor

MESSAGE_COST_BYTES = 1 << 15  # bytes whose transfer takes as long as the latency of one message


def with_row_origins(factors: Sequence[DimSharding], source: Layout, dims: Iterable[int]) -> tuple[DimSharding, ...]:
    """Return the sharding of an entry dim, with the sharded dims of `source` that its entries were taken from."""
    if len(factors) != 1:
        return tuple(factors)
    found = []
    for dim in dims:
        if source.is_sharded(dim) and len(source.dims[dim]) == 1:
            (factor,) = source.dims[dim]
            found.append(Origin("rows", *factor))
    return (factors[0].with_origins(found),)


def find_row_origin(size: int, *entry_dims: Iterable[Origin]) -> Origin | None:
    """Return the dim of `size` that rows were selected from: the origin in the first of `entry_dims` that has one.

    Return None if there are two with different shardings: the target could have either.
    """
    for origins in entry_dims:
        fitting = [o for o in origins if o.kind == "rows" and o.size == size]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None


def choose_result_layout(
    target: Layout,
    dim: int,
    entry_axes: tuple[int, ...],
    count: int,
    item: int,
    accumulate: bool,
    origin: Origin | None,
) -> Layout:
    """Choose the layout of a target unsharded along `dim`, for `count` entries that are sharded over `entry_axes`.

    `origin` is the dim that the rows came from. With `accumulate`, rows of one place are summed, so that the result may
    be Partial. Without it, rows overwrite the target, and a Partial would add them.
    """
    size, parts = target.shape[dim], [target.mesh.size(a) for a in entry_axes]
    used = {*target.shard_axes, *target.partial_axes}
    if origin is not None and not used & set(origin.axes):
        over = [(a, "sum") for a in entry_axes if a not in origin.axes]
        if accumulate or not over:
            sharded = target.with_dim(dim, DimSharding(size, origin.axes, origin.shard_sizes))
            return Layout.make(target.mesh, sharded.dims, [*target.partial, *over])
    row = target.numel // max(size, 1) * item
    # Compare an all_reduce of the target with an exchange of the distinct rows, which needs three messages.
    exchanged = min(count // math.prod(parts), size) * (row + 8) + 3 * MESSAGE_COST_BYTES
    if accumulate and (size < 2 or 2 * size * row <= exchanged):
        return Layout.make(target.mesh, target.dims, [*target.partial, *((a, "sum") for a in entry_axes)])
    return target.with_dim(dim, DimSharding(size, entry_axes, nested_chunk(size, parts)))


def report_placement(before: Layout, after: Layout) -> None:
    """Record in explain() that a replicated target became Partial."""
    if len(after.partial) > len(before.partial):
        explain.record_outcome("rule: partial sums of the target", nested=True)


# ---------------------------------------------------------------------- targets that are written in place


def may_reshard(target: Tensor, written: Sequence[Tensor], mesh: Any) -> bool:
    """Return whether a replicated tensor that is written in place may be resharded: nothing else refers to its memory.

    All ranks agree in one small message, as one rank may hold a reference that others do not. A backend's thread may
    not have dropped a sent tensor yet, a reference cycle may not be collected yet, or a log may keep a view on one
    rank. If each rank decided alone, ranks would choose different shardings and issue different collectives.
    """
    sharded = any(isinstance(t, ShardTensor) and t._layout.nontrivial_axes(t._layout.shard_axes) for t in written)
    if not sharded or (isinstance(target, ShardTensor) and not target._layout.is_replicated):
        return False
    groups = [mesh.get_group(a) for a in range(mesh.ndim) if mesh.size(a) > 1]
    return not consensus.any_rank([_has_aliases(target)], groups)[0]


def has_lasting_aliases(target: Tensor) -> bool:
    """Return whether anything else refers to the memory of a tensor on this rank, after waiting for backend threads.

    A backend's thread drops a tensor shortly after sending it. Without the wait, the same program would sometimes find
    an alias and sometimes none.
    """
    for _ in range(20):
        if not _has_aliases(target):
            return False
        time.sleep(0.001)
    return True


def _has_aliases(target: Tensor) -> bool:
    """Return whether autograd or another tensor refers to the memory of a tensor on this rank."""
    if target.__class__ is ShardTensor:
        assert target._local_tensor is not None  # a lazy value is materialized before its references are counted
        shared = not is_sole_holder(target.__dict__, "_local_tensor")
        return shared or bool(target._copied_view) or _has_aliases(target._local_tensor)
    trace_state.drop_fake_reference(target)
    leaf = target.is_leaf and target.requires_grad
    return not trace_state.is_plain(target) or leaf or target._is_view() or not is_sole_reference(target)


def swap_value(target: Tensor, value: ShardTensor) -> None:
    """Replace the value of a tensor whose memory nothing else refers to."""
    if target.__class__ is ShardTensor:
        target._local_tensor, target._layout, target._reduced_cache = value._local_tensor, value._layout, None
    else:
        torch.utils.swap_tensors(target, value)
