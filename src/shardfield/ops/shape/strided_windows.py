"""Overlapping windows by strides: `as_strided` of a tensor that is contiguous in memory, as slices and `unfold`.

Each dim of the result steps through one dim of the tensor, or through adjacent ones merged into one: windows of a
merged dim need not end where a row of the original shape does, as Longformer's chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class Steps(NamedTuple):
    """How dims of the result step through one dim of the tensor: (dim of the result, step, size).

    The longest step is the first one.
    """

    begin: int
    dims: list[tuple[int, int, int]]

    @property
    def length(self) -> int:
        """The number of elements of the dim from the first to the last one that is read."""
        return 1 + sum(step * (n - 1) for _, step, n in self.dims)


class Windows(NamedTuple):
    """The shape of the tensor with merged dims, and the steps along each of them."""

    shape: list[int]
    steps: list[Steps]


def find_windows(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Windows | None:
    """Return the slices and windows that elements by strides of a contiguous tensor are; None if they are others."""
    if 0 in shape or 0 in size or len(shape) == 0:
        return None
    for merged in _merges(shape):
        found = _steps(merged, size, stride, offset)
        if found is not None:
            return Windows(merged, found)
    return None


def take_windows(x: Tensor, windows: Windows, size: Sequence[int]) -> Tensor:
    """Return the elements of `x` as a tensor of `size`."""
    x = x.reshape(windows.shape)
    order: list[int | None] = []  # the dim of the result that each dim of `x` becomes
    inner: list[int] = []
    for d, steps in enumerate(windows.steps):
        x = x.narrow(d, steps.begin, steps.length)
        order.append(steps.dims[0][0] if steps.dims else None)
        if len(steps.dims) == 1 and steps.dims[0][1] > 1:
            x = x[(*[slice(None)] * d, slice(None, None, steps.dims[0][1]))]
        elif len(steps.dims) == 2:
            (_, step, _), (of_result, _, n) = steps.dims
            x = x.unfold(d, n, step)
            inner.append(of_result)
    order += inner
    kept = sorted((of_result, d) for d, of_result in enumerate(order) if of_result is not None)
    rest = [d for d, of_result in enumerate(order) if of_result is None]
    return x.permute([*rest, *(d for _, d in kept)]).reshape(list(size))


def _merges(shape: Sequence[int]) -> Iterator[list[int]]:
    """Return the shapes with adjacent dims merged, those with the fewest merges first."""
    inside = range(1, len(shape))
    for count in reversed(inside):
        for bounds in itertools.combinations(inside, count):
            yield [math.prod(shape[a:b]) for a, b in itertools.pairwise((0, *bounds, len(shape)))]
    yield [math.prod(shape)]


def _steps(shape: list[int], size: Sequence[int], stride: Sequence[int], offset: int) -> list[Steps] | None:
    units = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    found = []
    for n, unit in zip(shape, units, strict=True):
        found.append(Steps(offset // unit, []))
        offset %= unit
        if found[-1].begin >= n:
            return None
    for of_result, (n, step) in enumerate(zip(size, stride, strict=True)):
        if n > 1:
            d = next((d for d, unit in enumerate(units) if shape[d] > 1 and step >= unit and step % unit == 0), None)
            if d is None:
                return None
            found[d].dims.append((of_result, step // units[d], n))
    for n, steps in zip(shape, found, strict=True):
        steps.dims.sort(key=lambda dim: -dim[1])
        windowed = len(steps.dims) < 2 or len(steps.dims) == 2 and steps.dims[1][1] == 1
        if not windowed or steps.begin + steps.length > n:
            return None
    return found
