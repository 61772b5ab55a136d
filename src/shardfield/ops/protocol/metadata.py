"""Metadata of a ShardTensor, answered by its layout or local tensor without communication; `to`, `detach`, `data`."""

from __future__ import annotations

import torch

from ..._compat import has_saved_tensor_hooks, tensor_getter
from ...dispatch.copied_views import CopiedView, of_copied_view
from ...dispatch.registry import handler, register
from ...dispatch.write_tracking import set_copied_view
from ...errors import ShardingError
from ...tensor import ShardTensor, wrap
from ..elementwise.pointwise import pointwise, reduce_in_place

# answered by the local tensor, or for a deferred tensor by one of the same dtype and device
METHODS = """
element_size get_device is_complex is_conj is_contiguous is_distributed is_floating_point is_inference is_neg
is_pinned is_shared is_signed dense_dim has_names is_coalesced can_cast __dir__ _is_view _is_zerotensor
""".split()
ATTRIBUTES = """
is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
is_vulkan is_xla is_xpu itemsize layout name names _base
""".split()


def answer_from_local(func, types, args, kwargs):
    """Call `func` on the local tensor. Does not materialize a deferred one."""
    first, *rest = args
    return func(first._metadata_local(), *rest, **kwargs)


for _name in METHODS:
    handler(_name)(answer_from_local)
for _name in ATTRIBUTES:
    if (_getter := tensor_getter(_name)) is not None:
        register(_getter, answer_from_local)


@handler("numel")
def numel(func, types, args, kwargs):
    return args[0]._layout.numel


@handler("is_same_size")
def is_same_size(func, types, args, kwargs):
    return args[0].shape == args[1].shape


@handler("is_nonzero")
def is_nonzero(func, types, args, kwargs):
    if args[0].numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    return bool(args[0].item())


def nbytes(func, types, args, kwargs):
    return args[0]._layout.numel * args[0].dtype.itemsize


@handler("detach")
def detach(func, types, args, kwargs):
    """Share the memory. A Partial is reduced first: a later write, which reduces it, would give it other memory.

    Inside a checkpoint it stays Partial, as the checkpoint must find it again, and a write into the result is refused.
    """
    target = args[0]
    if target._layout.partial and not (target.is_leaf and target.requires_grad):
        if has_saved_tensor_hooks():
            out = pointwise(func, types, args, kwargs)
            set_copied_view(out, True)
            CopiedView(out, target, torch.Tensor.detach)
            return out
        reduce_in_place(target)
    return of_copied_view(pointwise(func, types, args, kwargs), target, torch.Tensor.detach)


def data(func, types, args, kwargs):
    target = args[0]
    shared = target.detach() if target._layout.partial else target  # which reduces it
    return of_copied_view(wrap(shared._local_tensor.data, shared._layout), shared, torch.Tensor.detach)


def set_data(func, types, args, kwargs):
    """Run `x.data = y`: the local data of `y`, redistributed to the layout of `x`, replaces that of `x`."""
    target, value = args
    if not isinstance(value, ShardTensor) or value.shape != target.shape:
        raise ShardingError(f"x.data = y: y must be a ShardTensor of shape {tuple(target.shape)}")
    local = value._redistribute_to(target._layout)._local_tensor
    target._local_tensor.data = local
    target._dtype, target._device = local.dtype, local.device


@handler("_has_compatible_shallow_copy_type")
def can_set_data(func, types, args, kwargs):
    """Return whether `x.data = y` is possible. A plain `x` would get a ShardTensor's dispatch keys, and torch crash."""
    return all(isinstance(t, ShardTensor) for t in args)


register(tensor_getter("nbytes"), nbytes)
register(tensor_getter("data"), data)
register(tensor_getter("data", "__set__"), set_data)


@handler("data_ptr", "storage", "untyped_storage", "storage_offset", "set_", "__dlpack__", "__dlpack_device__")
def refuse_memory_access(func, types, args, kwargs):
    raise ShardingError(
        f"{func.__name__}: a ShardTensor has no storage of its own; x.full_tensor() is a plain tensor with all of its "
        "values, x.to_local() has this rank's shard alone"
    )


@handler("to")
def to(func, types, args, kwargs):
    """Convert dtype, device or memory format, also to those of another tensor; the layout stays."""
    target, *rest = args
    if not isinstance(target, ShardTensor):  # plain.to(sharded)
        return func(target, rest[0]._local_tensor, *rest[1:], **kwargs)
    rest = [r._local_tensor if isinstance(r, ShardTensor) else r for r in rest]
    if "other" in kwargs and isinstance(kwargs["other"], ShardTensor):
        kwargs = kwargs | {"other": kwargs["other"]._local_tensor}
    if target._layout.partial:
        if func(target._local_tensor, *rest, **kwargs) is target._local_tensor:
            return target
        target = target._reduced_value()
    local = func(target._local_tensor, *rest, **kwargs)
    return target if local is target._local_tensor else wrap(local, target._layout)


@handler("type_as")
def type_as(func, types, args, kwargs):
    return args[0].to(args[1].dtype)


@handler("cpu", "cuda", "pin_memory")
def to_device(func, types, args, kwargs):
    target = args[0]._reduced_value()
    return wrap(func(target._local_tensor, *args[1:], **kwargs), target._layout)


@handler(torch.result_type)
def result_type(func, types, args, kwargs):
    return func(*[a._local_tensor.new_empty(a.shape, device="meta") if isinstance(a, ShardTensor) else a for a in args])
