"""Borders. Those of a cut dim go to the ranks at its ends, whose pieces grow; the others keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm.route import RowRequest
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, shard_sizes_of
from ...redistribute import unmerge_dims
from ..shape.flip_roll import LocalFn, compose, plan_row_fetch, shard_by_one_axis
from ..shape.split import narrow_layout, narrow_sharding
from ..shape.view import meta_tensor


def padding_by_dim(ndim: int, pad: Sequence[int]) -> dict[int, tuple[int, int]]:
    """(before, after) of every dim that changes, from torch's list, which begins with the last dim."""
    found = {ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    return {dim: both for dim, both in found.items() if both != (0, 0)}


def padded_sizes(lengths: Sequence[int], before: int, after: int) -> tuple[int, ...]:
    """The lengths when the first and the last piece that is not empty grow."""
    held = [c for c, n in enumerate(lengths) if n] or [0]
    return tuple(n + before * (c == held[0]) + after * (c == held[-1]) for c, n in enumerate(lengths))


class DimPadding(NamedTuple):
    """How a dim of `size` goes on beyond its ends: a mode of F.pad, and by how many cells."""

    mode: str
    before: int
    after: int
    size: int

    def padded_sizes(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the pieces with what lies beyond the ends."""
        return padded_sizes(lengths, self.before, self.after)

    def source_runs(self, start: int, stop: int) -> list[RowRequest]:
        """Which cells stand at `start` to `stop` of the longer dim; a constant border has none."""
        if self.mode != "constant":
            return padding_runs(self.mode, self.size, self.before, self.after, start, stop)
        first, last = max(start, self.before), min(stop, self.before + self.size)
        return [RowRequest(first - self.before, last - first, first - start)] if first < last else []


PadSpec = tuple[tuple[int, str, int, int], ...]  # (dim counted from the last, mode, before, after)


def dim_paddings_of(layout: Layout, pre_pad: PadSpec) -> dict[int, DimPadding]:
    """Borders by dim."""
    return {layout.ndim + d: DimPadding(mode, a, b, layout.shape[d]) for d, mode, a, b in pre_pad}


def padded_operand(input: Operand, pre_pad: PadSpec) -> Operand:
    """The operand with its borders."""
    layout = input.layout
    for dim, edge in dim_paddings_of(layout, pre_pad).items():
        (factor,) = unmerge_dims(layout, [dim]).dims[dim]
        cut = edge.padded_sizes(factor.shard_sizes) if factor.axes else ()
        layout = layout.with_dim(dim, DimSharding(edge.before + edge.size + edge.after, factor.axes, cut))
    return Operand(layout, input.dtype, input.device, input.position)


@rule("pad", partial=True, merged=True)
def pad(input: Operand, pad, mode="constant", value=None, *, fn):
    """A constant border is made by whoever has the edge; others are copies of rows, which may have to travel."""
    pad = list(pad)
    F.pad(meta_tensor(input), pad, mode, value)
    by = padding_by_dim(input.ndim, pad)
    if mode == "constant":
        return plan_constant_pad(input, by, 0 if value is None else value)
    source = layout = (
        unmerge_dims(input.layout, by) if mode == "replicate" else shard_by_one_axis(input.layout, list(by))
    )
    sides = {d: (max(before, 0), max(after, 0)) for d, (before, after) in by.items()}
    crops = {d: (max(-before, 0), max(-after, 0)) for d, (before, after) in by.items()}
    # torch mirrors what it then crops, but wraps around what it has cropped
    turns = (crops, sides) if mode == "circular" else (sides, crops)
    steps: list[LocalFn] = []
    for turn in turns:
        for dim, (before, after) in turn.items():
            if turn is crops:
                layout, (start, stop) = narrow_layout(layout, dim, before, layout.shape[dim] - after)
                steps.append(partial(torch.narrow, dim=dim, start=start, length=stop - start))
                continue
            if mode == "circular" and max(before, after) > layout.shape[dim]:
                return None  # less is left than the border needs: torch reads memory it has not written
            step, layout = pad_dim(layout, dim, before, after, mode)
            steps.append(step)
    return Plan(local=compose(*steps), takes=["input"], operands={"input": source}, layout=layout)


@rule("constant_pad_nd", partial=True, merged=True)
def constant_pad_nd(input: Operand, pad, value=0):
    torch.constant_pad_nd(meta_tensor(input), pad, value)
    return plan_constant_pad(input, padding_by_dim(input.ndim, pad), value)


def plan_constant_pad(input: Operand, by: dict[int, tuple[int, int]], value) -> Plan:
    """Each rank pads or crops its own part."""
    source = result = unmerge_dims(input.layout if value == 0 else input.layout.with_partial(()), by)
    here = [0] * (2 * input.ndim)
    for dim, (before, after) in by.items():
        (factor,) = source.dims[dim]
        first, last = max(-before, 0), factor.size - max(-after, 0)
        kept = narrow_sharding(factor, first, last)
        cut = padded_sizes(shard_sizes_of(kept), max(before, 0), max(after, 0))
        result = result.with_dim(dim, DimSharding(sum(cut), factor.axes, cut if factor.axes else ()))
        start, stop = narrow_layout(source, dim, first, last)[1]
        at = source.index(factor.axes)
        held = [c for c, n in enumerate(shard_sizes_of(kept)) if n] or [0]
        from_end = 2 * (input.ndim - 1 - dim)
        here[from_end] = -start + max(before, 0) * (at == held[0])
        here[from_end + 1] = stop - source.local_shape[dim] + max(after, 0) * (at == held[-1])
    return Plan(local=lambda input: F.pad(input, here, "constant", value), operands={"input": source}, layout=result)


def pad_dim(layout: Layout, dim: int, before: int, after: int, mode: str) -> tuple[LocalFn, Layout]:
    """One dim with a border of copies."""
    if not before and not after:
        return lambda t: t, layout
    (factor,) = unmerge_dims(layout, [dim]).dims[dim]
    n = factor.size
    if not layout.is_sharded(dim):
        runs = padding_runs(mode, n, before, after, 0, before + n + after)
        return lambda t: gather_runs(t, dim, runs), layout.with_dim(dim, DimSharding(before + n + after))
    sizes = padded_sizes(factor.shard_sizes, before, after)
    if mode != "replicate":
        return plan_row_fetch(layout, dim, lambda start, stop: padding_runs(mode, n, before, after, start, stop), sizes)
    held = [c for c, length in enumerate(factor.shard_sizes) if length]
    at, length = layout.index(factor.axes), layout.local_shape[dim]
    runs = padding_runs(mode, length, before * (at == held[0]), after * (at == held[-1]), 0, sizes[at])
    return lambda t: gather_runs(t, dim, runs), layout.with_dim(dim, DimSharding(sum(sizes), factor.axes, sizes))


def padding_runs(mode: str, n: int, before: int, after: int, start: int, stop: int) -> list[RowRequest]:
    """Which of `n` indices stand at `start` to `stop` of the bordered dim."""
    found = []

    def part(lo: int, hi: int, source: int, flip: bool = False) -> None:
        """Bordered indices lo to hi hold what begins at `source` (with flip: ends there, going down)."""
        first, last = max(lo, start), min(hi, stop)
        if first < last:
            begin = source - (last - 1 - lo) if flip else source + first - lo
            found.append(RowRequest(begin, last - first, first - start, flip))

    if mode == "replicate":
        for i in range(before):
            part(i, i + 1, 0)
    else:
        part(0, before, before, True) if mode == "reflect" else part(0, before, n - before)
    part(before, before + n, 0)
    if mode == "replicate":
        for i in range(after):
            part(before + n + i, before + n + i + 1, n - 1)
    else:
        part(before + n, before + n + after, n - 2, True) if mode == "reflect" else part(
            before + n, before + n + after, 0
        )
    return found


def gather_runs(tensor: Tensor, dim: int, runs: Sequence[RowRequest]) -> Tensor:
    """The runs of a whole dim, one after the other."""
    rows = [tensor.narrow(dim, run.source, run.length) for run in runs]
    return torch.cat([r.flip(dim) if run.flip else r for r, run in zip(rows, runs, strict=True)] or [tensor], dim)


for _mode, _name in (("reflect", "reflection"), ("replicate", "replication")):
    for _rank in (1, 2, 3):
        composed(f"{_name}_pad{_rank}d")(lambda input, padding, mode=_mode: F.pad(input, list(padding), mode))
