"""The `*_copy` variants of view functions, and the in-place variants (`squeeze_`, `transpose_`, ...)."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ...dispatch.registry import composed, handler, map_tensors
from ...errors import ShardingError
from ...tensor import ShardTensor, wrap

VIEW_COPIES = """
as_strided diagonal expand narrow permute select split split_with_sizes squeeze t transpose unbind unfold
unsqueeze view view_as_complex view_as_real
""".split()


def copy_of_view(name: str):
    """Return a handler that calls the view function and clones its results."""
    view = getattr(torch.Tensor, name, None) or getattr(torch, name)

    def run(func, types, args, kwargs):
        return map_tensors(view(*args, **kwargs), lambda t: t.clone())

    return run


for _name in VIEW_COPIES:
    handler(_name + "_copy")(copy_of_view(_name))


@composed("alias_copy", "detach_copy")
def alias_copy(input):
    return input.clone()


@composed("slice_copy")
def slice_copy(input, dim=0, start=None, end=None, step=1):
    dim = range(input.ndim)[dim]
    return input[(slice(None),) * dim + (slice(start, end, step),)].clone()


def inplace_view(name: str):
    """Return the handler of an in-place variant: the tensor takes the shape of its view."""
    view = getattr(torch.Tensor, name)

    def run(func, types, args, kwargs):
        target = args[0]
        if weakref.getweakrefs(target):  # swap_tensors refuses it
            raise ShardingError(
                f"{name}_: this tensor is a copy of a view, whose source was Partial or has other shards, or another "
                f"object has a weak reference to it. Use x = x.{name}(...) instead"
            )
        if torch.is_grad_enabled() and target.requires_grad and target.is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        out = view(target._reduced_value(), *args[1:], **kwargs)
        out._check_writable()
        _swap_value(target, out)
        return target

    return run


def _swap_value(target: ShardTensor, value: ShardTensor) -> None:
    """Replace the data and sizes of `target` by those of `value`. Only swap_tensors can change its C++ sizes."""
    local: Tensor = value._local_tensor
    layout = value._layout
    torch.utils.swap_tensors(target, wrap(local, layout))


for _name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"):
    handler(_name + "_")(inplace_view(_name))
