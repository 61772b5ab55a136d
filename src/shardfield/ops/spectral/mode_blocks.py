"""Blocks of spectra: which indices they hold, what they cost to send, and rolling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...layout import DimSharding, Layout
from .._common.blockwise import move_shard_off
from ..indexing.parse_index import basic_index_key, parse_index

IndexRanges = list[range]


def parse_block(shape: Sequence[int], index: Any) -> IndexRanges | None:
    """The indices along each dim of an index of slices; None for any other, and for nothing or everything."""
    if basic_index_key(index) is None:
        return None
    items = parse_index(shape, index, torch.device("cpu")).items
    if len(items) != len(shape) or not all(isinstance(i, tuple) for i in items):
        return None
    runs = [range(*i) for i in items if isinstance(i, tuple)]
    return None if min(map(len, runs)) == 0 or tuple(map(len, runs)) == tuple(shape) else runs


def format_index(index: Any) -> str:
    """An index as it stands in a program."""
    key = basic_index_key(index)
    if key is None:
        return "[an index of tensors]"
    slices = [
        ":".join("" if n is None else str(n) for n in k[: 2 if k[2] is None else 3]) if type(k) is tuple else k
        for k in key
    ]
    return f"[{', '.join('...' if k is Ellipsis else str(k) for k in slices)}]"


def overlaps(one: IndexRanges, other: IndexRanges) -> bool:
    """Whether two blocks have an entry in common."""
    return all(set(a) & set(b) for a, b in zip(one, other, strict=True))


def block_is_cheaper(field: Layout, dims: Sequence[int], shape: Sequence[int], runs: IndexRanges) -> bool:
    """Whether summing a block of modes over all ranks sends less than swapping cuts of the spectrum (or gathering it,
    if there is nowhere to swap them to)."""
    if spectrum_layout(field, dims, False).is_replicated:
        return True
    summed = swapped = 0.0
    here = math.prod(max(field.shard_sizes(d)) / field.shape[d] for d in range(field.ndim) if d not in dims)
    there = math.prod(max(field.shard_sizes(d)) / field.shape[d] for d in range(field.ndim))
    for axis in {a for d in dims for a in field.nontrivial_axes(field.axes_of(d))}:
        away = 1 - 1 / field.mesh.size(axis)
        summed += 2 * away * here * math.prod(map(len, runs))
        swapped += away * there * math.prod(shape)
    return summed < swapped


def spectrum_layout(layout: Layout, dims: Sequence[int], real: bool) -> Layout:
    """Where a spectrum lies once it is taken: whole, if a dim has nowhere to leave its cut."""
    left, start = list(dims), layout
    half = left.pop() if real else None
    order = [] if half is None else [half]
    while order or left:
        if not order:
            order = sorted(reversed(left), key=layout.is_sharded)  # as `fft._each` takes them
            left = []
        d = order.pop(0)
        moved = move_shard_off(layout, d, allow_empty=True) if layout.is_sharded(d) else layout.unshard([d])
        if moved is None:
            return Layout.replicate(start.mesh, [n // 2 + 1 if d == half else n for d, n in enumerate(start.shape)])
        layout = moved.with_dim(d, DimSharding(layout.shape[d] // 2 + 1 if d == half else layout.shape[d]))
    return layout


def as_slice(run: range) -> slice:
    return slice(run.start, run.stop, run.step)


def roll_dims(x: Any, by: Mapping[int, int]) -> Any:
    return torch.roll(x, list(by.values()), list(by)) if by else x
