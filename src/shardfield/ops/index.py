"""Basic indexing: slices, ints, None and Ellipsis. Each rank keeps its overlap; nothing is sent.

A slice of a cut dim is a view of this rank's part, with shorter (perhaps empty) pieces. An int on a cut dim is held
by one rank: the owner contributes its row, the others zeros, so the result is Partial over the axes of that dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..dispatch import admit, composed
from ..layout import Factor, Layout, starts
from ..redistribute import redistribute, simplified
from ..tensor import ShardTensor, wrap
from .parse import Item


class Basic(NamedTuple):
    """A basic index, planned: where the operand must lie, the local index, and where the result lies.

    `summed` are dims of one row (on the owner) or none (elsewhere) that are summed away; `new` then inserts the dims
    that None asks for.
    """

    source: Layout
    part: tuple[Any, ...]
    summed: tuple[int, ...]
    new: tuple[Any, ...]
    result: Layout
    copied: bool
    kept: tuple[int, ...]  # dims of the result that an int kept

    def run(self, x: ShardTensor) -> ShardTensor:
        local = redistribute(x._local_tensor, x._layout, self.source)[self.part]
        if self.summed:
            local = local.sum(self.summed, dtype=local.dtype)
        out = wrap(local[self.new] if self.new else local, self.result)
        if self.copied or x._copied_view:
            out._copied_view = True
        return out


def sliced(factor: Factor, start: int, stop: int, step: int) -> Factor:
    """The factor after a slice: every piece keeps what falls into it.

    >>> sliced(Factor(7, (0,), (3, 4)), 1, 7, 2)
    Factor(size=3, axes=(0,), lengths=(1, 2))
    """
    size = len(range(start, stop, step))
    if not factor.axes:
        return Factor(size)
    bounds = zip(starts(factor.lengths), factor.lengths, strict=True)
    return Factor(size, factor.axes, tuple(len(_overlap(lo, n, start, stop, step)) for lo, n in bounds))


def _overlap(lo: int, length: int, start: int, stop: int, step: int) -> range:
    """The slice inside a piece, as positions in the piece."""
    first = start if start >= lo else lo + (start - lo) % step
    return range(first - lo, max(first - lo, min(stop, lo + length) - lo), step)


@lru_cache(maxsize=8192)
def basic(layout: Layout, items: tuple[Item, ...], keep: bool = False) -> Basic:
    """Plan a basic index with one item for every dim, and None between them. Pure.

    keep: an int on a cut dim keeps its dim, one long, so that the result is a view that can be written.
    """
    source = layout
    for dim, cut_to in enumerate(i for i in items if i is not None):
        if isinstance(cut_to, tuple) and len(layout.dims[dim]) > 1 and _inner(layout, dim, cut_to) is None:
            source = source.with_dim(dim, *simplified(layout).dims[dim])
    dims: list[tuple[Factor, ...]] = []
    index: list[Any] = []
    new: list[Any] = []
    summed: list[int] = []
    axes: list[int] = []
    kept: list[int] = []
    dim = 0
    for item in items:
        if item is None:
            dims.append((Factor(1),))
            new.append(None)
            continue
        cut = source.is_cut(dim)
        if isinstance(item, int):
            index.append(_row(source, dim, item) if cut else item)
            if cut and keep:
                kept.append(len(dims))
                dims.append(tuple(sliced(f, i, i + 1, 1) for f, i in _unravel(source, dim, item)))
                new.append(slice(None))
            elif cut:
                summed.append(sum(isinstance(i, slice) for i in index) - 1)
                axes += source.wide(source.axes_of(dim))
        else:
            here, factors = _part(source, dim, item)
            index.append(slice(here.start, here.stop, here.step))
            dims.append(factors)
            new.append(slice(None))
        dim += 1
    if axes and any(op != "sum" for _, op in source.partial):
        source = source.with_partial(())
    result = Layout.make(layout.mesh, dims, [*source.partial, *((a, "sum") for a in axes)])
    copied = bool(summed or layout.partial) or source is not layout
    if not summed and None in new:  # one index does it all
        left = iter(index)
        index, new = [None if item is None else next(left) for item in items], []
    after = tuple(new) if None in new else ()
    return Basic(source, tuple(index), tuple(summed), after, result, copied, tuple(kept))


def _unravel(layout: Layout, dim: int, i: int) -> list[tuple[Factor, int]]:
    """An index of a dim as one for each of its factors."""
    found = []
    for factor in reversed(layout.dims[dim]):
        i, digit = divmod(i, factor.size)
        found.append((factor, digit))
    return found[::-1]


def _row(layout: Layout, dim: int, i: int) -> slice:
    """Where this rank holds index `i` of a dim, as a slice that is empty on the ranks that do not."""
    at = 0
    for factor, digit in _unravel(layout, dim, i):
        length = layout.factor_length(factor)
        digit -= starts(factor.lengths)[layout.index(factor.axes)] if factor.axes else 0
        if not 0 <= digit < length:
            return slice(0, 0)
        at = at * length + digit
    return slice(at, at + 1)


def _inner(layout: Layout, dim: int, item: tuple[int, int, int]) -> int | None:
    """The size behind the first factor of a merged dim, if the slice takes whole multiples of it; 0: all of the dim."""
    if item == (0, layout.shape[dim], 1) or not layout.is_cut(dim):
        return 0
    first, *rest = layout.dims[dim]
    inner = layout.shape[dim] // max(first.size, 1)
    return inner if rest and inner and item[2] == 1 and item[0] % inner == 0 == item[1] % inner else None


def _part(layout: Layout, dim: int, item: tuple[int, int, int]) -> tuple[Any, tuple[Factor, ...]]:
    """This rank's part of a slice, and the dim's factors after it."""
    start, stop, step = item
    first, *rest = layout.dims[dim]
    if rest:
        inner = _inner(layout, dim, item)
        assert inner is not None
        if item == (0, layout.shape[dim], 1):
            return slice(None), layout.dims[dim]
        if inner == 0:
            return slice(start, stop, step), (Factor(len(range(start, stop, step))),)
        here, (after,) = _part(layout.with_dim(dim, first), dim, (start // inner, stop // inner, 1))
        width = 1
        for factor in rest:
            width *= layout.factor_length(factor)
        return slice(here.start * width, here.stop * width, 1), (after, *rest)
    lo = starts(first.lengths)[layout.index(first.axes)] if first.axes else 0
    return _overlap(lo, layout.factor_length(first), start, stop, step), (sliced(first, start, stop, step),)


# ---------------------------------------------------------------------- the named forms


def one_dim(x: Any, dim: int, item: Item, keep: bool = False) -> ShardTensor:
    """`x` with a basic index on one dim."""
    items: list[Item] = [(0, n, 1) for n in x.shape]
    items[dim] = item
    return basic(x._layout, tuple(items), keep).run(x)


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front, or torch's error."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % max(ndim, 1)


def as_shard(value: Tensor, mesh: Any) -> ShardTensor:
    """Any tensor as a ShardTensor on `mesh`, as it lies."""
    if value.__class__ is ShardTensor:
        return value  # type: ignore[return-value]
    return wrap(*admit(value, mesh, partial=True, merged=True))


@composed("select")
def select(input, dim, index):
    """One row."""
    if not input.ndim:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    dim = dim_of(dim, input.ndim)
    size = input.shape[dim]
    if not -size <= index < size:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(input.shape)} at dimension {dim}"
        )
    return one_dim(input, dim, int(index) % size)


@composed("narrow")
def narrow(input, dim, start, length):
    """Consecutive rows."""
    if not input.ndim:
        raise RuntimeError("narrow() cannot be applied to a 0-dim tensor.")
    dim, start, length = dim_of(dim, input.ndim), int(start), int(length)
    size = input.shape[dim]
    if length < 0:
        raise RuntimeError("narrow(): length must be non-negative.")
    if not -size <= start <= size:
        raise IndexError(f"start out of range (expected to be in range of [{-size}, {size}], but got {start})")
    start += size if start < 0 else 0
    if start + length > size:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({size}).")
    return one_dim(input, dim, (start, start + length, 1))
