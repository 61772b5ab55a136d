"""Rules of `F.pad`. The padding of a sharded dim is added to the first and the last nonempty shard.

Constant padding needs no communication. Reflect and circular padding along a sharded dim fetch rows of other ranks;
the adjoint sends the gradients of the copies back to the rows' owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat.autocast import concatenate
from ...comm.route import RowRequest
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, shard_sizes_of
from ...redistribute import unmerge_dims, without_partial
from .._common.probe import meta_tensor
from ..shape.flip_roll import LocalFn, compose, plan_row_fetch, shard_by_one_axis
from ..shape.split import narrow_layout, narrow_sharding


def padding_by_dim(ndim: int, pad: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return dim -> (before, after) of every padded dim, from torch's list, which starts at the last dim."""
    paddings = {ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    return {dim: sides for dim, sides in paddings.items() if sides != (0, 0)}


def padded_sizes(shard_sizes: Sequence[int], before: int, after: int) -> tuple[int, ...]:
    """Return the shard sizes after padding, which is added to the first and the last nonempty shard."""
    nonempty = [c for c, n in enumerate(shard_sizes) if n] or [0]
    return tuple(n + before * (c == nonempty[0]) + after * (c == nonempty[-1]) for c, n in enumerate(shard_sizes))


class DimPadding(NamedTuple):
    """Padding of a dim of `size`: a mode of F.pad, and the number of cells before and after."""

    mode: str
    before: int
    after: int
    size: int

    def padded_sizes(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shard sizes of the padded dim."""
        return padded_sizes(shard_sizes, self.before, self.after)

    def source_runs(self, start: int, stop: int) -> list[RowRequest]:
        """Return the source cells at `start` to `stop` of the padded dim; constant padding has no source."""
        if self.mode != "constant":
            return padding_runs(self.mode, self.size, self.before, self.after, start, stop)
        first, last = max(start, self.before), min(stop, self.before + self.size)
        return [RowRequest(first - self.before, last - first, first - start)] if first < last else []


PadSpec = tuple[tuple[int, str, int, int], ...]  # (dim counted from the last, mode, before, after)


def dim_paddings_of(layout: Layout, pre_pad: PadSpec) -> dict[int, DimPadding]:
    """Return dim -> padding."""
    return {layout.ndim + d: DimPadding(mode, a, b, layout.shape[d]) for d, mode, a, b in pre_pad}


def padded_operand(input: Operand, pre_pad: PadSpec) -> Operand:
    """Return the operand as it is after the padding `pre_pad`."""
    layout = input.layout
    for dim, padding in dim_paddings_of(layout, pre_pad).items():
        (sharding,) = unmerge_dims(layout, [dim]).dims[dim]
        sizes = padding.padded_sizes(sharding.shard_sizes) if sharding.axes else ()
        layout = layout.with_dim(dim, DimSharding(padding.before + padding.size + padding.after, sharding.axes, sizes))
    return Operand(layout, input.dtype, input.device, input.position)


def plan_pad(input: Operand, pad, mode="constant", value=None, *, fn):
    """Pad locally in mode constant; in other modes copy rows, which may be fetched from other ranks."""
    pad = list(pad)
    F.pad(meta_tensor(input), pad, mode, value)
    paddings = padding_by_dim(input.ndim, pad)
    if mode == "constant":
        return plan_constant_pad(input, paddings, 0 if value is None else value)
    source = layout = (
        unmerge_dims(input.layout, paddings) if mode == "replicate" else shard_by_one_axis(input.layout, list(paddings))
    )
    sides = {d: (max(before, 0), max(after, 0)) for d, (before, after) in paddings.items()}
    crops = {d: (max(-before, 0), max(-after, 0)) for d, (before, after) in paddings.items()}
    # Negative padding crops. torch crops after reflecting and replicating, but before wrapping around.
    phases = (crops, sides) if mode == "circular" else (sides, crops)
    steps: list[LocalFn] = []
    for phase in phases:
        for dim, (before, after) in phase.items():
            if phase is crops:
                layout, (start, stop) = narrow_layout(layout, dim, before, layout.shape[dim] - after)
                steps.append(partial(torch.narrow, dim=dim, start=start, length=stop - start))
                continue
            if mode == "circular" and max(before, after) > layout.shape[dim]:
                return None  # the cropped dim is shorter than its padding: torch reads uninitialized memory
            step, layout = pad_dim(layout, dim, before, after, mode)
            steps.append(step)
    if all(both == (0, 0) for both in sides.values()):
        steps.append(torch.clone)  # nothing was padded: torch returns new memory, and a write must not reach the input
    return Plan(local=compose(*steps), takes=["input"], operands={"input": source}, layout=layout)


@rule("constant_pad_nd", partial=True, merged=True)
def constant_pad_nd(input: Operand, pad, value=0):
    torch.constant_pad_nd(meta_tensor(input), pad, value)
    return plan_constant_pad(input, padding_by_dim(input.ndim, pad), value)


def plan_constant_pad(input: Operand, paddings: dict[int, tuple[int, int]], value) -> Plan:
    """Plan constant padding: each rank pads or crops its own shard."""
    source = result = unmerge_dims(input.layout if value == 0 else without_partial(input.layout), paddings)
    local_pad = [0] * (2 * input.ndim)
    for dim, (before, after) in paddings.items():
        (sharding,) = source.dims[dim]
        first, last = max(-before, 0), sharding.size - max(-after, 0)
        kept = narrow_sharding(sharding, first, last)
        sizes = padded_sizes(shard_sizes_of(kept), max(before, 0), max(after, 0))
        result = result.with_dim(dim, DimSharding(sum(sizes), sharding.axes, sizes if sharding.axes else ()))
        start, stop = narrow_layout(source, dim, first, last)[1]
        coord = source.index(sharding.axes)
        nonempty = [c for c, n in enumerate(shard_sizes_of(kept)) if n] or [0]
        from_end = 2 * (input.ndim - 1 - dim)
        local_pad[from_end] = -start + max(before, 0) * (coord == nonempty[0])
        local_pad[from_end + 1] = stop - source.local_shape[dim] + max(after, 0) * (coord == nonempty[-1])
    return Plan(
        local=lambda input: F.pad(input, local_pad, "constant", value), operands={"input": source}, layout=result
    )


def pad_dim(layout: Layout, dim: int, before: int, after: int, mode: str) -> tuple[LocalFn, Layout]:
    """Return the local function that pads one dim with copies of rows, and the layout of its result."""
    if not before and not after:
        return lambda t: t, layout
    (sharding,) = unmerge_dims(layout, [dim]).dims[dim]
    n = sharding.size
    if not layout.is_sharded(dim):
        runs = padding_runs(mode, n, before, after, 0, before + n + after)
        return lambda t: gather_runs(t, dim, runs), layout.with_dim(dim, DimSharding(before + n + after))
    sizes = padded_sizes(sharding.shard_sizes, before, after)
    if mode != "replicate":
        return plan_row_fetch(layout, dim, lambda start, stop: padding_runs(mode, n, before, after, start, stop), sizes)
    nonempty = [c for c, length in enumerate(sharding.shard_sizes) if length]
    coord, length = layout.index(sharding.axes), layout.local_shape[dim]
    runs = padding_runs(mode, length, before * (coord == nonempty[0]), after * (coord == nonempty[-1]), 0, sizes[coord])
    return lambda t: gather_runs(t, dim, runs), layout.with_dim(dim, DimSharding(sum(sizes), sharding.axes, sizes))


def padding_runs(mode: str, n: int, before: int, after: int, start: int, stop: int) -> list[RowRequest]:
    """Return the source rows, of a dim of size `n`, at indices `start` to `stop` of the padded dim."""
    runs = []

    def add(lo: int, hi: int, source: int, flip: bool = False) -> None:
        """Add the padded indices lo to hi: the rows from `source` on, with flip the rows from `source` downward."""
        first, last = max(lo, start), min(hi, stop)
        if first < last:
            begin = source - (last - 1 - lo) if flip else source + first - lo
            runs.append(RowRequest(begin, last - first, first - start, flip))

    if mode == "replicate":
        for i in range(before):
            add(i, i + 1, 0)
    else:
        add(0, before, before, True) if mode == "reflect" else add(0, before, n - before)
    add(before, before + n, 0)
    if mode == "replicate":
        for i in range(after):
            add(before + n + i, before + n + i + 1, n - 1)
    else:
        add(before + n, before + n + after, n - 2, True) if mode == "reflect" else add(
            before + n, before + n + after, 0
        )
    return runs


def gather_runs(tensor: Tensor, dim: int, runs: Sequence[RowRequest]) -> Tensor:
    """Concatenate runs of rows of an unsharded dim."""
    rows = [tensor.narrow(dim, run.source, run.length) for run in runs]
    return concatenate([r.flip(dim) if run.flip else r for r, run in zip(rows, runs, strict=True)] or [tensor], dim)


for _mode, _name in (("reflect", "reflection"), ("replicate", "replication")):
    for _rank in (1, 2, 3):
        composed(f"{_name}_pad{_rank}d")(lambda input, padding, mode=_mode: F.pad(input, list(padding), mode))
