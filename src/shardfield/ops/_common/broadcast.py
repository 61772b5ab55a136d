"""Broadcast operands of different layouts: choose a common layout and redistribute them to it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import runtime
from ...comm import autograd_collectives
from ...dispatch.plan import process_groups
from ...layout import DimSharding, Layout, nested_balanced
from ...redistribute import redistribute, without_partial


class Alignment(NamedTuple):
    """The target layout of each operand, the groups over which its gradient is summed, and the result layout."""

    targets: tuple[Layout, ...]
    grad_reductions: tuple[tuple[tuple[ProcessGroup, ...], tuple[int, ...]], ...]
    result: Layout

    def redistribute(self, locals_: list[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        """Redistribute the local tensors from `layouts` to the targets."""
        moved = locals_
        if layouts != self.targets:
            moved = [redistribute(t, a, b) for t, a, b in zip(locals_, layouts, self.targets, strict=True)]
        for over, which in self.grad_reductions:
            for i, entered in zip(
                which, autograd_collectives.replicate_in([moved[i] for i in which], over), strict=True
            ):
                moved[i] = entered
        return moved


def broadcast_layout(result: Layout, shape: Sequence[int], partial: Sequence[tuple[int, str]] = ()) -> Layout:
    """Return the layout of an operand of `shape` that broadcasts to `result`."""
    skip = result.ndim - len(shape)
    dims = [result.dims[skip + d] if n == result.shape[skip + d] else (DimSharding(n),) for d, n in enumerate(shape)]
    return Layout.make(result.mesh, dims, partial)


def find_grad_reductions(result: Layout, targets: Sequence[Layout]) -> tuple:
    """Return (process groups, operand indices) pairs: the operands whose gradients must be summed over these groups.

    An operand that is replicated over an axis on which the work is sharded gets a partial gradient on each rank.
    """
    used = [t.shard_axes + t.partial_axes for t in targets]
    work = {*itertools.chain(*used), *result.shard_axes, *result.partial_axes}
    found: dict[tuple, list[int]] = {}
    for i, target in enumerate(targets):
        if len(used[i]) == len(work):  # most operands: no axis is idle
            continue
        idle = target.nontrivial_axes(sorted(work.difference(used[i])))
        if idle:
            found.setdefault(process_groups(target, idle), []).append(i)
    return tuple((over, tuple(which)) for over, which in found.items())


def _broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """Return `torch.broadcast_shapes`, which takes longer than the rest of a plan where shapes change in every step."""
    ndim = max(map(len, shapes))
    found = [1] * ndim
    for shape in shapes:
        for dim, size in enumerate(shape, ndim - len(shape)):
            if size != found[dim] and size != 1:
                if found[dim] != 1:
                    return torch.broadcast_shapes(*shapes)  # raises torch's error
                found[dim] = size
    return torch.Size(found)


@runtime.memo
def align(layouts: tuple[Layout, ...], keep_partial: tuple[int, ...] = ()) -> Alignment:
    """Choose a common layout: that of the largest sharded operand, with the shardings of the others on its free dims.

    `keep_partial` lists the operands whose partial axes stay partial in the result (the op is linear in them together).
    Other Partial operands are reduced into the common layout; on axes that no operand is sharded on, `without_partial`
    chooses it. Of two operands of one size, the one whose sharding was moved goes back to its former layout.
    """
    shape = _broadcast_shape([x.shape for x in layouts])
    mesh = layouts[0].mesh
    partial = layouts[keep_partial[0]].partial if keep_partial else ()
    used = {a for a, _ in partial}
    kept = {layouts[i] for i in keep_partial}
    dims: list[tuple[DimSharding, ...] | None] = [None] * len(shape)
    for layout in sorted(layouts, key=lambda x: (-x.numel, bool(x.partial), bool(x.former_shardings))):
        if layout.partial and layout not in kept:
            layout = without_partial(layout)
        skip = len(shape) - layout.ndim
        for d, factors in enumerate(layout.dims):
            axes = set(layout.axes_of(d))
            if axes and not axes & used and dims[skip + d] is None and layout.shape[d] == shape[skip + d]:
                dims[skip + d] = evened(factors, layout, shape.numel())
                used |= axes
    full = [factors or (DimSharding(n),) for factors, n in zip(dims, shape, strict=True)]
    result = with_origins_of(Layout.make(mesh, full, partial), layouts)
    return _align(result, layouts, partial, keep_partial)


@runtime.memo
def align_to(result: Layout, layouts: tuple[Layout, ...], keep_partial: tuple[int, ...] = ()) -> Alignment:
    """Align operands to a fixed result layout, as an in-place op needs."""
    shape = _broadcast_shape([x.shape for x in layouts])
    if len(shape) > result.ndim:
        raise RuntimeError(f"output with shape {list(result.shape)} doesn't match the broadcast shape {list(shape)}")
    return _align(result, layouts, result.partial, keep_partial)


def _align(result: Layout, layouts: Sequence[Layout], partial: Any, keep_partial: Sequence[int]) -> Alignment:
    """Build the alignment of operands with a result; an operand that has its target layout keeps its own origins."""
    targets = []
    for i, layout in enumerate(layouts):
        target = broadcast_layout(result, layout.shape, partial if i in keep_partial else ())
        targets.append(layout if target.bare is layout.bare else target)
    return Alignment(tuple(targets), find_grad_reductions(result, targets), result)


def evened(factors: tuple[DimSharding, ...], layout: Layout, numel: int) -> tuple[DimSharding, ...]:
    """Return even shards of an unbalanced dim of `layout`, if a result of `numel` elements is large beside the tensor.

    A row of a sharded dim is on one rank, which would compute all of a table of two such rows.
    """
    ranks = math.prod(layout.axis_sizes[a] for a in layout.shard_axes)
    is_large = numel >= max(2 * layout.numel, runtime.active.min_scattered * ranks)
    if not is_large or len(factors) > 1 or not factors[0].is_unbalanced:
        return factors
    size, axes, _ = factors[0]
    return (DimSharding(size, axes, nested_balanced(size, [layout.axis_sizes[a] for a in axes])),)


def with_origins_of(result: Layout, operands: Sequence[Layout]) -> Layout:
    """Return `result` with the operands' origins along its dims, aligned at the last dim."""
    if not any(operand.has_origins for operand in operands):
        return result
    dims = list(result.dims)
    for d in range(1, len(dims) + 1):
        if len(dims[-d]) == 1:
            held = [x.origins(x.ndim - d) for x in operands if x.ndim >= d and x.shape[-d] == result.shape[-d]]
            dims[-d] = (dims[-d][0].with_origins(*held),)
    return result.with_dims(dims)
