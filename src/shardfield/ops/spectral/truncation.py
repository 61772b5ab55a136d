"""Truncated Fourier transforms and spectral convolution of sharded fields: only kept modes are sent.

A truncated transform computes the requested modes only. Along a sharded dim each rank sums over its own rows, so the
result is Partial. The inverse evaluates each rank's rows from replicated modes without communication. The bytes sent
depend on the number of kept modes, not on the size of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ... import runtime
from ...comm import autograd_collectives
from ...comm.consensus import Consensus
from ...comm.grad_deferral import defers_all
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import mesh_of, rule
from ...errors import ShardingError
from ...layout import DimSharding, Layout, nested_chunk, rescale, starts
from ...redistribute import without_partial
from ...tensor import ShardTensor
from .._common.autocast import autocast_to_fp32
from .._common.blockwise import Blocks
from .mode_placement import choose_placement
from .partial_dft import DimModes, Modes, forward_dft, inverse_dft, scale

FLOATS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def truncated_fft(
    input: Tensor, dims: Sequence[int], modes: Sequence[Sequence[int]], norm: str | None = None
) -> Tensor:
    """Return `torch.fft.fftn(input, dim=dims, norm=norm)` at the frequencies `modes[i]` of `dims[i]` only.

    On a ShardTensor the result is Partial over the mesh axes that shard the transformed dims, and nothing is sent.
    `redistribute` then sums it to Replicate or Shard.
    """
    call = f"truncated_fft(dims={dims}, modes={modes}, norm={norm}) of {_describe(input)}"
    with Consensus.start(mesh_of((input,), None), call) as check:
        if _needs_collective(input):
            check.wait()
        return truncated_fft_unchecked(input, dims, modes, norm)


def truncated_fft_unchecked(
    input: Tensor, dims: Sequence[int], modes: Sequence[Sequence[int]], norm: str | None = None
) -> Tensor:
    """Run `truncated_fft` without the consensus check: the caller has checked that all ranks make the same call."""
    (input,) = autocast_to_fp32(input)
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
    """Return the field of `sizes` along `dims` with these modes; with `real`, from half a spectrum as torch.fft.irfftn.

    On a ShardTensor, `like` is a layout: the result is sharded along `dims` as `like` is, by default in the proportions
    of the modes, and each rank evaluates its rows. Modes sharded over the same axes are all-gathered first. Adjoint:
    one sum of the modes' gradient over these axes.
    """
    call = f"truncated_ifft({dims}, {modes}, {sizes}, {norm}, {real}, {like}) of {_describe(input)}"
    Consensus.start(mesh_of((input,), None), call).wait()
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
    """Run `truncated_ifft` without the consensus check: the caller has checked that all ranks make the same call."""
    if has_torch_function_unary(input):
        return handle_torch_function(truncated_ifft, (input,), input, dims, modes, sizes, norm, real, like)
    if not input.is_complex():
        raise RuntimeError("truncated_ifft expects complex modes")
    return inverse_dft(input, _dim_modes(input, dims, modes, sizes, norm), norm, real)


def _describe(x: Tensor) -> str:
    """Describe the layout and dtype of a tensor for a consensus check."""
    return f"{getattr(x, '_layout', tuple(x.shape))} {x.dtype}"


def _needs_collective(x: Tensor) -> bool:
    """Return whether a tensor is redistributed before any local work on it."""
    return isinstance(x, ShardTensor) and (not x._layout.is_simple or bool(x._layout.partial))


def _dim_modes(input, dims, modes, sizes, norm, layout: Layout | None = None) -> list[DimModes]:
    """Return the transformed dims with this rank's rows in `layout`; raise on invalid arguments."""
    if input.dtype not in FLOATS:
        raise RuntimeError(f"Unsupported dtype {input.dtype}: a truncated transform needs float or complex values")
    if not len(dims) == len(modes) == len(sizes) or not dims:
        raise RuntimeError(f"{len(dims)} dims, {len(modes)} lists of modes, {len(sizes)} sizes: they must agree")
    transformed = []
    for dim, kept, size in zip(dims, modes, sizes, strict=True):
        if not -input.ndim <= dim < input.ndim:
            raise IndexError(f"dim {dim} is out of range for a tensor of {input.ndim} dims")
        if size < 1:
            raise RuntimeError(f"Invalid number of data points ({size}) specified")
        scale(norm, size, False)
        span = layout.span(dim) if layout is not None and layout.is_sharded(dim) else None
        transformed.append(DimModes(dim % input.ndim, size, tuple(kept), span))
    if len({a.dim for a in transformed}) < len(transformed):
        raise RuntimeError("FFT dims must be unique")
    return transformed


@rule(truncated_fft, exact=True, partial=True)
def plan_truncated_fft(input: Operand, dims, modes, norm=None, *, fn):
    """Sum over local rows; the result is Partial over the axes that shard them."""
    layout = input.layout if all(op == "sum" for _, op in input.layout.partial) else without_partial(input.layout)
    along = _dim_modes(input, dims, modes, [input.shape[d] for d in dims], norm, layout)
    out_dims, axes = list(layout.dims), set(layout.partial_axes)
    for a in along:
        axes |= set(layout.nontrivial_axes(layout.axes_of(a.dim)))
        out_dims[a.dim] = (DimSharding(len(a.modes)),)
    return Plan(
        local=lambda input: forward_dft(input, along, norm),
        operands={"input": layout},
        layout=Layout.make(layout.mesh, out_dims, [(a, "sum") for a in sorted(axes)]),
    )


def _rows_of(modes: Layout, dim: int, size: int) -> tuple[DimSharding]:
    """Return the sharding of `size` rows in the proportions of the modes they are evaluated from."""
    factors = modes.dims[dim]
    if len(factors) == 1 and factors[0].axes:
        shard_sizes = rescale(factors[0].shard_sizes, size)
        if all(shard_sizes):
            return (DimSharding(size, factors[0].axes, shard_sizes),)
    return (DimSharding(size),)


@rule(truncated_ifft, exact=True)
def plan_truncated_ifft(input: Operand, dims, modes, sizes, norm=None, real=False, like: Layout | None = None, *, fn):
    """Evaluate each rank's rows from all modes; other dims stay sharded over axes that do not shard the rows."""
    if not input.dtype.is_complex:
        raise RuntimeError("truncated_ifft expects complex modes")
    row_dims = {d % input.ndim: _rows_of(input.layout, d, size) for d, size in zip(dims, sizes, strict=True)}
    if like is not None:
        row_dims = {d: like.dims[d] for d in row_dims}
    row_axes = {axis for shardings in row_dims.values() for s in shardings for axis in s.axes}
    source, unsharded, gathered = input.layout, input.layout, []
    for dim in range(input.ndim):
        axes = set(source.axes_of(dim))
        if not axes & row_axes and not (axes and dim in row_dims):
            continue
        unsharded = unsharded.unshard([dim])
        if axes <= row_axes:  # each rank uses all modes for other rows, so backward must reduce_scatter their gradient
            gathered.append((dim, Blocks.along(source, dim)))
        else:
            source = source.unshard([dim])
    result = unsharded.with_dims([row_dims.get(d, shardings) for d, shardings in enumerate(unsharded.dims)])
    along = _dim_modes(input, dims, modes, sizes, norm, result)
    if [result.shape[a.dim] for a in along] != [a.size for a in along]:
        raise ShardingError(f"truncated_ifft: sizes {tuple(sizes)} along dims {tuple(dims)} do not match like={like}")

    def local(input: Tensor) -> Tensor:
        for dim, blocks in gathered:
            input = blocks.all_gather(input, dim, blocks.shard_sizes, autograd_collectives.gather_replicate_in)
        return inverse_dft(input, along, norm, real)

    return Plan(local=local, operands={"input": source}, layout=result)


# ---------------------------------------------------------------------- spectral convolution


def spectral_conv(
    x: Tensor,
    weight: Tensor,
    n_modes: int | Sequence[int],
    *,
    output_shape: Sequence[int] | None = None,
    norm: str | None = "forward",
    compat: bool = False,
) -> Tensor:
    """Apply the layer of a Fourier neural operator: mix the channels of each of the lowest modes with its own weight.

    `x` is (batch, channels, *grid). `n_modes` is the number of modes kept along each dim of the grid, counting both
    signs. Of the last dim of a real field the n // 2 + 1 modes that are not negative are kept. `weight` is complex, of
    shape (channels, out channels, *modes), or (channels, *modes) to scale channels without mixing them. Of a weight
    with more modes the center is used. `output_shape` samples the result on another grid.

    `compat` reproduces neuraloperator 2.0.0 where it differs: along odd grids its modes come back one frequency lower,
    on another grid it keeps array positions instead of frequencies, and it transforms the last dim of complex fields
    in another way.

    On a ShardTensor the result is sharded like `x`; on another grid, in the same proportions. Only kept modes are
    sent, in one of two ways. Replicated: one all_reduce of the modes, and every rank mixes all of them. Sharded: a
    reduce_scatter of the modes, each rank mixes its shard, and an all_gather of the product. Modes are sharded if the
    weight is sharded by modes, or if the block of modes is large and sharding sends no more bytes (see the guide).

        y = spectral_conv(x, torch.randn(8, 16, 12, 7, dtype=torch.cfloat), (12, 12))
    """
    call = f"spectral_conv(n_modes={n_modes}, output_shape={output_shape}, norm={norm}, compat={compat})"
    with Consensus.start(mesh_of((x, weight), None), f"{call} of {_describe(x)} and {_describe(weight)}") as check:
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
            f"spectral_conv: n_modes of {order} dims needs x of {order + 2} dims and weight of {order + 2} (or "
            f"{order + 1} to scale channels without mixing), not {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in FLOATS:
        raise ValueError(f"spectral_conv: x is {x.dtype}; it must be one of {FLOATS}")
    if weight.dtype != x.dtype.to_complex():
        raise ValueError(f"spectral_conv: x of {x.dtype} needs a weight of {x.dtype.to_complex()}, not {weight.dtype}")
    if weight.shape[0] != x.shape[1]:
        raise ValueError(f"spectral_conv: x has {x.shape[1]} channels, the weight is for {weight.shape[0]}")
    grid, real = list(x.shape[2:]), not x.is_complex()
    sizes = grid if output_shape is None else [int(n) for n in output_shape]
    if len(sizes) != order or min(sizes) < 1 or min(grid) < 1 or min(counts) < 1:
        raise ValueError(
            f"spectral_conv: n_modes {counts}, grid {grid} and output_shape {sizes} must each be {order} positive sizes"
        )
    if isinstance(x, ShardTensor) and not x._layout.is_simple:
        x = x._unmerged_value()
    spectrum = [*grid[:-1], grid[-1] // 2 + 1] if real else grid
    requested = [*counts[:-1], counts[-1] // 2 + 1] if real else counts
    kept = [min(n, m) for n, m in zip(spectrum, requested, strict=True)]
    weight = _center_crop(weight, kept, real)
    in_modes: list[Modes] = []
    out_modes: list[Modes] = []
    for i, (size, out_size, count) in enumerate(zip(grid, sizes, kept, strict=True)):
        half = real and i == order - 1
        pairs = (
            _neuralop_frequencies(size, out_size, count, half, order, i)
            if compat
            else _frequencies(size, out_size, count, half)
        )
        kept_pairs = {j: pair for j, pair in enumerate(pairs) if pair is not None}
        if len(kept_pairs) < count:  # a coarser output grid lacks some modes
            weight = weight.index_select(
                i - order, torch.tensor(list(kept_pairs), dtype=torch.int64, device=weight.device)
            )
        in_modes.append(tuple(k for k, _ in kept_pairs.values()))
        out_modes.append(tuple(k for _, k in kept_pairs.values()))
    dims = list(range(2, x.ndim))
    modes = truncated_fft_unchecked(x, dims, in_modes, norm)
    check.wait()  # the consensus check was in flight during the local sums
    modes = _sum_modes(modes, weight)
    letters = "uvwxyz"[:order]
    if weight.ndim == order + 1:
        mixed = modes * weight
    else:
        mixed = torch.einsum(f"bi{letters},io{letters}->bo{letters}", modes, weight)
    like = resized_layout(x._layout, dims, sizes) if isinstance(x, ShardTensor) else None
    return truncated_ifft_unchecked(mixed, dims, out_modes, sizes, norm, real, like)


def _frequencies(size: int, out_size: int, count: int, half: bool) -> list[tuple[int, int] | None]:
    """Return the lowest `count` frequencies as pairs (k in a grid of `size`, k in a grid of `out_size`).

    A frequency that the output grid does not have is None.
    """
    if half:
        return [(k, k) if k <= out_size // 2 else None for k in range(count)]
    lowest = -(count // 2)
    fits = range(-(out_size // 2), (out_size + 1) // 2)
    return [(k, k) if k in fits or size == out_size else None for k in range(lowest, lowest + count)]


def _neuralop_frequencies(
    size: int, out_size: int, count: int, half: bool, order: int, i: int
) -> list[tuple[int, int] | None]:
    """Return the pairs of `_frequencies` as neuraloperator 2.0.0 chooses them.

    It shifts, slices, shifts again with fftshift instead of ifftshift, then crops or pads the array.
    """
    if half:
        return _frequencies(size, out_size, count, half)
    if i == order - 1:  # shifted if there are other dims, but never shifted back
        pairs = [(k - size // 2 if order > 1 else k, k) for k in range(count)]
    else:
        pairs = [(k, (k + 2 * (size // 2)) % size) for k in range(-(count // 2), count - count // 2)]
    return [(k, position) if position < out_size else None for k, position in pairs]


def _center_crop(weight: Tensor, kept: Sequence[int], real: bool) -> Tensor:
    """Crop a weight to `kept` modes along each dim: to the center, along half a spectrum to the lowest modes."""
    for i, count in enumerate(kept):
        dim = weight.ndim - len(kept) + i
        surplus = weight.shape[dim] - count
        if surplus < 0:
            raise ValueError(
                f"spectral_conv: {count} modes along dim {i} of the grid, but the weight has {weight.shape[dim]}"
            )
        if surplus:
            weight = weight.narrow(dim, 0 if real and i == len(kept) - 1 else surplus // 2, count)
    return weight


def spread_weight(weight: Tensor, like: ShardTensor, *, above: int = 16 << 20) -> Tensor:
    """Shard a large weight of `spectral_conv` by its modes, for fields sharded like `like`; return a small one as is.

    A weight of more than `above` bytes is sharded over the mesh axes that shard the grid, each along the largest dim of
    modes. Each rank then mixes its own modes, received by a reduce_scatter and sent by an all_gather. No rank holds the
    full weight or its gradient. `weight` must be equal on all ranks; the returned ShardTensor is a new leaf.

        weight = spread_weight(torch.randn(64, 64, 32, 32, 17, dtype=torch.cfloat, requires_grad=True), x)
    """
    grid, modes = list(range(2, like.ndim)), list(range(weight.ndim - like.ndim + 2, weight.ndim))
    axes = [a for d in grid for a in like._layout.nontrivial_axes(like._layout.axes_of(d))]
    if isinstance(weight, ShardTensor) or weight.nbytes <= above or not axes:
        return weight
    layout = Layout.replicate(like._layout.mesh, weight.shape)
    axes_of_dim: dict[int, list[int]] = {d: [] for d in modes}
    for axis in axes:
        shard_width = {d: weight.shape[d] / math.prod(layout.mesh.size(a) for a in axes_of_dim[d]) for d in modes}
        axes_of_dim[max(modes, key=lambda d: shard_width[d])].append(axis)
    for d, dim_axes in axes_of_dim.items():
        if dim_axes:
            size, axis_sizes = weight.shape[d], [layout.mesh.size(a) for a in dim_axes]
            layout = layout.with_dim(d, DimSharding(size, tuple(dim_axes), nested_chunk(size, axis_sizes)))
    local_slice = tuple(slice(*layout.span(d)) for d in range(weight.ndim))
    return ShardTensor(weight.detach()[local_slice].clone().requires_grad_(weight.requires_grad), layout)


def _sum_modes(modes: Tensor, weight: Tensor) -> Tensor:
    """Sum Partial modes over the axes on which the weight is replicated, to Replicate or Shard (`mode_placement.py`).

    If they stayed Partial, the weight's gradient would be Partial too, and it is larger than the modes. Over an axis
    that shards the weight they stay Partial here: the product reduce-scatters them to the weight's shards.
    """
    if not isinstance(modes, ShardTensor):
        return modes
    layout = modes._layout
    weight_axes = weight._layout.shard_axes if isinstance(weight, ShardTensor) else ()
    if weight_axes or not layout.is_simple:
        return modes._redistribute_to(layout.with_partial([a for a in layout.partial_axes if a in weight_axes]))
    grad = torch.is_grad_enabled() and (modes.requires_grad or weight.requires_grad)
    local = weight._local_tensor if isinstance(weight, ShardTensor) else weight
    deferred = defers_all(local, process_groups(layout, layout.partial_axes))
    grad_bytes = weight.nbytes if grad and weight.requires_grad and not deferred else 0
    out_ratio = weight.shape[1] / weight.shape[0] if weight.ndim == modes.ndim else 1.0
    dims = range(2, modes.ndim)
    return modes._redistribute_to(
        choose_placement(layout, dims, modes.element_size(), out_ratio=out_ratio, grad_bytes=grad_bytes, grad=grad)
    )


def resized_layout(layout: Layout, dims: Sequence[int], sizes: Sequence[int]) -> Layout:
    """Return the layout of a field of other sizes, sharded in the same proportions."""
    return _resized_layout(layout, tuple(dims), tuple(sizes))


@runtime.memo
def _resized_layout(layout: Layout, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    layout = layout.with_partial(())
    for dim, size in zip(dims, sizes, strict=True):
        (sharding,) = layout.dims[dim]
        if sharding.axes and size != sharding.size:
            bounds = [
                (start * size + sharding.size // 2) // sharding.size
                for start in (*starts(sharding.shard_sizes), sharding.size)
            ]
            layout = layout.with_dim(dim, DimSharding(size, sharding.axes, tuple(b - a for a, b in pairwise(bounds))))
        else:
            layout = layout.with_dim(dim, sharding._replace(size=size))
    return layout
