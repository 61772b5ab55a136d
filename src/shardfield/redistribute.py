"""Redistribute a local tensor from one layout to another, in steps.

Steps are planned once for each pair of layouts (pure, cached). Each is one differentiable collective along one mesh
axis. The order keeps messages few and small: reductions first (reduce_scatter where the target is sharded), then local
slices, then all_to_all between dims and changes of shard sizes, and all_gathers last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from . import runtime, trace_state
from .comm import autograd_collectives
from .comm.route import reshard_route, swap_route, tile_route
from .errors import ShardingError
from .layout import (
    DimSharding,
    Layout,
    Span,
    balanced,
    nested_chunk,
    outer_shard_sizes,
    regroup,
    shard_sizes_of,
    starts,
)

# Largest accepted share of a rank in a scattered value, relative to the mean share, if another dim divides more evenly.
MAX_EXCESS = 1.25


class Step(NamedTuple):
    """One redistribution along one mesh axis: name, function of the local tensor, layout after it."""

    name: str
    run: Callable[[Tensor], Tensor]
    after: Layout


@runtime.memo
def without_partial(layout: Layout, numel: int = 0) -> Layout:
    """Choose the layout in which a Partial value enters an op that is not linear in it. Pure.

    A small value is all-reduced: Partial axes become Replicate. A value of at least `Runtime.min_scattered` elements on
    a rank is reduce-scattered, which sends half the bytes and leaves each rank its share: every Partial axis shards a
    dim. That is the dim that the axis sharded before, if an op moved its sharding; else the first of `_scatter_order`.
    `numel` is the size of the op's result, if that decides: a small value may become a large one.
    """
    now = layout.with_partial(())
    share = math.prod(now.mesh.size(a) for a in now.shard_axes)
    if max(layout.numel, numel) < runtime.active.min_scattered * share:
        return now
    for axis in layout.nontrivial_axes(layout.partial_axes):
        former = now.former_shardings.get(frozenset([axis]))
        order = _scatter_order(now, now.mesh.size(axis))
        if former is not None:
            now = now.with_dim(*former)
        elif order:
            (factor,) = now.dims[order[0]]
            split_sizes = [n for size in shard_sizes_of(factor) for n in balanced(size, now.mesh.size(axis))]
            now = now.with_dim(order[0], DimSharding(factor.size, (*factor.axes, axis), tuple(split_sizes)))
    return now


def _scatter_order(layout: Layout, parts: int) -> list[int]:
    """Return the dims that `parts` more ranks can share, best first.

    Unsharded dims come before sharded ones, and the last dim, mostly channels that the next op mixes, comes after all
    others. Among these: the first dim, which is the batch or the rows; then the dim in the middle, which is spatial in
    channels-first and in channels-last order; then the largest.
    """
    last, middle = layout.ndim - 1, layout.ndim // 2

    def worst_excess(dim: int) -> float:
        """Return the largest share of a rank, divided by the mean share."""
        split_sizes = [n for size in layout.shard_sizes(dim) for n in balanced(size, parts)]
        return max(split_sizes) * len(split_sizes) / layout.shape[dim]

    room = [d for d in range(layout.ndim) if len(layout.dims[d]) == 1 and min(layout.shard_sizes(d)) >= parts]
    return sorted(
        room,
        key=lambda d: (
            worst_excess(d) > MAX_EXCESS, d == last, bool(layout.axes_of(d)), d != 0, d != middle, -layout.shape[d]
        ),
    )  # fmt: skip


def redistribute(local: Tensor, source: Layout, target: Layout, summed: tuple[int, ...] = ()) -> Tensor:
    """Return the local tensor under `target` of the value whose local tensor under `source` is `local`.

    Differentiable. The result may share memory with `local`. The gradient of the result is a partial sum over the axes
    `summed`, which are gathered: it is reduce-scattered over them.
    """
    if source is target:
        return local
    if trace_state.is_concrete(local):  # a constant of the traced program
        with trace_state.concrete():
            return redistribute(local, source, target, summed)
    for step in steps(source, target, summed):
        local = step.run(local)
    return local


@runtime.memo
def steps(source: Layout, target: Layout, summed: tuple[int, ...] = ()) -> tuple[Step, ...]:
    """Plan the steps from `source` to `target`. Pure. `summed`: see `redistribute`."""
    if source.shape != target.shape:
        raise ShardingError(f"a tensor of shape {tuple(source.shape)} cannot have the layout {target}")
    if source.mesh is not target.mesh:
        raise ShardingError(f"redistribution between meshes is not supported: {source.mesh} to {target.mesh}")
    if source.is_simple and target.is_simple:
        return tuple(_unmerged_steps(source, target, summed))
    clash = [d for d in range(source.ndim) if _common_sizes(source.dims[d], target.dims[d]) is None]
    if not clash:
        return tuple(_merged_steps(source, target, summed))
    for dim in clash:
        step = _reshard_merged(source, target, dim)
        if step is not None:
            return (step, *steps(step.after, target, summed))
    middle = unmerge_dims(source, clash)
    if middle is source:
        middle = unmerge_dims(target, clash)
    return steps(source, middle, summed) + steps(middle, target, summed)


def _common_sizes(a: tuple[DimSharding, ...], b: tuple[DimSharding, ...]) -> list[int] | None:
    """Return sizes of factors that express both shardings of one dim, or None."""
    if len(a) == len(b) == 1:
        return [a[0].size]
    for one, other in ((a, b), (b, a)):
        sizes = [f.size for f in one]
        regrouped = regroup(other, sizes)
        if regrouped is not None and all(len(factors) == 1 for factors in regrouped):
            return sizes
    return None


def _tiles(layout: Layout, dim: int, axis: int) -> list[list[Span]] | None:
    """Return the index ranges of a dim by coord of `axis`; None if there are many or other axes shard it."""
    *outer, last = layout.dims[dim]
    rows = outer[0].size if outer else 1
    if len(outer) > 1 or (outer and outer[0].axes) or layout.nontrivial_axes(last.axes) != (axis,) or rows > 64:
        return None
    shards = zip(starts(last.shard_sizes), last.shard_sizes, strict=True)
    return [[Span(r * last.size + s, r * last.size + s + n) for r in range(rows)] for s, n in shards]


def _reshard_merged(source: Layout, target: Layout, dim: int) -> Step | None:
    """Plan one exchange that reshards a merged dim over the same mesh axis; None if one is not enough."""
    axes = source.axes_of(dim)
    wide = source.nontrivial_axes(axes)
    if len(wide) != 1 or set(axes) != set(target.axes_of(dim)):
        return None
    have, want = _tiles(source, dim, wide[0]), _tiles(target, dim, wide[0])
    if have is None or want is None:
        return None
    route = tile_route(dim, have, want, source.coords[wide[0]])
    group = source.group(wide[0])
    return Step(
        "reshard merged",
        lambda t: autograd_collectives.exchange(t, route, group),
        source.with_dim(dim, *target.dims[dim]),
    )


def _merged_steps(source: Layout, target: Layout, summed: tuple[int, ...]) -> Iterator[Step]:
    """Plan the steps between layouts with merged dims, as layouts with one dim per factor."""
    sizes = [_common_sizes(a, b) for a, b in zip(source.dims, target.dims, strict=True)]

    def spread(layout: Layout) -> Layout:
        return layout.with_dims(
            [d for f, n in zip(layout.dims, sizes, strict=True) for d in regroup(f, n or ()) or [f]]
        )

    first, last = spread(source), spread(target)
    yield Step("view", lambda t: t.reshape(first.local_shape), first)
    yield from _unmerged_steps(first, last, summed)
    yield Step("view", lambda t: t.reshape(target.local_shape), target)


def _unmerged_steps(now: Layout, target: Layout, summed: tuple[int, ...]) -> Iterator[Step]:
    mesh, coords = now.mesh, now.coords

    group = now.group

    def step(name: str, run: Callable[[Tensor], Tensor], after: Layout) -> Iterator[Step]:
        nonlocal now
        now = after
        yield Step(name, run, after)

    kept = set(target.partial)
    for axis, op in now.partial:
        if (axis, op) in kept or axis not in now.partial_axes:
            continue
        # max and min over several axes are one reduction: equal elements share the gradient over all ranks
        axes = [a for a, o in now.partial if o == op and (a, o) not in kept] if op in ("max", "min") else [axis]
        rest = [p for p in now.partial if p[0] not in axes]
        dim = next((d for d in range(now.ndim) if _next_axis(now, target, d) == axis), None)
        if op == "sum" and dim is not None:
            split_sizes = _innermost_sizes(now, target.dims[dim][0], len(now.axes_of(dim)) + 1)
            dims = list(now.dims)
            dims[dim] = (_prefix(target.dims[dim][0], len(now.axes_of(dim)) + 1, now),)
            after = Layout.make(mesh, dims, rest)
            yield from step(
                "reduce_scatter",
                partial(autograd_collectives.reduce_scatter, dim=dim, shard_sizes=split_sizes, group=group(axis)),
                after,
            )
        else:
            after = Layout.make(mesh, now.dims, rest)
            over = tuple(group(a) for a in axes)
            yield from step(f"reduce {op}", partial(autograd_collectives.reduce_with, op=op, groups=over), after)

    while now.dims != target.dims:
        name, axis, run, after = _next_step(now, target, summed, group, coords)
        yield from step(name, run if mesh.size(axis) > 1 else _identity, after)

    for axis, op in target.partial:
        if axis not in now.partial_axes:
            if op != "sum":
                raise ShardingError(f"a value cannot be turned into Partial({op})")
            after = Layout.make(mesh, now.dims, [*now.partial, (axis, op)])
            yield from step("to_partial", partial(autograd_collectives.to_partial, groups=(group(axis),)), after)


def _next_axis(now: Layout, target: Layout, dim: int) -> int | None:
    """Return the mesh axis that divides the present shards of a dim further in the target; None if there is none."""
    ((have,), (want,)) = now.dims[dim], target.dims[dim]
    depth = len(have.axes)
    return want.axes[depth] if depth < len(want.axes) and _prefix(want, depth, now) == have else None


def _innermost_sizes(now: Layout, want: DimSharding, depth: int) -> tuple[int, ...]:
    """Return the shard sizes on the innermost of the first `depth` axes, within this rank's outer shard."""
    prefix = _prefix(want, depth, now)
    size = now.mesh.size(prefix.axes[-1])
    at = now.index(prefix.axes[:-1]) * size
    return prefix.shard_sizes[at : at + size]


def _prefix(factor: DimSharding, depth: int, now: Layout) -> DimSharding:
    """Return a nested sharding by its first `depth` axes only."""
    lengths = factor.shard_sizes
    for axis in reversed(factor.axes[depth:]):
        lengths = outer_shard_sizes(lengths, now.mesh.size(axis))
    return DimSharding(factor.size, factor.axes[:depth], lengths if depth else ())


def _identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the step along an axis of one rank."""
    return tensor


def is_local(source: Layout, target: Layout) -> bool:
    """Return True if the local tensor is the same under both layouts."""
    return source is target or all(s.run is _identity or s.name == "view" for s in steps(source, target))


def _next_step(
    now: Layout, target: Layout, summed: tuple[int, ...], group, coords
) -> tuple[str, int, Callable[[Tensor], Tensor], Layout]:
    """Return the next step that changes the sharding, the cheapest kind that applies, and its axis."""
    have = [f for (f,) in now.dims]
    want = [f for (f,) in target.dims]
    busy = {a for f in have for a in f.axes}

    for dim, (h, w) in enumerate(zip(have, want, strict=True)):  # local slice: no message
        depth = len(h.axes) + 1
        if depth <= len(w.axes) and w.axes[depth - 1] not in busy and _prefix(w, depth - 1, now) == h:
            axis, split_sizes = w.axes[depth - 1], _innermost_sizes(now, w, depth)
            after = now.with_dim(dim, _prefix(w, depth, now))
            return (
                "split",
                axis,
                partial(autograd_collectives.split, dim=dim, shard_sizes=split_sizes, group=group(axis)),
                after,
            )

    for source, h in enumerate(have):  # an axis that shards another dim in the target
        if not h.axes or h.axes[-1] in want[source].axes:
            continue
        axis = h.axes[-1]
        for dim, w in enumerate(want):
            depth = len(have[dim].axes) + 1
            if dim != source and w.axes[:depth][-1:] == (axis,) and _prefix(w, depth - 1, now) == have[dim]:
                size = now.mesh.size(axis)
                at = now.index(h.axes[:-1]) * size
                inner = _innermost_sizes(now, w, depth)
                route = swap_route(source, h.shard_sizes[at : at + size], dim, inner, coords[axis])
                after = now.with_dim(source, _prefix(h, len(h.axes) - 1, now)).with_dim(dim, _prefix(w, depth, now))
                return "swap", axis, partial(autograd_collectives.exchange, route=route, group=group(axis)), after

    for dim, (h, w) in enumerate(zip(have, want, strict=True)):  # the same axis, other shard sizes
        if len(h.axes) == 1 and w.axes[:1] == h.axes and _prefix(w, 1, now) != h:
            axis = h.axes[0]
            goal = _prefix(w, 1, now)
            route = reshard_route(dim, h.shard_sizes, goal.shard_sizes, coords[axis])
            return (
                "reshard",
                axis,
                partial(autograd_collectives.exchange, route=route, group=group(axis)),
                now.with_dim(dim, goal),
            )

    for dim, (h, w) in enumerate(zip(have, want, strict=True)):
        if h.axes and h != _prefix(w, len(h.axes), now):
            axis, size = h.axes[-1], now.mesh.size(h.axes[-1])
            at = now.index(h.axes[:-1]) * size
            split_sizes = h.shard_sizes[at : at + size]
            after = now.with_dim(dim, _prefix(h, len(h.axes) - 1, now))
            collective = autograd_collectives.gather_replicate_in if axis in summed else autograd_collectives.gather
            return "gather", axis, partial(collective, dim=dim, shard_sizes=split_sizes, group=group(axis)), after
    raise AssertionError(f"no step from {now} to {target}")


def unmerge_dims(layout: Layout, dims: Iterable[int] | None = None) -> Layout:
    """Return a layout without merged dims, or without those in `dims`: all axes of a merged dim shard its first factor.

    One exchange reaches this layout."""
    chosen = range(layout.ndim) if dims is None else set(dims)
    found = []
    for dim, factors in enumerate(layout.dims):
        if len(factors) > 1 and dim in chosen:
            first, inner = factors[0], math.prod(f.size for f in factors[1:])
            parts = [layout.mesh.size(a) for f in factors[1:] for a in f.axes]
            split_sizes = [n * inner for size in shard_sizes_of(first) for n in nested_chunk(size, parts)]
            axes = tuple(a for f in factors for a in f.axes)
            factors = (DimSharding(first.size * inner, axes, tuple(split_sizes)),)
        found.append(factors)
    return layout.with_dims(found)


def slice_shard(full: Tensor, layout: Layout, coords: Sequence[int]) -> Tensor:
    """Return the shard of a full tensor on the rank at `coords` under a simple layout, as a view."""
    for dim in range(layout.ndim):
        start, stop = layout.span(dim, coords)
        full = full.narrow(dim, start, stop - start)
    return full
