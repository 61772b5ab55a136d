"""New tensors like a given one: they lie as it lies, with nothing to reduce, and nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.registry import handler
from ...layout import Layout
from ...tensor import ShardTensor, wrap
from ..spectral import lazy_spectrum


def as_number(value):
    """A number that came as a ShardTensor."""
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
        later = lazy_spectrum.lazy_zeros_like(x, named.get("dtype") or x.dtype)
        if later is not None:
            return later
    return wrap(func(x._local_tensor, **named), x._layout.with_partial(()))


@handler("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
def new_with_shape(func, types, args, kwargs):
    """Of the same shape: the same layout. Of another: whole on every rank."""
    x, *rest = args
    kwargs = {k: as_number(v) for k, v in kwargs.items()}
    if not isinstance(x, ShardTensor):
        return func(x, *map(as_number, rest), **kwargs)
    whole = func(
        torch.empty(0, device="meta"), *map(as_number, rest), **{k: v for k, v in kwargs.items() if k != "device"}
    )
    if whole.shape != x.shape or func.__name__ == "new_empty_strided":
        local = func(lazy_spectrum.proxy_local(x), *map(as_number, rest), **kwargs)
        made = wrap(local, Layout.replicate(x._layout.mesh, whole.shape))
        made._unsent = True
        return made
    layout = x._layout.with_partial(())
    numbers = len(rest) and isinstance(rest[0], int)
    kwargs.pop("size", None)
    rest = [layout.local_shape, *([] if numbers else map(as_number, rest[1:]))]
    return wrap(func(lazy_spectrum.proxy_local(x), *rest, **kwargs), layout)


@handler("new_tensor")
def new_tensor(func, types, args, kwargs):
    """Data as a tensor of this one's kind, whole on every rank; of a ShardTensor, a copy that lies as it does."""
    x, data = args if len(args) > 1 else (args[0], kwargs.pop("data"))
    if isinstance(data, ShardTensor):
        data = data._reduced_value()
        kwargs = {"dtype": x.dtype, "device": x.device} | kwargs
        needs = kwargs.pop("requires_grad", False)
        return wrap(data._local_tensor.detach().to(copy=True, **kwargs).requires_grad_(needs), data._layout)
    if not isinstance(x, ShardTensor):
        return func(x, data, **kwargs)
    made: Tensor = func(lazy_spectrum.proxy_local(x), data, **kwargs)
    return wrap(made, Layout.replicate(x._layout.mesh, made.shape))
