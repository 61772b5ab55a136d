"""`zeros_like`, `new_zeros` and others. Results have the input's sharding and no Partial; nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.registry import handler
from ...layout import DimSharding, Layout
from ...redistribute import without_partial
from ...tensor import ShardTensor, wrap
from ..indexing.result_placement import find_row_origin
from ..spectral import lazy_spectrum


def as_number(value):
    """Return the value of a ShardTensor with one element; return other values unchanged."""
    return value.item() if isinstance(value, ShardTensor) else value


@handler("empty_like", "zeros_like", "ones_like", "full_like")
def new_like(func, types, args, kwargs):
    named = dict(zip(("input", "fill_value"), args, strict=False)) | kwargs
    x = named.pop("input")
    if "fill_value" in named:
        named["fill_value"] = as_number(named["fill_value"])
    if not isinstance(x, ShardTensor):
        return func(x, **named)
    if func.__name__ == "zeros_like" and not named.keys() - {"dtype"}:
        lazy = lazy_spectrum.lazy_zeros_like(x, named.get("dtype") or x.dtype)
        if lazy is not None:
            return lazy
    layout = without_partial(x._layout)
    local = x._local_tensor
    if layout.local_shape != local.shape:  # a large Partial
        local = local.new_empty(layout.local_shape)
    return wrap(func(local, **named), layout)


@handler("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
def new_with_shape(func, types, args, kwargs):
    """Return a tensor that is sharded along the dims that have the input's sizes, or by origins.

    A dim of the input's size takes the input's sharding: the new tensor is most likely a field on the same grid. If the
    input's entries were selected from a dim of the new size (messages along edges are selected from nodes), the new dim
    takes the sharding of that dim. Rows that are written to the new tensor then need no other hint.
    """
    x, *rest = args
    kwargs = {k: as_number(v) for k, v in kwargs.items()}
    if not isinstance(x, ShardTensor):
        return func(x, *map(as_number, rest), **kwargs)
    meta = func(
        torch.empty(0, device="meta"), *map(as_number, rest), **{k: v for k, v in kwargs.items() if k != "device"}
    )
    layout = _layout_like(without_partial(x._layout), meta.shape)
    if not layout.shard_axes or func.__name__ == "new_empty_strided":
        local = func(x._metadata_local(), *map(as_number, rest), **kwargs)
        return wrap(local, Layout.replicate(x._layout.mesh, meta.shape))
    varargs = len(rest) and isinstance(rest[0], int)
    kwargs.pop("size", None)
    rest = [layout.local_shape, *([] if varargs else map(as_number, rest[1:]))]
    return wrap(func(x._metadata_local(), *rest, **kwargs), layout)


def _layout_like(like: Layout, shape: Sequence[int]) -> Layout:
    """Build a layout of `shape`, dim by dim: the sharding of `like`, or of an origin of this size that it has there."""
    if shape == like.shape:
        return like
    layout = Layout.replicate(like.mesh, shape)
    if len(shape) == like.ndim:
        pairs = zip(like.dims, like.shape, shape, strict=True)
        layout = layout.with_dims(factors if n == size else [DimSharding(n)] for factors, size, n in pairs)
    for dim in range(min(like.ndim, len(shape))):
        origin = find_row_origin(shape[dim], like.origins(dim))
        if origin is not None and not layout.axes_of(dim) and not set(origin.axes) & set(layout.shard_axes):
            layout = layout.with_dim(dim, DimSharding(origin.size, origin.axes, origin.shard_sizes))
    return layout


@handler("new_tensor")
def new_tensor(func, types, args, kwargs):
    """Return `data` as a replicated tensor of x's dtype and device; a ShardTensor is copied with its layout."""
    x, data = args if len(args) > 1 else (args[0], kwargs.pop("data"))
    if isinstance(data, ShardTensor):
        data = data._reduced_value()
        kwargs = {"dtype": x.dtype, "device": x.device} | kwargs
        requires_grad = kwargs.pop("requires_grad", False)
        return wrap(data._local_tensor.detach().to(copy=True, **kwargs).requires_grad_(requires_grad), data._layout)
    if not isinstance(x, ShardTensor):
        return func(x, data, **kwargs)
    out: Tensor = func(x._metadata_local(), data, **kwargs)
    return wrap(out, Layout.replicate(x._layout.mesh, out.shape))
