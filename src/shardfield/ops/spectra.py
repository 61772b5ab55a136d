"""Blocks of spectra: which indices they hold, what they cost to send, and rolling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..layout import Factor, Layout
from .blocks import freed
from .parse import parse, plain_key

Runs = list[range]


def block_of(shape: Sequence[int], index: Any) -> Runs | None:
    """The indices along each dim of an index of slices; None for any other, and for nothing or everything."""
    if plain_key(index) is None:
        return None
    items = parse(shape, index, torch.device("cpu")).items
    if len(items) != len(shape) or not all(isinstance(i, tuple) for i in items):
        return None
    runs = [range(*i) for i in items if isinstance(i, tuple)]
    return None if min(map(len, runs)) == 0 or tuple(map(len, runs)) == tuple(shape) else runs


def written(index: Any) -> str:
    """An index as it stands in a program."""
    key = plain_key(index)
    if key is None:
        return "[an index of tensors]"
    slices = [
        ":".join("" if n is None else str(n) for n in k[: 2 if k[2] is None else 3]) if type(k) is tuple else k
        for k in key
    ]
    return f"[{', '.join('...' if k is Ellipsis else str(k) for k in slices)}]"


def meets(one: Runs, other: Runs) -> bool:
    """Whether two blocks have an entry in common."""
    return all(set(a) & set(b) for a, b in zip(one, other, strict=True))


def pays(field: Layout, dims: Sequence[int], shape: Sequence[int], runs: Runs) -> bool:
    """Whether summing a block of modes over all ranks sends less than swapping cuts of the spectrum (or gathering it,
    if there is nowhere to swap them to)."""
    if transformed(field, dims, False).is_replicated:
        return True
    summed = swapped = 0.0
    here = math.prod(max(field.lengths(d)) / field.shape[d] for d in range(field.ndim) if d not in dims)
    there = math.prod(max(field.lengths(d)) / field.shape[d] for d in range(field.ndim))
    for axis in {a for d in dims for a in field.wide(field.axes_of(d))}:
        away = 1 - 1 / field.mesh.size(axis)
        summed += 2 * away * here * math.prod(map(len, runs))
        swapped += away * there * math.prod(shape)
    return summed < swapped


def transformed(layout: Layout, dims: Sequence[int], real: bool) -> Layout:
    """Where a spectrum lies once it is taken: whole, if a dim has nowhere to leave its cut."""
    left, start = list(dims), layout
    half = left.pop() if real else None
    order = [] if half is None else [half]
    while order or left:
        if not order:
            order = sorted(reversed(left), key=layout.is_cut)  # as `fft._each` takes them
            left = []
        d = order.pop(0)
        moved = freed(layout, d, crowded=True) if layout.is_cut(d) else layout.uncut([d])
        if moved is None:
            return Layout.replicate(start.mesh, [n // 2 + 1 if d == half else n for d, n in enumerate(start.shape)])
        layout = moved.with_dim(d, Factor(layout.shape[d] // 2 + 1 if d == half else layout.shape[d]))
    return layout


def as_slice(run: range) -> slice:
    return slice(run.start, run.stop, run.step)


def rolled(x: Any, by: Mapping[int, int]) -> Any:
    return torch.roll(x, list(by.values()), list(by)) if by else x
