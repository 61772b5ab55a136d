"""Transpositions, squeeze, unsqueeze and expand. Each dim keeps its sharding; nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._compat import tensor_getter
from ...dispatch.plan import Operand, Plan, Returns, ViewKind
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout
from .._common.probe import meta_tensor
from ..matmul.sparse_entries import SparseMatrix, transpose
from .view import loses_writes, plan_scalar


def drop_dims(layout: Layout, dims: Sequence[int]) -> Layout | None:
    """Return the layout after dims of size 1 are dropped, or None if they are sharded and no dim is left.

    A dropped dim that is sharded has its element on one coord of its axes. Its factor is merged into a neighboring
    dim, so that the result has all its elements on that coord and empty shards elsewhere.
    """
    kept = [d for d in range(layout.ndim) if d not in dims]
    factors_of = {d: list(layout.dims[d]) for d in kept}
    for d in reversed(sorted(dims)):
        factors = [f for f in layout.dims[d] if f.axes]
        if factors and not kept:
            return None
        after = next((k for k in kept if k > d), None)
        if after is not None:
            factors_of[after][:0] = factors
        elif factors:
            factors_of[kept[-1]] += factors
    return layout.with_dims([factors_of[d] for d in kept])


@rule("permute", "transpose", "swapaxes", "swapdims", "t", "movedim", "moveaxis", "adjoint", "squeeze",
      *(tensor_getter(name) for name in ("T", "mT", "H", "mH")), partial=True, merged=True,
      accepts_deferred={SparseMatrix: transpose})  # fmt: skip
def permute(input: Operand, *args, fn, **kwargs):
    """Permute the dims of the layout as torch permutes the strides of a meta tensor."""
    layout = input.layout
    tagged_strides = tuple(range(1, input.ndim + 1))
    out = fn(meta_tensor(input, tagged_strides), *args, **kwargs)
    order = [s - 1 for s in out.stride()]
    dropped = [d for d in range(input.ndim) if d not in order]
    if dropped and not order and layout.shard_axes:
        return plan_scalar(layout)
    remaining = layout if not dropped else drop_dims(layout, dropped)
    assert remaining is not None
    position = {d: i for i, d in enumerate(sorted(order))}
    result = remaining.permute([position[d] for d in order])
    if any(layout.is_sharded(d) for d in dropped):
        shape = result.local_shape
        local: Any = lambda input: input.permute(*order, *dropped).reshape(shape)  # noqa: E731
    elif dropped:
        local = lambda input: input.permute(*order, *dropped).squeeze(tuple(range(len(order), input.ndim)))  # noqa: E731
    elif fn.__name__ == "squeeze":  # a dim of global size > 1 may have local size 1, which a local squeeze would drop
        local = lambda input: input.permute(order)  # noqa: E731
    else:
        local = lambda input: fn(input, *args, **kwargs)  # noqa: E731
    # Without a dropped dim the local result is always a view. VIEW_OR_COPY then skips a check of its memory.
    returns = Returns.LOST_VIEW if layout.partial else Returns.VIEW if dropped else Returns.VIEW_OR_COPY
    return Plan(local=local, layout=result, view=ViewKind(returns))


@rule("unsqueeze", partial=True, merged=True)
def unsqueeze(input: Operand, dim):
    """Insert an unsharded dim of size 1."""
    meta_tensor(input).unsqueeze(dim)
    at, layout = dim % (input.ndim + 1), input.layout
    # the local result is always a view
    view = ViewKind(Returns.LOST_VIEW if layout.partial else Returns.VIEW_OR_COPY)
    return Plan(local=lambda input: input.unsqueeze(at), layout=layout.insert(at), view=view)


# ---------------------------------------------------------------------- expand


@rule("expand", "broadcast_to", partial=True, merged=True)
def expand(input: Operand, *size, fn, **kwargs):
    """Expand locally. A sharded dim of size 1 is on one rank only, so it is unsharded before it expands."""
    shape = fn(meta_tensor(input), *size, **kwargs).shape
    skip = len(shape) - input.ndim
    expanded = [d for d in range(input.ndim) if shape[skip + d] != input.shape[d]]
    source = input.layout.unshard(expanded) if input.ndim else input.layout
    dims = [
        (DimSharding(n),) if i < skip or i - skip in expanded else source.dims[i - skip] for i, n in enumerate(shape)
    ]
    result = source.with_dims(dims)
    local_shape = result.local_shape
    return Plan(
        local=lambda input: input.expand(local_shape),
        operands={"input": source},
        layout=result,
        view=ViewKind.view(lost=loses_writes(input.layout, source)),
    )


@composed("expand_as")
def expand_as(input, other):
    return input.expand(other.shape)


@composed("broadcast_tensors")
def broadcast_tensors(*tensors):
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = tuple(tensors[0])
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(shape) for t in tensors)
