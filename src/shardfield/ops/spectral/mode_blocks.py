"""Blocks of a spectrum: parse their index, estimate the cost of sending them, choose the layout of a spectrum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import runtime
from ...layout import DimSharding, Layout, Origin
from .._common.blockwise import move_shard_off, moved_origins
from ..indexing.parse_index import basic_index_key, parse_index

IndexRanges = list[range]


def parse_block(shape: Sequence[int], index: Any) -> IndexRanges | None:
    """Return the index ranges along each dim of an index of slices.

    Return None for any other index, for an empty block, and for the full spectrum.
    """
    key = basic_index_key(index)
    if key is None:
        return None
    plans, entry = runtime.active.plans, (parse_block, tuple(shape), key)
    found = plans[entry]
    if found is None:
        found = plans[entry] = (_parse_block(shape, index),)
    return found[0]


def _parse_block(shape: Sequence[int], index: Any) -> IndexRanges | None:
    items = parse_index(shape, index, torch.device("cpu")).items
    if len(items) != len(shape) or not all(isinstance(i, tuple) for i in items):
        return None
    ranges = [range(*i) for i in items if isinstance(i, tuple)]
    return None if min(map(len, ranges)) == 0 or tuple(map(len, ranges)) == tuple(shape) else ranges


def format_index(index: Any) -> str:
    """Format an index as in source code."""
    key = basic_index_key(index)
    if key is None:
        return "[an index of tensors]"
    slices = [
        ":".join("" if n is None else str(n) for n in k[: 2 if k[2] is None else 3]) if type(k) is tuple else k
        for k in key
    ]
    return f"[{', '.join('...' if k is Ellipsis else str(k) for k in slices)}]"


def overlaps(one: IndexRanges, other: IndexRanges) -> bool:
    """Return whether two blocks have an element in common."""
    return all(set(a) & set(b) for a, b in zip(one, other, strict=True))


def block_is_cheaper(field: Layout, dims: tuple[int, ...], shape: Sequence[int], ranges: IndexRanges) -> bool:
    """Return whether an all_reduce of a block of modes sends less than the all_to_all of the full spectrum.

    Always True if no other dim can take the sharding of the transformed dims: the spectrum would then be gathered.
    """
    return _block_is_cheaper(field, dims, tuple(shape), tuple(map(len, ranges)))


@runtime.memo
def _block_is_cheaper(field: Layout, dims: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, ...]) -> bool:
    if spectrum_layout(field, dims, False).is_replicated:
        return True
    all_reduce = all_to_all = 0.0  # elements sent
    block_share = math.prod(max(field.shard_sizes(d)) / field.shape[d] for d in range(field.ndim) if d not in dims)
    spectrum_share = math.prod(max(field.shard_sizes(d)) / field.shape[d] for d in range(field.ndim))
    for axis in {a for d in dims for a in field.nontrivial_axes(field.axes_of(d))}:
        remote = 1 - 1 / field.mesh.size(axis)
        all_reduce += 2 * remote * block_share * math.prod(block)
        all_to_all += remote * spectrum_share * math.prod(shape)
    return all_reduce < all_to_all


@runtime.memo
def spectrum_layout(layout: Layout, dims: tuple[int, ...], real: bool) -> Layout:
    """Return the layout of a spectrum that `fft.py` computes; replicated if a sharding cannot move to another dim."""
    remaining, field = list(dims), layout
    half = remaining.pop() if real else None
    order = [] if half is None else [half]
    while order or remaining:
        if not order:
            order = sorted(reversed(remaining), key=layout.is_sharded)  # the order of `fft._fft_each_dim`
            remaining = []
        d = order.pop(0)
        moved = move_shard_off(layout, d, allow_empty=True) if layout.is_sharded(d) else layout.unshard([d])
        if moved is None:
            return Layout.replicate(field.mesh, [n // 2 + 1 if d == half else n for d, n in enumerate(field.shape)])
        length = layout.shape[d] // 2 + 1 if d == half else layout.shape[d]
        layout = moved.with_dim(d, DimSharding(length).with_origins(moved_origins(moved, d)))
    return layout


@runtime.memo
def with_mode_origins(modes: Layout, field: Layout, dims: tuple[int, ...], real: bool) -> Layout:
    """Return the layout of a block of modes with the sharding of the field's dims as the `Origin` of its mode dims."""
    for dim in dims:
        (origin,), (factor,) = field.dims[dim], modes.dims[dim]
        kind = "half modes" if real and dim == dims[-1] else "modes"
        modes = modes.with_dim(dim, factor.with_origins([Origin(kind, *origin)]))
    return modes


def as_slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


def roll_dims(x: Any, shifts: Mapping[int, int]) -> Any:
    return torch.roll(x, list(shifts.values()), list(shifts)) if shifts else x
