"""Dims that change places, come, go or grow. The cut goes with its dim; nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._compat import tensor_getter
from ...dispatch.plan import Operand, Plan, Returns, ViewKind
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout
from .view import loses_writes, meta_tensor, plan_scalar


def drop_dims(layout: Layout, dims: Sequence[int]) -> Layout | None:
    """The layout after dims of size 1 are dropped; a cut of one goes to its neighbour. None if no dim is left.

    Only one rank along the axes of such a cut holds anything; that is a cut of the neighbour with one piece.
    """
    kept = [d for d in range(layout.ndim) if d not in dims]
    found = {d: list(layout.dims[d]) for d in kept}
    for d in reversed(sorted(dims)):
        factors = [f for f in layout.dims[d] if f.axes]
        if factors and not kept:
            return None
        after = next((k for k in kept if k > d), None)
        if after is not None:
            found[after][:0] = factors
        elif factors:
            found[kept[-1]] += factors
    return layout.with_dims([found[d] for d in kept])


@rule("permute", "transpose", "swapaxes", "swapdims", "t", "movedim", "moveaxis", "adjoint", "squeeze",
      *(tensor_getter(name) for name in ("T", "mT", "H", "mH")), partial=True, merged=True)  # fmt: skip
def permute(input: Operand, *args, fn, **kwargs):
    """The cut goes with its dim."""
    layout = input.layout
    marks = tuple(range(1, input.ndim + 1))
    out = fn(meta_tensor(input, marks), *args, **kwargs)
    order = [s - 1 for s in out.stride()]
    gone = [d for d in range(input.ndim) if d not in order]
    if gone and not order and layout.shard_axes:
        return plan_scalar(layout)
    left = layout if not gone else drop_dims(layout, gone)
    assert left is not None
    at = {d: i for i, d in enumerate(sorted(order))}
    result = left.permute([at[d] for d in order])
    if any(layout.is_sharded(d) for d in gone):
        shape = result.local_shape
        local: Any = lambda input: input.permute(*order, *gone).reshape(shape)  # noqa: E731
    elif gone:
        local = lambda input: input.permute(*order, *gone).squeeze(tuple(range(len(order), input.ndim)))  # noqa: E731
    elif fn.__name__ == "squeeze":  # a dim that is longer than 1 may be no longer here
        local = lambda input: input.permute(order)  # noqa: E731
    else:
        local = lambda input: fn(input, *args, **kwargs)  # noqa: E731
    # without a dropped dim the local result is always a view, and VIEW_OR_COPY saves a look at its memory
    returns = Returns.LOST_VIEW if layout.partial else Returns.VIEW if gone else Returns.VIEW_OR_COPY
    return Plan(local=local, layout=result, view=ViewKind(returns))


@rule("unsqueeze", partial=True, merged=True)
def unsqueeze(input: Operand, dim):
    """A new whole dim."""
    meta_tensor(input).unsqueeze(dim)
    at, layout = dim % (input.ndim + 1), input.layout
    # the local result is always a view
    view = ViewKind(Returns.LOST_VIEW if layout.partial else Returns.VIEW_OR_COPY)
    return Plan(local=lambda input: input.unsqueeze(at), layout=layout.insert(at), view=view)


# ---------------------------------------------------------------------- the same elements again


@rule("expand", "broadcast_to", partial=True, merged=True)
def expand(input: Operand, *size, fn, **kwargs):
    """Local. A dim of size 1 that is cut lies on one rank: it is made whole first, before it grows."""
    shape = fn(meta_tensor(input), *size, **kwargs).shape
    skip = len(shape) - input.ndim
    grown = [d for d in range(input.ndim) if shape[skip + d] != input.shape[d]]
    source = input.layout.unshard(grown) if input.ndim else input.layout
    dims = [(DimSharding(n),) if i < skip or i - skip in grown else source.dims[i - skip] for i, n in enumerate(shape)]
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
