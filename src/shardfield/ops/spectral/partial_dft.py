"""Local DFT of the rows of one rank at chosen frequencies, on plain tensors. No communication.

An unsharded dim is transformed by torch.fft. Of a sharded dim each rank multiplies its rows with the matching rows of
the DFT matrix, restricted to the chosen modes. Frequencies are lists of integers, of any sign and in any order. A
transform is a list of steps, one per dim, cached by everything they depend on. It is one node of the graph, whose
backward runs the steps of the adjoint, another transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import runtime
from ..._compat import function_apply, transforms_active
from ..._compat.autocast import autocast_on, concatenate
from ..._compat.engine import DirectBackward
from ...comm.adjoints import detach_view
from ...trace_state import concrete

Modes = tuple[int, ...]
FEW_MODES_RATIO = 16  # on a GPU a product is faster if at most 1 / 16 of the modes is kept: see `_prefers_matmul`


class DimModes(NamedTuple):
    """A transformed dim: its global size, the frequencies of its modes, and this rank's rows, None for all rows."""

    dim: int
    size: int
    modes: Modes
    rows: tuple[int, int] | None = None


def scale(norm: str | None, size: int, is_inverse: bool) -> float:
    """Return the factor that torch.fft applies to a sum over `size` values."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise RuntimeError(f'Invalid normalization mode: "{norm}"')
    if norm == "ortho":
        return 1 / math.sqrt(size)
    return 1 / size if is_inverse is (norm != "forward") else 1.0


def opposite_norm(norm: str | None) -> str | None:
    """Return the norm that gives the opposite transform the scale that `norm` gives this one."""
    return {None: "forward", "backward": "forward", "forward": "backward"}.get(norm, norm)


def forward_dft(x: Tensor, along: Sequence[DimModes], norm: str | None) -> Tensor:
    """Return the partial sums of the modes over this rank's rows: sums of x exp(-2 pi i k n / size), dim by dim."""
    return Transform(False, tuple(along), norm, "complex" if x.dtype.is_complex else "real").apply(x)


def inverse_dft(y: Tensor, along: Sequence[DimModes], norm: str | None, real: bool) -> Tensor:
    """Return this rank's rows of the field with these modes: sums of y exp(2 pi i k n / size), dim by dim.

    With `real`, the last dim holds half a spectrum, and the other half is its conjugate. As in torch.fft.irfftn, mode 0
    and the mode of half the size have no conjugate, and their imaginary parts are ignored.
    """
    return Transform(True, tuple(along), norm, "half" if real else "complex").apply(y)


class Transform(NamedTuple):
    """A linear map from this rank's rows to chosen modes, or `inverse`, and its adjoint.

    rows: "complex"; "real"; or "half", real rows of which the modes along the last dim are half a spectrum, so that
        modes with a conjugate in the other half count twice. An inverse to "real" rows is the real part of the rows.
    """

    inverse: bool
    along: tuple[DimModes, ...]
    norm: str | None
    rows: str

    def apply(self, x: Tensor) -> Tensor:
        """Return the transform of `x`. Differentiable."""
        if not (x.requires_grad and torch.is_grad_enabled()) or runtime.active.tracer is not None:
            return self.run(x)  # torch differentiates the steps, also in a traced program
        return self.run(x) if transforms_active() else _TransformFunction.apply(x, self)

    def run(self, x: Tensor) -> Tensor:
        """Apply the steps one after the other."""
        if autocast_on():  # torch.fft runs in full precision, but autocast would lower the matrix products
            with torch.autocast(x.device.type, enabled=False):
                return self._run(x)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        exact = torch.get_float32_matmul_precision() == "highest"
        key = StepKey(x.dtype, x.device, x.ndim, not x.numel(), exact)
        for step in _steps(self, key):
            x = step(x)
        return x

    @property
    def adjoint(self) -> Transform:
        """The transform of gradients: the opposite one, with the same scale."""
        return Transform(not self.inverse, self.along, opposite_norm(self.norm), self.rows)


class _TransformFunction(torch.autograd.Function, metaclass=DirectBackward):
    """Forward: a transform. Adjoint: the transform of gradients. No message."""

    apply = function_apply

    @staticmethod
    def forward(ctx, x, transform):
        ctx.transform = transform
        return detach_view(transform.run(x))

    @staticmethod
    def backward(ctx, grad):
        return ctx.transform.adjoint.apply(grad), None


Step = Callable[[Tensor], Tensor]


class StepKey(NamedTuple):
    """Properties of the operand that the choice of steps depends on."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    empty: bool  # the operand or the result has no elements
    exact: bool  # matrix products have full precision, like torch.fft


def _steps(transform: Transform, x: StepKey) -> list[Step]:
    """Return the cached steps of a transform of `x`.

    Later calls outside this trace, inference or grad mode reuse them, so their tensors are built as plain tensors. They
    are built on the device: a copy from the host on every call would block it.
    """
    table = runtime.active.dft_matrices
    found = table[transform, x]
    if found is None:
        empty = x.empty or any(not a.modes or (a.rows is not None and a.rows[0] == a.rows[1]) for a in transform.along)
        build = _inverse_steps if transform.inverse else _forward_steps
        with concrete(), torch.inference_mode(False), torch.no_grad():
            found = table[transform, x] = build(transform, x._replace(empty=empty))
    return found


def _forward_steps(transform: Transform, x: StepKey) -> list[Step]:
    _, along, norm, rows = transform
    first, *others = _by_shrinkage(along)
    complex_key = x._replace(dtype=x.dtype.to_complex())
    # A real transform of the first dim is half the work.
    return [
        (_forward_step if x.dtype.is_complex else _real_forward_step)(first, norm, x),
        *(_forward_step(a, norm, complex_key) for a in others),
        *([_double_step(along[-1], complex_key)] if rows == "half" else []),
    ]


def _inverse_steps(transform: Transform, y: StepKey) -> list[Step]:
    _, along, norm, rows = transform
    others, half = _by_shrinkage(along)[::-1], along[-1]
    if rows == "complex":
        return [_inverse_step(a, norm, y) for a in others]
    last = half if _use_fft(half, y) and _is_leading_half(half) else others[-1]
    others.remove(last)
    steps = [_inverse_step(a, norm, y) for a in others]
    if rows == "half" and last is not half:
        steps.insert(0, _double_step(half, y))
    return [*steps, *_real_inverse_steps(last, norm, y, rows == "half" and last is half)]


def _use_fft(a: DimModes, x: StepKey) -> bool:
    """Return whether torch.fft transforms this dim: it is unsharded, not empty, and keeps enough modes."""
    return a.rows is None and not x.empty and not (x.dtype.is_complex and _prefers_matmul(a, x))


def _prefers_matmul(a: DimModes, x: StepKey) -> bool:
    """Return whether a product with the DFT matrix of the kept modes is faster than the full FFT.

    On an H200 it is for complex values, and for the inverse to a real field (39 us against 97 us for 33 of 1440 modes
    in 5,760 rows). It is not faster than the forward FFT of a real field.
    """
    return x.device.type == "cuda" and x.exact and FEW_MODES_RATIO * len(a.modes) <= a.size


def _is_leading_half(a: DimModes) -> bool:
    """Return whether the modes are 0, 1, 2, ... of a half spectrum, the order that torch.fft.irfft takes."""
    return 0 < len(a.modes) <= a.size // 2 + 1 and a.modes == tuple(range(len(a.modes)))


def _by_shrinkage(along: Sequence[DimModes]) -> list[DimModes]:
    """Sort dims by the ratio of modes to rows, so that early steps shrink the data most; ties start at the last dim."""

    def ratio(a: DimModes) -> float:
        first, last = a.rows or (0, a.size)
        return len(a.modes) / max(last - first, 1)

    return sorted(along, key=lambda a: (ratio(a), -a.dim))


def _forward_step(a: DimModes, norm: str | None, x: StepKey) -> Step:
    """Return the step from complex rows to modes along one dim."""
    if not _use_fft(a, x):
        return _matmul_step(_dft_matrix(a, -1, scale(norm, a.size, False), x.dtype, x.device), a.dim, x.ndim)
    select = _select_step(a.dim, tuple(k % a.size for k in a.modes), x.device)
    return lambda x: select(torch.fft.fft(x, dim=a.dim, norm=norm))


def _inverse_step(a: DimModes, norm: str | None, y: StepKey) -> Step:
    """Return the step from modes to complex rows along one dim."""
    if not _use_fft(a, y):
        return _matmul_step(_dft_matrix(a, 1, scale(norm, a.size, True), y.dtype, y.device), a.dim, y.ndim)
    index = _index_tensor(tuple(k % a.size for k in a.modes), y.device)
    return lambda y: torch.fft.ifft(_scatter_modes(y, a.dim, a.size, index), dim=a.dim, norm=norm)


def _real_forward_step(a: DimModes, norm: str | None, x: StepKey) -> Step:
    """Return the step from real rows to modes along one dim; modes of negative frequencies are conjugates."""
    if not _use_fft(a, x):
        matrix = _real_dft_matrix(a, -1, scale(norm, a.size, False), x.dtype, x.device)
        return lambda x: torch.view_as_complex(
            (x.movedim(a.dim, -1) @ matrix).unflatten(-1, (len(a.modes), 2))
        ).movedim(-1, a.dim)
    frequencies = [_signed_frequency(k, a.size) for k in a.modes]
    select = _select_step(a.dim, tuple(map(abs, frequencies)), x.device)
    if min(frequencies, default=0) >= 0:
        return lambda x: select(torch.fft.rfft(x, dim=a.dim, norm=norm))
    signs = _vector(tuple(-1.0 if k < 0 else 1.0 for k in frequencies), x.dtype, x.device).view(
        _broadcast_shape(x.ndim, a.dim)
    )

    def transform(x: Tensor) -> Tensor:
        modes = select(torch.fft.rfft(x, dim=a.dim, norm=norm))
        return torch.complex(modes.real, modes.imag * signs)

    return transform


def _real_inverse_steps(a: DimModes, norm: str | None, y: StepKey, half: bool) -> list[Step]:
    """Return the steps from modes to real rows along one dim; `half`: the modes are half a spectrum."""
    if not _use_fft(a, y):
        matrix = _real_dft_matrix(a, 1, scale(norm, a.size, True), y.dtype.to_real(), y.device, half)

        def product(y: Tensor) -> Tensor:
            pairs = torch.view_as_real(y.movedim(a.dim, -1).resolve_conj()).flatten(-2)
            return (pairs @ matrix).movedim(-1, a.dim)

        return [product]
    if _is_leading_half(a):
        invert: Step = lambda y: torch.fft.irfft(y, a.size, a.dim, norm)  # noqa: E731
        return [invert] if half else [_double_step(a, y, -1), invert]
    # The real part of a field has the modes (y[k] + conj(y[-k])) / 2.
    frequencies = [_signed_frequency(k, a.size) for k in a.modes]
    positive = [i for i, k in enumerate(frequencies) if k >= 0]
    negative = [i for i, k in enumerate(frequencies) if k <= 0]
    negative += [i for i, k in enumerate(frequencies) if 2 * k == a.size]
    parts = [
        (
            _select_step(a.dim, tuple(kept), y.device),
            _index_tensor(tuple(abs(frequencies[i]) for i in kept), y.device),
            conjugate,
        )
        for kept, conjugate in ((positive, False), (negative, True))
        if kept
    ]

    def transform(y: Tensor) -> Tensor:
        shape = list(y.shape)
        shape[a.dim] = a.size // 2 + 1
        spectrum = y.new_zeros(shape)
        for select, index, conjugate in parts:
            spectrum = spectrum.index_add(a.dim, index, select(y.conj() if conjugate else y) * 0.5)
        return torch.fft.irfft(spectrum, a.size, a.dim, norm)

    return [_double_step(a, y), transform] if half else [transform]


def _double_step(a: DimModes, y: StepKey, power: int = 1) -> Step:
    """Return the step that doubles the modes of half a spectrum that have a conjugate in the other half; -1: halves."""
    factors = _conjugate_factors(a.size, a.modes, y.dtype, y.device).view(_broadcast_shape(y.ndim, a.dim)) ** power
    factors = factors.to(y.dtype)  # torch would convert them in every call
    return lambda y: y * factors


def _signed_frequency(k: int, size: int) -> int:
    """Return the frequency between -(size - 1) // 2 and size // 2 that k aliases to on a grid of `size`."""
    k %= size
    return k if 2 * k <= size else k - size


def _broadcast_shape(ndim: int, dim: int) -> list[int]:
    return [-1 if d == dim else 1 for d in range(ndim)]


def _matmul_step(matrix: Tensor, dim: int, ndim: int) -> Step:
    if dim == ndim - 2:  # no transpose of the operand is needed
        transposed = matrix.mT
        return lambda x: transposed @ x
    return lambda x: (x.movedim(dim, -1) @ matrix).movedim(-1, dim)


def _select_step(dim: int, index: Modes, device: torch.device) -> Step:
    """Return the step that selects indices of a dim: by slices if they are at most three runs, else by index_select."""
    bounds = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1] + 1), len(index)]
    if len(bounds) > 4:
        index_tensor = _index_tensor(index, device)
        return lambda x: x.index_select(dim, index_tensor)
    runs = [(index[i] if i < j else 0, j - i) for i, j in zip(bounds, bounds[1:], strict=False)]
    if len(runs) == 1:
        return lambda x: x.narrow(dim, *runs[0])
    return lambda x: concatenate([x.narrow(dim, *run) for run in runs], dim)


def _scatter_modes(y: Tensor, dim: int, size: int, index: Tensor) -> Tensor:
    """Scatter modes into a full spectrum of zeros; modes with the same index are summed."""
    shape = list(y.shape)
    shape[dim] = size
    return y.new_zeros(shape).index_add(dim, index, y)


def _dft_matrix(a: DimModes, sign: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return exp(sign 2 pi i k n / size): (rows, modes) for sign -1, the forward transform, else (modes, rows)."""
    rows = torch.arange(*(a.rows or (0, a.size)), device=device)
    modes = _index_tensor(tuple(k % a.size for k in a.modes), device)
    product = torch.outer(rows, modes) if sign < 0 else torch.outer(modes, rows)
    # Integers modulo the size: the angle of a large product would lose digits.
    angle = (product % a.size).to(torch.float64) * (sign * 2 * math.pi / a.size)
    return torch.polar(torch.full_like(angle, factor), angle).to(dtype)


def _real_dft_matrix(
    a: DimModes, sign: int, factor: float, dtype: torch.dtype, device: torch.device, half: bool = False
) -> Tensor:
    """Return the DFT matrix in real numbers, cosine and sine interleaved, for a real operand (sign -1) or result.

    With `half`, modes that have a conjugate in the other half of the spectrum are doubled.
    """
    matrix = _dft_matrix(a, sign, factor, dtype.to_complex(), device)
    if sign < 0:
        return torch.view_as_real(matrix).flatten(1).contiguous()
    if half:
        matrix = matrix * _conjugate_factors(a.size, a.modes, matrix.dtype, device)[:, None]
    return torch.stack((matrix.real, -matrix.imag), 1).flatten(0, 1)


def _conjugate_factors(size: int, modes: Modes, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _vector(tuple(1.0 if 2 * k % size == 0 else 2.0 for k in modes), dtype.to_real(), device)


def _index_tensor(values: Modes, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
