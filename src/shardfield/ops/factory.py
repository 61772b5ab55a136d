"""New tensors like a given one: they lie as it lies, with nothing to reduce, and nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import handler
from ..layout import Layout
from ..tensor import ShardTensor, wrap
from . import deferred


def plain(value):
    """A number that came as a ShardTensor."""
    return value.item() if isinstance(value, ShardTensor) else value


@handler("empty_like", "zeros_like", "ones_like", "full_like")
def like(func, types, args, kwargs):
    named = dict(zip(("input", "fill_value"), args, strict=False)) | kwargs
    x = named.pop("input")
    if "fill_value" in named:
        named["fill_value"] = plain(named["fill_value"])
    if not isinstance(x, ShardTensor):
        return func(x, **named)
    if func.__name__ == "zeros_like" and not named.keys() - {"dtype"}:
        later = deferred.zeros(x, named.get("dtype") or x.dtype)
        if later is not None:
            return later
    return wrap(func(x._local_tensor, **named), x._layout.with_partial(()))


@handler("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
def new(func, types, args, kwargs):
    """Of the same shape: the same layout. Of another: whole on every rank."""
    x, *rest = args
    kwargs = {k: plain(v) for k, v in kwargs.items()}
    if not isinstance(x, ShardTensor):
        return func(x, *map(plain, rest), **kwargs)
    whole = func(torch.empty(0, device="meta"), *map(plain, rest), **{k: v for k, v in kwargs.items() if k != "device"})
    if whole.shape != x.shape or func.__name__ == "new_empty_strided":
        local = func(deferred.stand_in(x), *map(plain, rest), **kwargs)
        made = wrap(local, Layout.replicate(x._layout.mesh, whole.shape))
        made._fresh = True
        return made
    layout = x._layout.with_partial(())
    numbers = len(rest) and isinstance(rest[0], int)
    kwargs.pop("size", None)
    rest = [layout.local_shape, *([] if numbers else map(plain, rest[1:]))]
    return wrap(func(deferred.stand_in(x), *rest, **kwargs), layout)


@handler("new_tensor")
def new_tensor(func, types, args, kwargs):
    """Data as a tensor of this one's kind, whole on every rank; of a ShardTensor, a copy that lies as it does."""
    x, data = args if len(args) > 1 else (args[0], kwargs.pop("data"))
    if isinstance(data, ShardTensor):
        data = data._whole_value()
        kwargs = {"dtype": x.dtype, "device": x.device} | kwargs
        needs = kwargs.pop("requires_grad", False)
        return wrap(data._local_tensor.detach().to(copy=True, **kwargs).requires_grad_(needs), data._layout)
    if not isinstance(x, ShardTensor):
        return func(x, data, **kwargs)
    made: Tensor = func(deferred.stand_in(x), data, **kwargs)
    return wrap(made, Layout.replicate(x._layout.mesh, made.shape))
