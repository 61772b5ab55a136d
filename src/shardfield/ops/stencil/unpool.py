"""Pools whose windows are data: maxima put back where they came from, and windows of random sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm import collectives
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import handler, mesh_of, rule
from ...dispatch.torch_aliases import aliases
from ...layout import DimSharding, Layout, balanced
from .._common.broadcast import align
from .._common.probe import probe_shapes
from ..indexing.exchange_lists import deliver_rows
from ..indexing.owners import Owners, validate_index
from .adaptive_pool import AdaptiveWindow
from .padded_block import empty_result
from .pool import result_dtype

UNPOOL: dict[int, Callable] = {2: F.max_unpool2d, 3: F.max_unpool3d}
# what torch's Python functions call once they know the size of the result
NATIVE_UNPOOL = [fn for public in UNPOOL.values() for fn in aliases(public) if fn is not public]
FRACTIONAL: dict[int, Callable] = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}
FRACTIONAL_WITH_INDICES = (F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices)


# ---------------------------------------------------------------------- back to where the maxima were


@rule(*NATIVE_UNPOOL, exact=True)
def max_unpool(input: Operand, indices: Operand, output_size, *more, fn):
    """Each rank holds the stretch of the result that its part of the input was pooled from, more or less; a value whose
    place is elsewhere goes there. Of several values for one place, one stays, as on one device."""
    size = probe_shapes(fn, input, indices, output_size, *more).shape[-len(output_size) :]
    nd = len(size)
    result_dtype(input, nd, lambda x: UNPOOL[nd](x, x.to(indices.dtype), 1))
    how = align((input.layout, indices.layout))
    source = result = how.result
    first = source.ndim - nd
    for d, n in enumerate(size, first):
        (factor,) = source.dims[d]
        cut = AdaptiveWindow(factor.size, n).owned(factor.shard_sizes) if factor.axes else ()
        result = result.with_dim(d, DimSharding(n, factor.axes, cut))
    owners = Owners(
        result,
        range(result.ndim),
        result.nontrivial_axes(a for d in range(first, result.ndim) for a in result.axes_of(d)),
    )
    here = Owners(source, range(first))
    cells, shape = size.numel(), result.local_shape

    def local(input: Tensor, indices: Tensor) -> Tensor:
        indices = validate_index(indices, cells, source, negative=False, error=RuntimeError)
        if not owners.axes:
            flat = input.new_zeros((*shape[:first], cells))
            return flat.scatter(-1, indices.flatten(first), input.flatten(first)).reshape(shape)
        lead: Any = 0
        for at, n in zip(here.local_indices(indices.device), source.shape[:first], strict=True):
            lead = lead * n + at
        numbers = lead.view(*lead.shape, *[1] * nd) * cells + indices
        positions, values = deliver_rows(owners, numbers.reshape(-1), input.reshape(-1), owners.axes)
        place = positions[0]
        for position, n in zip(positions[1:], shape[1:], strict=True):
            place = place * n + position
        return values.new_zeros(shape.numel()).scatter(0, place, values).reshape(shape)

    return Plan(local=local, operands={"input": how.targets[0], "indices": how.targets[1]}, layout=result)


# ---------------------------------------------------------------------- windows of random sizes


@handler(*FRACTIONAL.values(), *FRACTIONAL_WITH_INDICES, exact=True)
def fractional_max_pool(func, types, args, kwargs):
    """The samples that place the windows are few: the first rank's, drawn as torch draws them, are sent to all."""
    names = ("input", "kernel_size", "output_size", "output_ratio", "return_indices", "_random_samples")
    given = dict.fromkeys(names[2:]) | dict(zip(names, args, strict=False)) | kwargs
    input, samples = given["input"], given["_random_samples"]
    nd = int(func.__name__.removeprefix("fractional_max_pool")[0])
    if samples is None:
        shape = (1 if input.ndim == nd + 1 else input.shape[0], input.shape[-nd - 1], nd)
        samples = collectives.broadcast_over(
            torch.rand(shape, dtype=input.dtype, device=input.device), mesh_of(args, kwargs), 0
        )
    how = (given["kernel_size"], given["output_size"], given["output_ratio"], func in FRACTIONAL_WITH_INDICES)
    return _run_fractional(FRACTIONAL[nd], (), (input, samples, *how), {})


def _plan_fractional(
    input: Operand, samples: Operand, kernel_size, output_size, output_ratio, pair: bool, *, fn
) -> Plan:
    """Where windows lie depends on sample and channel: the dims they run over are whole, others carry their cuts."""
    nd = int(fn.__name__.removeprefix("fractional_max_pool")[0])
    how = (kernel_size, output_size, output_ratio, True)
    out = probe_shapes(fn, input, *how, samples)[0].shape
    dtype = result_dtype(
        input, nd, lambda x: fn(x.new_zeros(1, 1, *[3] * nd), 1, 1, _random_samples=x.new_zeros(1, 1, nd))
    )
    source = shard_lead_dims(input.layout, nd)
    result = source.with_dims([*source.dims[:-nd], *((DimSharding(n),) for n in out[-nd:])])
    lead = source.dims[:-nd] if input.ndim == nd + 2 else [(DimSharding(1),), *source.dims[:-nd]]
    where = Layout.make(source.mesh, [*lead, (DimSharding(nd),)])
    shape = result.local_shape

    def local(input: Tensor, samples: Tensor) -> Any:
        if shape.numel():
            found = fn(input, *how, samples)
        else:
            made = empty_result(input, shape, dtype)
            found = made, torch.empty_like(made, dtype=torch.int64)
        return found if pair else found[0]

    layout = (result, result) if pair else result
    return Plan(local=local, operands={"input": source, "samples": where}, layout=layout)


def shard_lead_dims(layout: Layout, nd: int) -> Layout:
    """The layout with its last `nd` dims whole; their cuts go to dims before them that are whole and have room."""
    first = layout.ndim - nd
    found = layout.unshard(range(first, layout.ndim))
    for axis in layout.nontrivial_axes(a for d in range(first, layout.ndim) for a in layout.axes_of(d)):
        parts = layout.mesh.size(axis)
        for d, n in enumerate(layout.shape[:first]):
            if not found.axes_of(d) and n >= parts:
                found = found.with_dim(d, DimSharding(n, (axis,), balanced(n, parts)))
                break
    return found


_run_fractional = make_handler(_plan_fractional, partial=False, merged=False)
