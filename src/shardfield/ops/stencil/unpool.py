"""Pools whose windows depend on data: max_unpool (global indices) and fractional_max_pool (random windows)."""

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
from .._common.autocast import under_autocast
from .._common.broadcast import align
from .._common.probe import probe, stand_in
from ..indexing.exchange_lists import deliver_rows
from ..indexing.owners import Owners, validate_index
from .adaptive_pool import AdaptiveWindow
from .halo_plan import sharding_of_outputs
from .padded_block import empty_result

UNPOOL: dict[int, Callable] = {2: F.max_unpool2d, 3: F.max_unpool3d}
# the ops that F.max_unpool2d and F.max_unpool3d call with the size of the result


def _unpool_one_cell(x: Tensor) -> Tensor:
    return F.max_unpool2d(x, torch.zeros_like(x, dtype=torch.int64), 1)


NATIVE_UNPOOL = [fn for public in UNPOOL.values() for fn in aliases(public) if fn is not public]
FRACTIONAL: dict[int, Callable] = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}
FRACTIONAL_WITH_INDICES = (F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices)


# ---------------------------------------------------------------------- max_unpool


@rule(*NATIVE_UNPOOL, exact=True, around=under_autocast(_unpool_one_cell, 1, 1, 1, 1))
def max_unpool(input: Operand, indices: Operand, output_size, *more, fn):
    """Send each value to the rank that owns its index in the result.

    The result is sharded in the proportions of the input, so most indices are local. Of several values with one index
    one is kept, as on one device.
    """
    size = probe(fn, input, indices, output_size, *more, meta=True).shape[-len(output_size) :]
    nd = len(size)
    one_cell = (1,) * (nd + 2)
    probe(UNPOOL[nd], stand_in(input, one_cell), stand_in(indices, one_cell), 1)
    alignment = align((input.layout, indices.layout))
    source = result = alignment.result
    first = source.ndim - nd
    for d, n in enumerate(size, first):
        (sharding,) = source.dims[d]
        result = result.with_dim(
            d, sharding_of_outputs(AdaptiveWindow(sharding.size, n), sharding, sharding.shard_sizes)
        )
    owners = Owners(
        result,
        range(result.ndim),
        result.nontrivial_axes(a for d in range(first, result.ndim) for a in result.axes_of(d)),
    )
    lead_owners = Owners(source, range(first))
    cells, shape = size.numel(), result.local_shape

    def local(input: Tensor, indices: Tensor) -> Tensor:
        indices = validate_index(indices, cells, source, negative=False, error=RuntimeError)
        if not owners.axes:
            flat = input.new_zeros((*shape[:first], cells))
            return flat.scatter(-1, indices.flatten(first), input.flatten(first)).reshape(shape)
        lead: Any = 0
        for index, n in zip(lead_owners.local_indices(indices.device), source.shape[:first], strict=True):
            lead = lead * n + index
        flat_index = lead.view(*lead.shape, *[1] * nd) * cells + indices
        positions, values = deliver_rows(owners, flat_index.reshape(-1), input.reshape(-1), owners.axes)
        flat_position = positions[0]
        for position, n in zip(positions[1:], shape[1:], strict=True):
            flat_position = flat_position * n + position
        return values.new_zeros(shape.numel()).scatter(0, flat_position, values).reshape(shape)

    return Plan(local=local, operands={"input": alignment.targets[0], "indices": alignment.targets[1]}, layout=result)


# ---------------------------------------------------------------------- fractional_max_pool


@handler(*FRACTIONAL.values(), *FRACTIONAL_WITH_INDICES, exact=True)
def fractional_max_pool(func, types, args, kwargs):
    """Draw the random window positions on the first rank, as torch does, and broadcast them."""
    names = ("input", "kernel_size", "output_size", "output_ratio", "return_indices", "_random_samples")
    arguments = dict.fromkeys(names[2:]) | dict(zip(names, args, strict=False)) | kwargs
    input, samples = arguments["input"], arguments["_random_samples"]
    nd = int(func.__name__.removeprefix("fractional_max_pool")[0])
    if samples is None:
        shape = (1 if input.ndim == nd + 1 else input.shape[0], input.shape[-nd - 1], nd)
        samples = collectives.broadcast_over(
            torch.rand(shape, dtype=input.dtype, device=input.device), mesh_of(args, kwargs), 0
        )
    options = (
        arguments["kernel_size"],
        arguments["output_size"],
        arguments["output_ratio"],
        func in FRACTIONAL_WITH_INDICES,
    )
    return _run_fractional(FRACTIONAL[nd], (), (input, samples, *options), {})


def _plan_fractional(
    input: Operand, samples: Operand, kernel_size, output_size, output_ratio, with_indices: bool, *, fn
) -> Plan:
    """Unshard the pooled dims, as windows differ by sample and channel; shard batch or channels over their axes."""
    nd = int(fn.__name__.removeprefix("fractional_max_pool")[0])
    options = (kernel_size, output_size, output_ratio, True)
    out = probe(fn, input, *options, samples, meta=True)[0].shape
    small, sample = stand_in(input, (1, 1, *[3] * nd)), stand_in(samples, (1, 1, nd))
    dtype = probe(fn, small, 1, 1, _random_samples=sample).dtype
    source = shard_lead_dims(input.layout, nd)
    result = source.with_dims([*source.dims[:-nd], *((DimSharding(n),) for n in out[-nd:])])
    lead = source.dims[:-nd] if input.ndim == nd + 2 else [(DimSharding(1),), *source.dims[:-nd]]
    samples_layout = Layout.make(source.mesh, [*lead, (DimSharding(nd),)])
    shape = result.local_shape

    def local(input: Tensor, samples: Tensor) -> Any:
        if shape.numel():
            maxima, indices = fn(input, *options, samples)
        else:
            maxima = empty_result(input, shape, dtype)
            indices = torch.empty_like(maxima, dtype=torch.int64)
        return (maxima, indices) if with_indices else maxima

    layout = (result, result) if with_indices else result
    return Plan(local=local, operands={"input": source, "samples": samples_layout}, layout=layout)


def shard_lead_dims(layout: Layout, nd: int) -> Layout:
    """Unshard the last `nd` dims; shard unsharded dims before them over the freed axes, if those are large enough."""
    first = layout.ndim - nd
    result = layout.unshard(range(first, layout.ndim))
    for axis in layout.nontrivial_axes(a for d in range(first, layout.ndim) for a in layout.axes_of(d)):
        parts = layout.mesh.size(axis)
        for d, n in enumerate(layout.shape[:first]):
            if not result.axes_of(d) and n >= parts:
                result = result.with_dim(d, DimSharding(n, (axis,), balanced(n, parts)))
                break
    return result


_run_fractional = make_handler(_plan_fractional, partial=False, merged=False)
