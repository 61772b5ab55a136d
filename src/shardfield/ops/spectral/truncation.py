"""Spectral convolutions on cut fields: what travels are the kept modes, whatever the size of the grid.

A truncated transform forms the modes it is asked for and no others. Along a cut dim each rank sums over its own rows,
so the result is Partial; the inverse evaluates the rows of each rank from modes that all have, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...comm import autograd_collectives
from ...comm.consensus import Consensus
from ...comm.grad_deferral import deferred_groups
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import mesh_of, rule
from ...errors import ShardingError
from ...layout import DimSharding, Layout, nested_chunk, starts
from ...tensor import ShardTensor
from .._common.blockwise import Blocks
from .mode_placement import choose_placement
from .partial_dft import DimModes, Modes, forward_dft, inverse_dft, scale

FLOATS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def truncated_fft(
    input: Tensor, dims: Sequence[int], modes: Sequence[Sequence[int]], norm: str | None = None
) -> Tensor:
    """Chosen modes of a field: `torch.fft.fftn(input, dim=dims, norm=norm)` at the frequencies `modes[i]` of `dims[i]`.

    On a ShardTensor the result is Partial over the mesh axes that cut the transformed dims, and none of it is sent:
    `redistribute` sums it, whole or into shards.
    """
    words = f"truncated_fft(dims={dims}, modes={modes}, norm={norm}) of {_describe(input)}"
    with Consensus.start(mesh_of((input,), None), words) as check:
        if _needs_collective(input):
            check.wait()
        return truncated_fft_unchecked(input, dims, modes, norm)


def truncated_fft_unchecked(
    input: Tensor, dims: Sequence[int], modes: Sequence[Sequence[int]], norm: str | None = None
) -> Tensor:
    """`truncated_fft` for those who have compared ranks already."""
    if has_torch_function_unary(input):
        return handle_torch_function(truncated_fft, (input,), input, dims, modes, norm)
    return forward_dft(input, _dim_modes(input, dims, modes, [input.shape[d] for d in dims], norm), norm)


def truncated_ifft(
    input: Tensor,
    dims: Sequence[int],
    modes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    norm: str | None = None,
    real: bool = False,
    like: Layout | None = None,
) -> Tensor:
    """The field of `sizes` along `dims` with these modes; with `real`, as torch.fft.irfftn from half a spectrum.

    On a ShardTensor `like` is a layout whose cuts of `dims` the result gets: each rank evaluates its rows. The modes
    must be whole there and are made so if they are not. Adjoint: one sum of the modes' gradient.
    """
    words = f"truncated_ifft({dims}, {modes}, {sizes}, {norm}, {real}, {like}) of {_describe(input)}"
    Consensus.start(mesh_of((input,), None), words).wait()
    return truncated_ifft_unchecked(input, dims, modes, sizes, norm, real, like)


def truncated_ifft_unchecked(
    input: Tensor,
    dims: Sequence[int],
    modes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    norm: str | None = None,
    real: bool = False,
    like: Layout | None = None,
) -> Tensor:
    """`truncated_ifft` for those who have compared ranks already."""
    if has_torch_function_unary(input):
        return handle_torch_function(truncated_ifft, (input,), input, dims, modes, sizes, norm, real, like)
    if not input.is_complex():
        raise RuntimeError("truncated_ifft expects complex modes")
    return inverse_dft(input, _dim_modes(input, dims, modes, sizes, norm), norm, real)


def _describe(x: Tensor) -> str:
    """Where a tensor lies and what it is made of, for words that ranks compare."""
    return f"{getattr(x, '_layout', tuple(x.shape))} {x.dtype}"


def _needs_collective(x: Tensor) -> bool:
    """Whether messages come before any work on a tensor."""
    return isinstance(x, ShardTensor) and (not x._layout.is_simple or bool(x._layout.partial))


def _dim_modes(input, dims, modes, sizes, norm, layout: Layout | None = None) -> list[DimModes]:
    """The transformed dims, with the rows that `layout` leaves here; what is wrong about them raises."""
    if input.dtype not in FLOATS:
        raise RuntimeError(f"Unsupported dtype {input.dtype}: a truncated transform is of float or complex values")
    if not len(dims) == len(modes) == len(sizes) or not dims:
        raise RuntimeError(f"{len(dims)} dims, {len(modes)} lists of modes, {len(sizes)} sizes: they must agree")
    found = []
    for dim, kept, size in zip(dims, modes, sizes, strict=True):
        if not -input.ndim <= dim < input.ndim:
            raise IndexError(f"dim {dim} of a tensor of {input.ndim} dims")
        if size < 1:
            raise RuntimeError(f"Invalid number of data points ({size}) specified")
        scale(norm, size, False)
        span = layout.span(dim) if layout is not None and layout.is_sharded(dim) else None
        found.append(DimModes(dim % input.ndim, size, tuple(kept), span))
    if len({a.dim for a in found}) < len(found):
        raise RuntimeError("FFT dims must be unique")
    return found


@rule(truncated_fft, exact=True, partial=True)
def plan_truncated_fft(input: Operand, dims, modes, norm=None, *, fn):
    """Sums over the rows that are here; over the axes that cut them they are addends."""
    layout = input.layout if all(op == "sum" for _, op in input.layout.partial) else input.layout.with_partial(())
    along = _dim_modes(input, dims, modes, [input.shape[d] for d in dims], norm, layout)
    found, axes = list(layout.dims), set(layout.partial_axes)
    for a in along:
        axes |= set(layout.nontrivial_axes(layout.axes_of(a.dim)))
        found[a.dim] = (DimSharding(len(a.modes)),)
    return Plan(
        local=lambda input: forward_dft(input, along, norm),
        operands={"input": layout},
        layout=Layout.make(layout.mesh, found, [(a, "sum") for a in sorted(axes)]),
    )


@rule(truncated_ifft, exact=True)
def plan_truncated_ifft(input: Operand, dims, modes, sizes, norm=None, real=False, like: Layout | None = None, *, fn):
    """Each rank evaluates its rows from all modes; other dims keep cuts by axes that rows have no use for."""
    if not input.dtype.is_complex:
        raise RuntimeError("truncated_ifft expects complex modes")
    where = {d % input.ndim: (DimSharding(size),) for d, size in zip(dims, sizes, strict=True)}
    if like is not None:
        where = {d: like.dims[d] for d in where}
    taken = {axis for factors in where.values() for f in factors for axis in f.axes}
    source, whole, joined = input.layout, input.layout, []
    for dim in range(input.ndim):
        axes = set(source.axes_of(dim))
        if not axes & taken and not (axes and dim in where):
            continue
        whole = whole.unshard([dim])
        if axes <= taken:  # gathered for work that differs from rank to rank: its gradient is summed into the shards
            joined.append((dim, Blocks.along(source, dim)))
        else:
            source = source.unshard([dim])
    result = whole.with_dims([where.get(d, factors) for d, factors in enumerate(whole.dims)])
    along = _dim_modes(input, dims, modes, sizes, norm, result)
    if [result.shape[a.dim] for a in along] != [a.size for a in along]:
        raise ShardingError(f"a field of sizes {tuple(sizes)} along {tuple(dims)} cannot be laid out as {like}")

    def local(input: Tensor) -> Tensor:
        for dim, blocks in joined:
            input = blocks.all_gather(input, dim, blocks.shard_sizes, autograd_collectives.gather_replicate_in)
        return inverse_dft(input, along, norm, real)

    return Plan(local=local, operands={"input": source}, layout=result)


# ---------------------------------------------------------------------- the layer


def spectral_conv(
    x: Tensor,
    weight: Tensor,
    n_modes: int | Sequence[int],
    *,
    output_shape: Sequence[int] | None = None,
    norm: str | None = "forward",
    compat: bool = False,
) -> Tensor:
    """The layer of a Fourier neural operator: the lowest modes of a field, mixed over channels by a weight for each.

    `x` is (batch, channels, *grid) and `n_modes` counts the modes kept along each dim of the grid, of both signs; of
    the last dim of a real field the n // 2 + 1 that are not negative are kept. `weight` is complex, (channels, out
    channels, *modes), or (channels, *modes) for one that does not mix them; of a larger one the middle is used.
    `output_shape` samples the result on another grid.

    `compat` gives what neuraloperator 2.0.0 gives where that differs: along odd grids its modes come back one
    frequency lower, on another grid it keeps places in the array and not frequencies, and it treats the last dim of
    complex fields otherwise.

    On a ShardTensor cut along any dims the result lies as `x` does (on another grid, cut in proportion). One sum of
    kept modes is all that is sent, whole; or modes are mixed in shares, one on each rank, and the product is gathered,
    where the weight lies in shards of its modes, or the block is large and that sends no more (see the guide).

        y = spectral_conv(x, torch.randn(8, 16, 12, 7, dtype=torch.cfloat), (12, 12))
    """
    words = f"spectral_conv(n_modes={n_modes}, output_shape={output_shape}, norm={norm}, compat={compat})"
    with Consensus.start(mesh_of((x, weight), None), f"{words} of {_describe(x)} and {_describe(weight)}") as check:
        if _needs_collective(x) or isinstance(weight, ShardTensor):
            check.wait()
        return _spectral_conv(check, x, weight, n_modes, output_shape, norm, compat)


def _spectral_conv(
    check: Consensus, x: Any, weight: Any, n_modes, output_shape, norm: str | None, compat: bool
) -> Tensor:
    counts = [n_modes] if isinstance(n_modes, int) else list(n_modes)
    order = len(counts)
    if x.ndim != order + 2 or weight.ndim not in (order + 1, order + 2):
        raise ValueError(
            f"spectral_conv: {order} numbers of modes need a field of {order + 2} dims and a weight of {order + 2} (or "
            f"{order + 1}: one factor for each channel), not {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in FLOATS or weight.dtype != x.dtype.to_complex():
        raise ValueError(f"spectral_conv: a field of {x.dtype} and a weight of {weight.dtype}: they must agree")
    if weight.shape[0] != x.shape[1]:
        raise ValueError(f"spectral_conv: {x.shape[1]} channels meet a weight for {weight.shape[0]}")
    grid, real = list(x.shape[2:]), not x.is_complex()
    sizes = grid if output_shape is None else [int(n) for n in output_shape]
    if len(sizes) != order or min(sizes) < 1 or min(grid) < 1 or min(counts) < 1:
        raise ValueError(
            f"spectral_conv: modes {counts}, grid {grid} and output_shape {sizes} must be {order} positive"
        )
    if isinstance(x, ShardTensor) and not x._layout.is_simple:
        x = x._unmerged_value()
    spectrum = [*grid[:-1], grid[-1] // 2 + 1] if real else grid
    wanted = [*counts[:-1], counts[-1] // 2 + 1] if real else counts
    kept = [min(n, m) for n, m in zip(spectrum, wanted, strict=True)]
    weight = _center_crop(weight, kept, real)
    first: list[Modes] = []
    last: list[Modes] = []
    for i, (size, goal, count) in enumerate(zip(grid, sizes, kept, strict=True)):
        half = real and i == order - 1
        pairs = (
            _neuralop_frequencies(size, goal, count, half, order, i)
            if compat
            else _frequencies(size, goal, count, half)
        )
        found = {j: pair for j, pair in enumerate(pairs) if pair is not None}
        if len(found) < count:  # a coarser grid has no such modes
            weight = weight.index_select(i - order, torch.tensor(list(found), dtype=torch.int64, device=weight.device))
        first.append(tuple(k for k, _ in found.values()))
        last.append(tuple(k for _, k in found.values()))
    dims = list(range(2, x.ndim))
    modes = truncated_fft_unchecked(x, dims, first, norm)
    check.wait()  # the comparison flew while this rank summed
    modes = _sum_modes(modes, weight)
    letters = "uvwxyz"[:order]
    if weight.ndim == order + 1:
        mixed = modes * weight
    else:
        mixed = torch.einsum(f"bi{letters},io{letters}->bo{letters}", modes, weight)
    like = resized_layout(x._layout, dims, sizes) if isinstance(x, ShardTensor) else None
    return truncated_ifft_unchecked(mixed, dims, last, sizes, norm, real, like)


def _frequencies(size: int, goal: int, count: int, half: bool) -> list[tuple[int, int] | None]:
    """The lowest `count` frequencies of a dim of `size`, each with itself; None where a dim of `goal` lacks it."""
    if half:
        return [(k, k) if k <= goal // 2 else None for k in range(count)]
    lowest = -(count // 2)
    fits = range(-(goal // 2), (goal + 1) // 2)
    return [(k, k) if k in fits or size == goal else None for k in range(lowest, lowest + count)]


def _neuralop_frequencies(
    size: int, goal: int, count: int, half: bool, order: int, i: int
) -> list[tuple[int, int] | None]:
    """The same as neuraloperator 2.0.0 has it: fftshift, a slice, fftshift again, and the array cropped or padded."""
    if half:
        return _frequencies(size, goal, count, half)
    if i == order - 1:  # shifted there if there are other dims, and never back
        at = [(k - size // 2 if order > 1 else k, k) for k in range(count)]
    else:
        at = [(k, (k + 2 * (size // 2)) % size) for k in range(-(count // 2), count - count // 2)]
    return [(k, place) if place < goal else None for k, place in at]


def _center_crop(weight: Tensor, kept: Sequence[int], real: bool) -> Tensor:
    """The part of a weight that belongs to these numbers of modes: the middle, along half a spectrum the beginning."""
    for i, count in enumerate(kept):
        dim = weight.ndim - len(kept) + i
        spare = weight.shape[dim] - count
        if spare < 0:
            raise ValueError(
                f"spectral_conv: {count} modes along dim {i} of the grid, the weight has {weight.shape[dim]}"
            )
        if spare:
            weight = weight.narrow(dim, 0 if real and i == len(kept) - 1 else spare // 2, count)
    return weight


def spread_weight(weight: Tensor, like: ShardTensor, *, above: int = 16 << 20) -> Tensor:
    """A weight for `spectral_conv` of fields that lie as `like`: itself if it is small, else in shards of its modes.

    Above `above` bytes it is cut by the mesh axes that cut the grid, each along the longest dim of modes left. Ranks
    then mix their own modes: they arrive by a reduce-scatter and leave by an all-gather, and neither the weight nor its
    gradient is whole anywhere. `weight` is the same on all ranks; what comes back is a leaf of its own.

        weight = spread_weight(torch.randn(64, 64, 32, 32, 17, dtype=torch.cfloat, requires_grad=True), x)
    """
    grid, modes = list(range(2, like.ndim)), list(range(weight.ndim - like.ndim + 2, weight.ndim))
    axes = [a for d in grid for a in like._layout.nontrivial_axes(like._layout.axes_of(d))]
    if isinstance(weight, ShardTensor) or weight.nbytes <= above or not axes:
        return weight
    layout = Layout.replicate(like._layout.mesh, weight.shape)
    taken: dict[int, list[int]] = {d: [] for d in modes}
    for axis in axes:
        width = {d: weight.shape[d] / math.prod(layout.mesh.size(a) for a in taken[d]) for d in modes}
        taken[max(modes, key=lambda d: width[d])].append(axis)
    for d, cutting in taken.items():
        if cutting:
            size, parts = weight.shape[d], [layout.mesh.size(a) for a in cutting]
            layout = layout.with_dim(d, DimSharding(size, tuple(cutting), nested_chunk(size, parts)))
    here = tuple(slice(*layout.span(d)) for d in range(weight.ndim))
    return ShardTensor(weight.detach()[here].clone().requires_grad_(weight.requires_grad), layout)


def _sum_modes(modes: Tensor, weight: Tensor) -> Tensor:
    """The modes summed over the axes on which the weight is whole: into shares, or for every rank (see `shares`).

    Left as addends there, they would make addends of the weight's gradient, which is the larger. Over an axis that
    cuts the weight the product itself decides: modes are summed into the weight's shards.
    """
    if not isinstance(modes, ShardTensor):
        return modes
    layout = modes._layout
    cutting = weight._layout.shard_axes if isinstance(weight, ShardTensor) else ()
    if cutting or not layout.is_simple:
        return modes._redistribute_to(layout.with_partial([a for a in layout.partial_axes if a in cutting]))
    grad = torch.is_grad_enabled() and (modes.requires_grad or weight.requires_grad)
    local = weight._local_tensor if isinstance(weight, ShardTensor) else weight
    later = deferred_groups(local).issuperset(process_groups(layout, layout.partial_axes))
    owed = weight.nbytes if grad and weight.requires_grad and not later else 0
    growth = weight.shape[1] / weight.shape[0] if weight.ndim == modes.ndim else 1.0
    dims = range(2, modes.ndim)
    return modes._redistribute_to(
        choose_placement(layout, dims, modes.element_size(), out_ratio=growth, grad_bytes=owed, grad=grad)
    )


def resized_layout(layout: Layout, dims: Sequence[int], sizes: Sequence[int]) -> Layout:
    """Where a field of other sizes lies: as this one, cut in proportion."""
    layout = layout.with_partial(())
    for dim, size in zip(dims, sizes, strict=True):
        (factor,) = layout.dims[dim]
        if factor.axes and size != factor.size:
            marks = [
                (start * size + factor.size // 2) // factor.size for start in (*starts(factor.shard_sizes), factor.size)
            ]
            layout = layout.with_dim(dim, DimSharding(size, factor.axes, tuple(b - a for a, b in pairwise(marks))))
        else:
            layout = layout.with_dim(dim, factor._replace(size=size))
    return layout
