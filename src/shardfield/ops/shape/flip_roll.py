"""flip, roll, repeat, repeat_interleave, tril/triu and the pixel and channel shuffles.

flip and roll permute rows along a dim. Each rank requests the rows that its shard of the result needs, and only rows
that change ranks are sent; the adjoint sends the gradient rows back. The other functions of this file are local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm import autograd_collectives
from ...comm.route import RowRequest, fetch_route
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, gather_fallback, handler, handler_of, rule, to_full_tensor
from ...layout import DimSharding, Layout, chunk, outer_shard_sizes, shard_sizes_of, starts
from ...redistribute import unmerge_dims
from ...tensor import ShardTensor, wrap
from .._common.inplace import register_inplace
from .._common.probe import HALF_DTYPES, meta_tensor, probe, stand_in
from ..indexing.owners import gather_counts

LocalFn = Callable[[Tensor], Tensor]
SourceRuns = Callable[[int, int], list[RowRequest]]


def shard_by_one_axis(layout: Layout, dims: Sequence[int], field: Sequence[int] = (), last: int = -1) -> Layout:
    """Return the layout with each of `dims` simple and sharded by at most one axis.

    An inner axis of a doubly sharded dim moves to an unsharded dim that is long enough, else it replicates. The dims of
    the field come first (`field`, by default `dims`), the longest of them: rows that two axes shard become tiles again.
    Then the nearest dim; the dim `last` only if there is no other.
    """
    field = field or dims
    result = unmerge_dims(layout, dims)
    for dim in dims:
        while len(result.nontrivial_axes(result.axes_of(dim))) > 1:
            ((size, (*kept, axis), shard_sizes),) = result.dims[dim]
            parts = result.mesh.size(axis)
            result = result.with_dim(dim, DimSharding(size, tuple(kept), outer_shard_sizes(shard_sizes, parts)))
            free = [d for d in range(result.ndim) if not result.is_sharded(d) and result.shape[d] >= parts > 1]
            if free:
                target = min(free, key=lambda d: (d == last, -result.shape[d] if d in field else abs(d - dim), -d))
                n, axes = result.shape[target], result.axes_of(target)
                result = result.with_dim(target, DimSharding(n, (*axes, axis), chunk(n, parts)))
    return result


def reduce_into_field(layout: Layout, field: Sequence[int]) -> Layout:
    """Return the layout in which a Partial value enters a stencil op that is not linear in it.

    A sum is reduce-scattered onto the longest unsharded dim of the field, if this dim has a row for every rank: partial
    sums of tiles become tiles. Other Partial axes become Replicate.
    """
    result = layout.with_partial(())
    for axis in layout.nontrivial_axes(a for a, op in layout.partial if op == "sum"):
        parts = layout.mesh.size(axis)
        free = [d for d in field if not result.is_sharded(d) and result.shape[d] >= parts]
        if free:
            target = max(free, key=lambda d: result.shape[d])
            n = result.shape[target]
            result = result.with_dim(target, DimSharding(n, (*result.axes_of(target), axis), chunk(n, parts)))
    return result


def plan_row_fetch(layout: Layout, dim: int, source_runs: SourceRuns, sizes: Sequence[int]) -> tuple[LocalFn, Layout]:
    """Plan the exchange after which `dim` (sharded by one axis) has shards of `sizes`.

    `source_runs(start, stop)` returns the source rows of the result's rows `start` to `stop`. Returns the function that
    exchanges, and the layout of the result.
    """
    (factor,) = layout.dims[dim]
    (axis,) = layout.nontrivial_axes(factor.axes)
    requests = [source_runs(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]
    route = fetch_route(dim, factor.shard_sizes, layout.coords[axis], requests, sizes)
    group = layout.mesh.get_group(axis)
    result = layout.with_dim(dim, DimSharding(sum(sizes), factor.axes, tuple(sizes)))
    return lambda t: autograd_collectives.exchange(t, route, group), result


def int_args(*args) -> tuple[int, ...]:
    """Return integers passed one by one or as one sequence."""
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args


def compose(*steps: LocalFn) -> LocalFn:
    """Return the function that applies `steps` in order."""

    def run(input: Tensor) -> Tensor:
        for step in steps:
            input = step(input)
        return input

    return run


# ---------------------------------------------------------------------- flip and roll


@rule("flip", partial=True, merged=True)
def flip(input: Operand, *args, **kwargs):
    """Flip locally along unsharded dims; along a sharded dim, fetch the mirrored rows of this rank's shard."""
    dims = int_args(*args, *kwargs.values())
    meta_tensor(input).flip(dims)
    flipped = sorted({d % max(input.ndim, 1) for d in dims})
    source = shard_by_one_axis(input.layout, flipped)
    unsharded = [d for d in flipped if not source.is_sharded(d)]
    steps: list[LocalFn] = [lambda t: t.flip(unsharded)]
    steps += [
        plan_row_fetch(source, d, flip_runs(source.shape[d]), source.shard_sizes(d))[0]
        for d in flipped
        if d not in unsharded
    ]
    return Plan(local=compose(*steps), takes=["input"], operands={"input": source}, layout=source)


def flip_runs(size: int) -> SourceRuns:
    """Return `source_runs` of a flip: the mirrored range of source rows."""
    return lambda start, stop: [RowRequest(size - stop, stop - start, 0, True)]


@rule("roll", partial=True, merged=True)
def roll(input: Operand, shifts, dims=()):
    """Roll locally along unsharded dims; along a sharded dim, fetch the rows that roll into this rank's shard."""
    meta_tensor(input).roll(shifts, dims)
    shift_by_dim: dict[int, int] = {}
    for dim, shift in zip(*((v,) if isinstance(v, int) else v for v in (dims, shifts)), strict=True):
        shift_by_dim[dim % input.ndim] = shift_by_dim.get(dim % input.ndim, 0) + shift
    if (
        input.dtype in HALF_DTYPES and input.layout.numel
    ):  # autocast to the other half precision refuses it, on ranks that roll locally
        probe(torch.roll, stand_in(input, (2,)), 1)
    source = shard_by_one_axis(input.layout, list(shift_by_dim))
    unsharded = [d for d in shift_by_dim if not source.is_sharded(d)]
    steps: list[LocalFn] = [lambda t: t.roll([shift_by_dim[d] for d in unsharded], unsharded) if unsharded else t]
    steps += [
        plan_row_fetch(source, d, roll_runs(source.shape[d], shift_by_dim[d]), source.shard_sizes(d))[0]
        for d in shift_by_dim
        if d not in unsharded
    ]
    return Plan(local=compose(*steps), takes=["input"], operands={"input": source}, layout=source)


def roll_runs(size: int, shift: int) -> SourceRuns:
    """Return `source_runs` of a roll: the range shifted back, periodic in `size`."""
    return lambda start, stop: periodic_runs(start - shift, stop - start, size)


def periodic_runs(start: int, length: int, size: int) -> list[RowRequest]:
    """Return the runs of `length` (at most `size`) indices from `start`, periodic in `size`."""
    if not length:
        return []
    start %= size
    first = min(length, size - start)
    return [RowRequest(start, first)] + ([RowRequest(0, length - first, first)] if length > first else [])


_roll_dims = handler_of(torch.roll)


@handler("roll")
def roll_handler(func, types, args, kwargs):
    """Roll the flattened tensor if there are no dims."""
    named = dict(zip(("input", "shifts", "dims"), args, strict=False)) | kwargs
    dims = named.get("dims")
    if dims is not None and not (isinstance(dims, (tuple, list)) and not dims):
        return _roll_dims(func, types, args, kwargs)
    x = named["input"]
    meta_tensor(x).roll(named["shifts"])
    return x.flatten().roll(named["shifts"], 0).reshape(x.shape) if x.ndim else x.clone()


@composed("fliplr")
def fliplr(input):
    meta_tensor(input).fliplr()
    return input.flip(1)


@composed("flipud")
def flipud(input):
    meta_tensor(input).flipud()
    return input.flip(0)


@composed("rot90")
def rot90(input, k=1, dims=(0, 1)):
    meta_tensor(input).rot90(k, dims)
    first, second = dims
    turns = k % 4
    if turns == 0:
        return input.clone()
    if turns == 2:
        return input.flip((first, second))
    return input.flip(second if turns == 1 else first).transpose(first, second)


# ---------------------------------------------------------------------- repeat


@rule("repeat", partial=True, merged=True)
def repeat(input: Operand, *args, **kwargs):
    """Repeat locally: a repeated dim becomes a merged dim of an unsharded factor and the old dim."""
    repeats = int_args(*args, *kwargs.values())
    meta_tensor(input).repeat(repeats)
    skip = len(repeats) - input.ndim
    old = [(DimSharding(1),)] * skip + list(input.layout.dims)
    layout = input.layout.with_dims([(DimSharding(k), *factors) for k, factors in zip(repeats, old, strict=True)])
    return Plan(local=lambda input: input.repeat(repeats), layout=layout)


@composed("tile")
def tile(input, *args, **kwargs):
    dims = int_args(*args, *kwargs.values())
    return input.repeat((1,) * (input.ndim - len(dims)) + dims)


@rule("repeat_interleave", partial=True, merged=True)
def repeat_interleave_int(input: Operand, repeats, dim, *, output_size=None):
    """Repeat locally: the dim becomes a merged dim of the old dim and an unsharded factor."""
    meta_tensor(input).repeat_interleave(repeats, dim)
    dim %= input.ndim
    layout = input.layout.with_dim(dim, *input.layout.dims[dim], DimSharding(repeats))
    return Plan(local=lambda input: input.repeat_interleave(repeats, dim), layout=layout)


_run_interleave_int = handler_of(torch.repeat_interleave)


@handler("repeat_interleave")
def repeat_interleave(func, types, args, kwargs):
    """Repeat each element `repeats` times. If `repeats` is a tensor, its values determine the shape of the result."""
    named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    if "repeats" not in named or not isinstance(named.get("input"), Tensor):
        return gather_fallback(func, types, args, kwargs)  # the form that turns repeats into indices
    x, repeats, dim = named["input"], named["repeats"], named.get("dim")
    if dim is None:
        x, dim = x.flatten(), 0
    if isinstance(repeats, Tensor) and repeats.numel() == 1 and isinstance(x, ShardTensor):
        repeats = int(repeats)
    if not isinstance(repeats, Tensor):
        return _run_interleave_int(func, types, (x, repeats, dim), {})
    repeats = repeats._reduced_value() if isinstance(repeats, ShardTensor) else repeats
    if not isinstance(x, ShardTensor):
        return func(x, to_full_tensor(repeats), dim)
    dim = range(x.ndim)[dim]
    if repeats.ndim != 1 or len(repeats) != x.shape[dim]:
        raise RuntimeError("repeats must have the same size as input along dim, but got " + str(tuple(repeats.shape)))
    x._consumed = True
    x = x._redistribute_to(unmerge_dims(x._layout, [dim]))
    counts, sizes = _own_counts(repeats, x._layout, dim)
    total = sum(sizes)
    if named.get("output_size") not in (None, total):
        raise RuntimeError("repeat_interleave: allocated size does not match required size")
    if min(sizes) < 0:
        raise RuntimeError("repeats can not be negative")
    (factor,) = x._layout.dims[dim]
    local = x._local_tensor.repeat_interleave(counts, dim)
    return wrap(local, x._layout.with_dim(dim, DimSharding(total, factor.axes, sizes if factor.axes else ())))


def _own_counts(repeats: Tensor, layout: Layout, dim: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return how often this rank's rows are repeated, and the number of repeated rows of every shard.

    -1 stands for a negative count. Counts that are sharded like the rows stay where they are; others are needed in
    full.
    """
    (factor,) = layout.dims[dim]
    if isinstance(repeats, ShardTensor) and repeats._layout.dims == ((factor,),) and not repeats.is_floating_point():
        counts = repeats._local_tensor
        return counts, gather_counts(_total(counts), layout, factor.axes, counts.device)
    whole = to_full_tensor(repeats) if isinstance(repeats, ShardTensor) else repeats
    start, stop = layout.span(dim)
    return whole[start:stop], tuple(map(_total, whole.split(shard_sizes_of(factor))))


def _total(counts: Tensor) -> int:
    return -1 if (counts < 0).any() else int(counts.sum())


# ---------------------------------------------------------------------- triangles


@rule("tril", "triu", partial=True, merged=True)
def tril_triu(input: Operand, diagonal=0, *, fn):
    """Zero a triangle of the local block, with the diagonal shifted to the block's position."""
    fn(meta_tensor(input), diagonal)
    source = unmerge_dims(input.layout, [input.ndim - 2, input.ndim - 1])
    diagonal = max(-input.shape[-2], min(diagonal, input.shape[-1]))  # so that the local offset cannot overflow
    local_diagonal = diagonal + source.span(input.ndim - 2).start - source.span(input.ndim - 1).start
    return Plan(local=lambda input: fn(input, local_diagonal), operands={"input": source}, layout=source)


register_inplace("tril_", "triu_")


# ---------------------------------------------------------------------- pixel and channel shuffles


@composed("pixel_shuffle")
def pixel_shuffle(input, upscale_factor):
    # Raise torch's errors from a real call on one pixel: the meta kernel of torch 2.11 raises another type.
    one_pixel = [*([1] * (input.ndim - 3)), *input.shape[-3:-2], *([1] * min(input.ndim, 2))]
    probe(F.pixel_shuffle, stand_in(input, one_pixel), upscale_factor)
    *lead, c, h, w = input.shape
    r, n = upscale_factor, len(lead)
    cells = input.reshape(*lead, c // r**2, r, r, h, w)
    shuffled = cells.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(*lead, c // r**2, h * r, w * r)
    return shuffled.clone()  # torch's is never a view; the reshape of a merged dim may be one


@composed("pixel_unshuffle")
def pixel_unshuffle(input, downscale_factor):
    shape = F.pixel_unshuffle(meta_tensor(input), downscale_factor).shape
    *lead, c, h, w = input.shape
    r, n = downscale_factor, len(lead)
    cells = input.reshape(*lead, c, h // r, r, w // r, r)
    return cells.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(shape).clone()


@composed("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(input, groups):
    torch.channel_shuffle(meta_tensor(input), groups)
    b, c, *rest = input.shape
    shuffled = input.reshape(b, groups, c // groups, *rest).transpose(1, 2).reshape(input.shape)
    return shuffled.clone()  # torch's is never a view; with one group, the reshape is one
