"""What reductions share: torch's verdict on a call, and results of pieces brought together across ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import trace_state
from ..._compat import function_apply
from ...comm import autograd_collectives, collectives
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import Operand, process_groups
from ...layout import DimSharding, Layout

HALF_DTYPES = (torch.float16, torch.bfloat16)


def probe(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """What torch says to a call, tried on tensors of at most two elements a dim (none where the operand has none).

    It raises torch's own errors (a dim out of range, an empty dim, a dtype it lacks) while planning, which all ranks
    do alike; a rank with an empty piece might not see them otherwise. Arguments that are None are left out.
    """

    def tiny(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        make = torch.ones if value.dtype.is_floating_point or value.dtype.is_complex else torch.zeros  # 0 is any index
        return make([min(n, 2) for n in value.shape], dtype=value.dtype, device=value.device)

    given = {k: tiny(v) for k, v in kwargs.items() if v is not None}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*[tiny(a) for a in args], **given)


def autocast_to_fp32(*tensors: Any) -> list[Any]:
    """Operands of a function that autocast runs in fp32, for one that is put together from others here."""

    def wide(value: Any) -> Any:
        half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
        return value.float() if half and torch.is_autocast_enabled(value.device.type) else value

    return [wide(t) for t in tensors]


def probe_shapes(fn: Callable, *args: Any) -> Any:
    """torch's verdict on the shapes of a call, which tensors of two elements a dim cannot tell."""

    def bare(value: Any) -> Any:
        if not isinstance(value, (Tensor, Operand)):
            return value
        # torch's shape functions gather by class indices, which bytes may be for it but not for them
        dtype = torch.int64 if value.dtype is torch.uint8 else value.dtype
        if dtype in HALF_DTYPES and torch.is_autocast_enabled(value.device.type):
            dtype = torch.float32  # autocast lets half meet float, but knows no meta tensors
        return torch.empty(value.shape, dtype=dtype, device="meta")

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*[bare(a) for a in args])


def reduced_dims(ndim: int, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The dims a reduction runs over, as torch reads its `dim` argument (None and () mean all)."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {d})")
    return tuple(sorted(d % ndim for d in dims)) if ndim else ()


def reduced_layout(layout: Layout, dims: Sequence[int], keepdim: bool, op: str | None = "sum") -> Layout:
    """The result's layout: reduced dims gone (or 1 long), Partial(op) over the axes that cut them (op None: done)."""
    axes = [a for d in dims for a in layout.axes_of(d)]
    partial = [*layout.partial, *((a, op) for a in axes)] if op else layout.partial
    whole = [(DimSharding(1),) if d in dims else f for d, f in enumerate(layout.dims) if keepdim or d not in dims]
    return Layout.make(layout.mesh, whole, partial)


def sharding_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes, of more than one rank, that cut any of `dims`."""
    return layout.nontrivial_axes(a for d in dims for a in layout.axes_of(d))


def gather_stacked(part: Tensor, layout: Layout, axes: Sequence[int]) -> Tensor:
    """Every rank's part along a new first dim, the last axis outermost. One small message an axis; adjoint: a slice."""
    parts = part.unsqueeze(0)
    for axis in axes:
        size = layout.mesh.size(axis)
        parts = autograd_collectives.gather(parts, 0, [parts.shape[0]] * size, layout.mesh.get_group(axis))
    return parts


def all_reduce_minmax(part: Tensor, over: Groups, op: str) -> Tensor:
    """The max or min of every rank's part. Not differentiable: see `known_sum`."""
    part = part.detach()
    for group in over:
        part = collectives.all_reduce(part, group, op)
    return part


def known_sum(part: Tensor, value: Tensor, over: Groups) -> Tensor:
    """The sum of parts whose outcome `value` is known already: no message. Adjoint: the identity, as of `reduce`."""
    return _KnownSum.apply(part, value, over) if part.requires_grad and torch.is_grad_enabled() else value


class _KnownSum(torch.autograd.Function):
    apply = function_apply

    @staticmethod
    def forward(ctx, part, value, over):
        ctx.over = over
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return autograd_collectives.replicate_in([grad], ctx.over)[0], None, None


def safe_sqrt(square: Tensor) -> Tensor:
    """The square root; its gradient is 0 at 0, where torch's std and norms have it so."""
    still = square == 0
    return torch.where(still, 0, torch.where(still, 1, square).sqrt())


def raise_if_any_rank(bad: Tensor, over: Groups, error: type[Exception], why: str) -> None:
    """Raise on all ranks what torch raises on one device for bad values on any of them.

    On the CPU only: elsewhere torch does not raise either but stops the device, and reading a flag would stall it.
    """
    if bad.device.type == "cpu":
        flag = bad.any()
        for group in over:
            flag = collectives.all_reduce(flag, group, "max")
        raise_if(flag, error, why)


def raise_if(flag: Tensor, error: type[Exception], why: str) -> None:
    """Raise for a flag that is the same on all ranks; in a traced program, whenever it runs."""
    if trace_state.tracer is not None:
        trace_state.tracer.raise_if(flag, error, why)
    elif not trace_state.fake_tensors and flag:
        raise error(why)


def shard_groups(layout: Layout) -> Groups:
    """The groups over which a value is in pieces."""
    return process_groups(layout, layout.shard_axes)
