"""Borders. Those of a cut dim go to the ranks at its ends, whose pieces grow; the others keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.route import Run
from ..dispatch import composed, rule
from ..layout import Factor, Layout, pieces
from ..plan import Operand, Plan
from ..redistribute import simplified
from .rearrange import Local, chain, fetch, one_axis
from .split import narrowed, overlap
from .view import ghost


def amounts(ndim: int, pad: Sequence[int]) -> dict[int, tuple[int, int]]:
    """(before, after) of every dim that changes, from torch's list, which begins with the last dim."""
    found = {ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    return {dim: both for dim, both in found.items() if both != (0, 0)}


def grown(lengths: Sequence[int], before: int, after: int) -> tuple[int, ...]:
    """The lengths when the first and the last piece that is not empty grow."""
    held = [c for c, n in enumerate(lengths) if n] or [0]
    return tuple(n + before * (c == held[0]) + after * (c == held[-1]) for c, n in enumerate(lengths))


class Edge(NamedTuple):
    """How a dim of `size` goes on beyond its ends: a mode of F.pad, and by how many cells."""

    mode: str
    before: int
    after: int
    size: int

    def grown(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the pieces with what lies beyond the ends."""
        return grown(lengths, self.before, self.after)

    def shown(self, start: int, stop: int) -> list[Run]:
        """Which cells stand at `start` to `stop` of the longer dim; a constant border has none."""
        if self.mode != "constant":
            return copies(self.mode, self.size, self.before, self.after, start, stop)
        first, last = max(start, self.before), min(stop, self.before + self.size)
        return [Run(first - self.before, last - first, first - start)] if first < last else []


Borders = tuple[tuple[int, str, int, int], ...]  # (dim counted from the last, mode, before, after)


def edges_of(layout: Layout, borders: Borders) -> dict[int, Edge]:
    """Borders by dim."""
    return {layout.ndim + d: Edge(mode, a, b, layout.shape[d]) for d, mode, a, b in borders}


def continued(input: Operand, borders: Borders) -> Operand:
    """The operand with its borders."""
    layout = input.layout
    for dim, edge in edges_of(layout, borders).items():
        (factor,) = simplified(layout, [dim]).dims[dim]
        cut = edge.grown(factor.lengths) if factor.axes else ()
        layout = layout.with_dim(dim, Factor(edge.before + edge.size + edge.after, factor.axes, cut))
    return Operand(layout, input.dtype, input.device, input.at)


@rule("pad", partial=True, merged=True)
def pad(input: Operand, pad, mode="constant", value=None, *, fn):
    """A constant border is made by whoever has the edge; others are copies of rows, which may have to travel."""
    pad = list(pad)
    F.pad(ghost(input), pad, mode, value)
    by = amounts(input.ndim, pad)
    if mode == "constant":
        return constant(input, by, 0 if value is None else value)
    source = layout = simplified(input.layout, by) if mode == "replicate" else one_axis(input.layout, list(by))
    sides = {d: (max(before, 0), max(after, 0)) for d, (before, after) in by.items()}
    crops = {d: (max(-before, 0), max(-after, 0)) for d, (before, after) in by.items()}
    # torch mirrors what it then crops, but wraps around what it has cropped
    turns = (crops, sides) if mode == "circular" else (sides, crops)
    steps: list[Local] = []
    for turn in turns:
        for dim, (before, after) in turn.items():
            if turn is crops:
                layout, (start, stop) = narrowed(layout, dim, before, layout.shape[dim] - after)
                steps.append(partial(torch.narrow, dim=dim, start=start, length=stop - start))
                continue
            if mode == "circular" and max(before, after) > layout.shape[dim]:
                return None  # less is left than the border needs: torch reads memory it has not written
            step, layout = border(layout, dim, before, after, mode)
            steps.append(step)
    return Plan(local=chain(*steps), takes=["input"], operands={"input": source}, layout=layout)


@rule("constant_pad_nd", partial=True, merged=True)
def constant_pad_nd(input: Operand, pad, value=0):
    torch.constant_pad_nd(ghost(input), pad, value)
    return constant(input, amounts(input.ndim, pad), value)


def constant(input: Operand, by: dict[int, tuple[int, int]], value) -> Plan:
    """Each rank pads or crops its own part."""
    source = result = simplified(input.layout if value == 0 else input.layout.with_partial(()), by)
    here = [0] * (2 * input.ndim)
    for dim, (before, after) in by.items():
        (factor,) = source.dims[dim]
        first, last = max(-before, 0), factor.size - max(-after, 0)
        kept = overlap(factor, first, last)
        cut = grown(pieces(kept), max(before, 0), max(after, 0))
        result = result.with_dim(dim, Factor(sum(cut), factor.axes, cut if factor.axes else ()))
        start, stop = narrowed(source, dim, first, last)[1]
        at = source.index(factor.axes)
        held = [c for c, n in enumerate(pieces(kept)) if n] or [0]
        from_end = 2 * (input.ndim - 1 - dim)
        here[from_end] = -start + max(before, 0) * (at == held[0])
        here[from_end + 1] = stop - source.local_shape[dim] + max(after, 0) * (at == held[-1])
    return Plan(local=lambda input: F.pad(input, here, "constant", value), operands={"input": source}, layout=result)


def border(layout: Layout, dim: int, before: int, after: int, mode: str) -> tuple[Local, Layout]:
    """One dim with a border of copies."""
    if not before and not after:
        return lambda t: t, layout
    (factor,) = simplified(layout, [dim]).dims[dim]
    n = factor.size
    if not layout.is_cut(dim):
        runs = copies(mode, n, before, after, 0, before + n + after)
        return lambda t: taken(t, dim, runs), layout.with_dim(dim, Factor(before + n + after))
    sizes = grown(factor.lengths, before, after)
    if mode != "replicate":
        return fetch(layout, dim, lambda start, stop: copies(mode, n, before, after, start, stop), sizes)
    held = [c for c, length in enumerate(factor.lengths) if length]
    at, length = layout.index(factor.axes), layout.local_shape[dim]
    runs = copies(mode, length, before * (at == held[0]), after * (at == held[-1]), 0, sizes[at])
    return lambda t: taken(t, dim, runs), layout.with_dim(dim, Factor(sum(sizes), factor.axes, sizes))


def copies(mode: str, n: int, before: int, after: int, start: int, stop: int) -> list[Run]:
    """Which of `n` indices stand at `start` to `stop` of the bordered dim."""
    found = []

    def part(lo: int, hi: int, source: int, flip: bool = False) -> None:
        """Bordered indices lo to hi hold what begins at `source` (with flip: ends there, going down)."""
        first, last = max(lo, start), min(hi, stop)
        if first < last:
            begin = source - (last - 1 - lo) if flip else source + first - lo
            found.append(Run(begin, last - first, first - start, flip))

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


def taken(tensor: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """The runs of a whole dim, one after the other."""
    rows = [tensor.narrow(dim, run.source, run.length) for run in runs]
    return torch.cat([r.flip(dim) if run.flip else r for r, run in zip(rows, runs, strict=True)] or [tensor], dim)


for _mode, _name in (("reflect", "reflection"), ("replicate", "replication")):
    for _rank in (1, 2, 3):
        composed(f"{_name}_pad{_rank}d")(lambda input, padding, mode=_mode: F.pad(input, list(padding), mode))
