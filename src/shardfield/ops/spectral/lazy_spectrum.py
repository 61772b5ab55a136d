"""Lazy spectra: a transform along a sharded dim is deferred until the modes that are read are known.

Code that keeps some modes of a field transforms it, perhaps shifts the spectrum, and slices it; it writes the result
into zeros, shifts back and inverts. `LazySpectrum` is the first half: a slice of it is a truncated transform.
`SparseSpectrum` is the second half: its inverse is evaluated from the blocks that were written. Both are `Deferred`
values of an ordinary ShardTensor; any other read of its local tensor materializes the spectrum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...comm.consensus import Consensus
from ...layout import Layout, Origin
from ...tensor import ShardTensor, wrap_deferred
from .._common.autocast import autocast_to_fp32
from .lazy_forward import LazySpectrum
from .lazy_inverse import SparseSpectrum, field_of_modes, out_size
from .mode_blocks import spectrum_layout
from .truncation import FLOATS

ASSEMBLED = Origin("assembled", 0, (), ())  # on dims of a dense tensor that blocks of modes were written into


def lazy_spectrum_of(x: Any) -> LazySpectrum | SparseSpectrum | None:
    """Return the deferred spectrum of a tensor; None if it has none."""
    found = x._deferred if x.__class__ is ShardTensor else None
    return found if isinstance(found, (LazySpectrum, SparseSpectrum)) else None


def defer_forward(
    input: Any, dims: Sequence[int], sizes: Sequence[int | None], norm, real: bool, is_inverse: bool, compute: Callable
) -> Any:
    """Return the deferred spectrum of a field; None if no dim is sharded or the transform changes sizes.

    `compute(field)` computes the spectrum eagerly; `is_inverse` marks an inverse transform.
    """
    if input.__class__ is not ShardTensor or lazy_spectrum_of(input) is not None:
        return None
    (input,) = autocast_to_fp32(input)
    if input._dtype not in FLOATS or (real and input._dtype.is_complex) or 0 in input.shape or not dims:
        return None
    if norm not in (None, "backward", "ortho", "forward"):
        return None
    if any(n is not None and n != input.shape[d] for d, n in zip(dims, sizes, strict=True)):
        return None
    source = input._settled()._unmerged_value()
    if not any(source._layout.is_sharded(d) for d in dims):
        return None
    layout = spectrum_layout(source._layout, tuple(dims), real)
    spectrum = LazySpectrum(source, dims, norm, real, is_inverse, layout, compute)
    return wrap_deferred(spectrum, source._dtype.to_complex(), source._device)


def defer_block_write(x: Tensor, index: Any, value: Any, mesh: Any) -> Any:
    """Return `x` with a block of modes written, as a sparse spectrum; None if `x` is not zero or no origin fits."""
    if value.__class__ is not ShardTensor or x.dtype not in FLOATS[2:] or x.requires_grad or not x.is_contiguous():
        return None
    found = field_of_modes(value._layout, x.shape)
    if found is None:
        return None
    dims, real, field = found
    spectrum = SparseSpectrum(Layout.replicate(mesh, x.shape), x.dtype, x.device, dims, field, real)
    try:
        accepted = spectrum.write_block(index, value) and _is_zeros(x)
    except Exception as error:
        Consensus.start(mesh, f"modes that cannot be put into {spectrum}: {error}").wait()
        raise
    if accepted:
        return wrap_deferred(spectrum, x.dtype, x.device)
    # Ranks that accepted the block start their next comparison when its field is computed. That comparison is matched
    # with this one and differs from it, so all ranks raise.
    Consensus.start(mesh, f"modes of {value._layout} that {spectrum} did not accept").wait()
    return None


def mark_assembled(layout: Layout) -> Layout:
    """Return the layout of a dense tensor that blocks are written into, so that ranks compare its inverse transform.

    Ranks compare the modes of a `SparseSpectrum` when they invert it. A spectrum whose blocks carry no origin is dense
    and needs the same comparison: if one rank inverted replicated modes with other sizes, the ranks would hang.
    """
    dims = [[f.with_origins(f.origins, [ASSEMBLED]) for f in factors] for factors in layout.dims]
    return layout.with_dims(dims)


def _is_assembled(layout: Layout) -> bool:
    return layout.has_origins and any(ASSEMBLED in f.origins for factors in layout.dims for f in factors)


def _is_zeros(x: Tensor) -> bool:
    if runtime.active.tracer is not None:
        return runtime.active.tracer.is_zeros(x)
    return runtime.active.fake_tensors or not x.view(torch.int64).any()  # tensors without data count as zeros


def lazy_zeros_like(x: Any, dtype: torch.dtype) -> ShardTensor | None:
    """Return a sparse spectrum without modes, like a deferred one; None if `x` is no deferred forward transform."""
    spectrum = lazy_spectrum_of(x)
    if not isinstance(spectrum, LazySpectrum) or spectrum.is_inverse or not dtype.is_complex:
        return None
    zeros = SparseSpectrum(x._layout, dtype, x.device, spectrum.dims, spectrum.field._layout, spectrum.real)
    return wrap_deferred(zeros, dtype, x.device)


def read_block(x: ShardTensor, index: Any) -> ShardTensor | None:
    """Return a block of modes of a deferred spectrum; None if it must be materialized."""
    spectrum = x._deferred
    found = spectrum.read_block(index) if isinstance(spectrum, LazySpectrum) else None
    if found is not None and found.requires_grad:
        x._grad_incomplete = True
    return found


def write_block(x: ShardTensor, index: Any, value: Any) -> bool:
    """Write a block of modes into a deferred spectrum; return False if it must be materialized."""
    spectrum = x._deferred
    return isinstance(spectrum, SparseSpectrum) and spectrum.write_block(index, value)


def lazy_roll(x: Any, by: Mapping[int, int]) -> ShardTensor | None:
    """Return the deferred spectrum rolled by these shifts; None if `x` is not deferred, or blocks of it were read."""
    spectrum = lazy_spectrum_of(x)
    other = None if spectrum is None else spectrum.roll(by)
    return None if other is None else wrap_deferred(other, x._dtype, x._device)


def check_consensus(x: Any, call: str, has_sizes: bool) -> Consensus:
    """Start to compare a transform across ranks, if it has sizes or its field is computed without a message."""
    spectrum = lazy_spectrum_of(x)
    sparse = isinstance(spectrum, SparseSpectrum)
    if x.__class__ is not ShardTensor or not (has_sizes or sparse or _is_assembled(x._layout)):
        return Consensus.start(None, call)
    check = Consensus.start(x.device_mesh, f"{call} of {x._layout if spectrum is None else spectrum}")
    if isinstance(spectrum, SparseSpectrum):
        local = spectrum.is_replicated
    else:
        local = spectrum is not None or not x._layout.has_origins or x._layout.is_replicated
    if not local:  # blocks that are sharded by modes are gathered where they are inverted
        check.wait()
    return check


def defer_inverse(x: Any, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool) -> Any:
    """Return the field of a sparse spectrum, from its blocks; None for other `x`, or if the blocks do not suffice."""
    spectrum = lazy_spectrum_of(x)
    if spectrum is None and x.__class__ is ShardTensor and x._layout.has_origins and x._dtype in FLOATS[2:]:
        return _invert_padded(x, dims, sizes, norm, real)
    found = spectrum.inverse(dims, sizes, norm, real) if isinstance(spectrum, SparseSpectrum) else None
    return wrap_deferred(found, x._dtype, x._device) if isinstance(found, SparseSpectrum) else found


def _invert_padded(x: ShardTensor, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool):
    """Return the field of a block of modes that torch.fft pads to `sizes`, sharded as the field it was read from.

    Otherwise every rank would compute the full field, because the block itself is small and usually replicated. None if
    the block has other origins, or if the sizes of sharded dims are not given.
    """
    found = _padded_spectrum(x._layout, tuple(dims), real)
    if found is None:
        return None
    shape, field = found
    if any(n is None and field.is_sharded(d) for d, n in zip(dims, sizes, strict=True)):
        return None
    sparse = SparseSpectrum(Layout.replicate(field.mesh, shape), x._dtype, x._device, dims, field, real)
    sparse.blocks.append(([range(n) for n in x.shape], x))
    given = zip(dims, sizes, strict=True)
    return sparse.inverse(dims, [out_size(x.shape[d], n, real and d == dims[-1]) for d, n in given], norm, real)


@runtime.memo
def _padded_spectrum(block: Layout, dims: tuple[int, ...], real: bool) -> tuple[tuple[int, ...], Layout] | None:
    """Return the shape of the spectrum that a block was read from, and its field's layout; None if `dims` differ."""
    shape = list(block.shape)
    for d in dims:
        sizes = {o.size // 2 + 1 if o.kind == "half modes" else o.size for o in block.origins(d) if "modes" in o.kind}
        if len(sizes) != 1:
            return None
        shape[d] = sizes.pop()
    found = field_of_modes(block, shape)
    if found is None:
        return None
    mode_dims, half, field = found
    if set(mode_dims) != set(dims) or half != real or (real and mode_dims[-1] != dims[-1]):
        return None
    return (tuple(shape), field) if any(field.is_sharded(d) for d in dims) else None
