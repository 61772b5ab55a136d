"""torch-harmonics' DISCO convolution on the sphere, and its transpose, on fields sharded along any dims.

The filter is a sparse table (kernel, output latitude, input latitude and longitude, value), equal for all output
longitudes. An output latitude reads a band of input latitudes, and near the poles all longitudes of them. Each rank
computes the latitudes that it owns: it receives the bands they read and keeps the part of the table that belongs to
them. A sharding of longitudes moves to channels, samples or latitudes first. The handlers are found by the names of the
operators, so that torch-harmonics need not be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import runtime, trace_state
from ...dispatch.arguments import as_operand, mesh_of, to_full_tensor
from ...dispatch.fallback import gather_fallback
from ...layout import DimSharding, Layout, Span, starts
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.derived import kept_with_tensor
from .._common.together import empty_result_of
from .opaque import Reach, place_axes
from .padded_block import PaddedBlockPlan

LIBRARY = "disco_kernels._disco_s2"
CONTRACTION = "_disco_s2_contraction_optimized"
FUNCTIONS = "torch_harmonics.disco.optimized.disco_optimized"


class Psi(NamedTuple):
    """The sparse table. `offsets` separates runs of entries with one kernel and one row."""

    offsets: Tensor
    kernel: Tensor
    row: Tensor
    column: Tensor
    values: Tensor


class Bands(NamedTuple):
    """Along latitudes: output `o` reads the inputs `low[o]` to `high[o]`; both increase with `o`."""

    size: int
    out: int
    low: Sequence[int]
    high: Sequence[int]

    @staticmethod
    def of(size: int, out: int, outputs: Tensor, inputs: Tensor) -> Bands:
        """Return the bands of pairs (output latitude, input latitude)."""
        outputs, inputs = outputs.cpu(), inputs.cpu()
        low = torch.full((out,), size).scatter_reduce(0, outputs, inputs, "amin")
        high = torch.zeros(out, dtype=torch.int64).scatter_reduce(0, outputs, inputs + 1, "amax")
        return Bands(size, out, low.flip(0).cummin(0).values.flip(0).tolist(), high.cummax(0).values.tolist())

    def owned(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs of each shard: at the same relative positions as its inputs."""
        ends = [*starts(shard_sizes), self.size]
        return tuple(b - a for a, b in pairwise((2 * s * self.out + self.size) // (2 * self.size) for s in ends))

    def receptive_field(self, first: int, stop: int) -> Span:
        start = min(self.low[first], self.size - 1)
        return Span(start, max(self.high[stop - 1], start + 1))


class DiscoPlan(NamedTuple):
    """One rank's part of a contraction: the layouts, the halo, and its part of the table."""

    source: Layout
    result: Layout
    block_plan: PaddedBlockPlan
    psi: Psi
    latitudes: int  # of the local result


def contract(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `contraction(x, *psi, kernel_size, nlat_out, nlon_out)`, or its transpose, on a sharded x."""
    names = ("inp", "roff_idx", "ker_idx", "row_idx", "col_idx", "vals", "kernel_size", "nlat_out", "nlon_out")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, sizes = given["inp"], tuple(given[n] for n in names[6:])
    psi = Psi(*(to_full_tensor(t) if isinstance(t, ShardTensor) else t for t in (given[n] for n in names[1:6])))
    if trace_state.values_unknown() and not trace_state.is_concrete(psi.column):
        return gather_fallback(func, types, args, kwargs)  # the plan depends on the values of the table
    local, layout = as_operand(x, mesh_of((x, *psi), None))
    plan = _plan(layout, psi, sizes, "transpose" in str(func))
    block = plan.block_plan.gather_block(redistribute(local, layout, plan.source))
    shape = plan.result.local_shape
    if 0 in shape:
        return wrap(empty_result_of([block], shape, block.dtype, block), plan.result)
    return wrap(func(block, *plan.psi, sizes[0], plan.latitudes, sizes[2]), plan.result)


def _plan(layout: Layout, psi: Psi, sizes: tuple[int, int, int], transposed: bool) -> DiscoPlan:
    """Return the plan, which is kept as long as the table is alive and not written."""
    key = ("disco", layout.bare, sizes, transposed)
    return kept_with_tensor(psi.column, key, lambda: _make_plan(layout, psi, *sizes, transposed))


def _make_plan(layout: Layout, psi: Psi, kernel_size: int, nlat_out: int, nlon_out: int, transposed: bool) -> DiscoPlan:
    dim = layout.ndim - 2
    nlat, nlon = layout.shape[dim:]
    # the column names a latitude and a longitude: of the input, or in the transpose of the output
    column = psi.column // (nlon_out if transposed else nlon)
    outputs, inputs = (column, psi.row) if transposed else (psi.row, column)
    source = place_axes(layout, {0: Reach(0, 0), 1: Reach(0, 0), dim: Reach(1, 1)})
    bands = Bands.of(nlat, nlat_out, outputs, inputs)
    block_plan = PaddedBlockPlan(source, {dim: bands})
    first, stop = block_plan.owned[dim]
    part = psi
    if source.is_sharded(dim):
        start = block_plan.block_starts[dim]
        rows, columns = (start, first * nlon_out) if transposed else (first, start * nlon)
        part = _select(psi, (outputs >= first) & (outputs < stop), rows, columns)
    dims = [*source.dims[:2], (block_plan.out_shardings[dim],), (DimSharding(nlon_out),)]
    if not transposed:
        dims.insert(2, (DimSharding(kernel_size),))
    return DiscoPlan(source, Layout.make(source.mesh, dims), block_plan, part, stop - first)


def _select(psi: Psi, chosen: Tensor, row: int, column: int) -> Psi:
    """Return the chosen entries, with rows counted from `row` and columns from `column`; empty runs are left out."""
    lengths = psi.offsets.diff()
    run = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    counts = torch.bincount(run[chosen], minlength=len(lengths))
    offsets = torch.cat([counts.new_zeros(1), counts[counts > 0].cumsum(0)]).to(psi.offsets.dtype)
    return Psi(
        offsets, psi.kernel[chosen], psi.row[chosen] - row, psi.column[chosen] - column, psi.values[chosen].contiguous()
    )


def contract_with_weights(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run the convolution with fused weights as two calls that have rules."""
    x, weight, *psi = args[:7]
    kernel_size, nlat_out, nlon_out, groups, channels = args[13:18]
    expanded = getattr(torch.ops.disco_kernels, CONTRACTION)(x, *psi, kernel_size, nlat_out, nlon_out)
    batch, _, kernel, height, width = expanded.shape
    expanded = expanded.reshape(batch, groups, channels, kernel, height, width)
    out = torch.einsum("bgckxy,gock->bgoxy", expanded, weight.to(expanded.dtype))
    return out.reshape(batch, groups * weight.shape[1], height, width)


for _name in ("contraction", "transpose_contraction"):
    runtime.active.registry.register_named(f"{LIBRARY}_{_name}_optimized.default", contract)
for _name in (f"{LIBRARY}_fused_conv_optimized.default", f"{FUNCTIONS}._DiscoSaveXConvFn"):
    runtime.active.registry.register_named(_name, contract_with_weights)
