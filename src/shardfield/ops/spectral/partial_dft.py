"""Fourier sums over some rows of a dim and at some of its frequencies, on plain tensors of one rank.

A dim that lies whole is transformed by torch.fft; of one that does not, the rows that are here meet the columns of
the DFT matrix that are asked for. Frequencies are lists of integers, of any sign and in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat import autocast_on
from ...trace_state import concrete

Modes = tuple[int, ...]
FEW_MODES_RATIO = 16  # on a GPU, of so many modes that a dim has, one is kept at most: see `_prefers_matmul`


class DimModes(NamedTuple):
    """A transformed dim: its size, the frequencies of its modes, and which of its rows are here, if not all."""

    dim: int
    size: int
    modes: Modes
    rows: tuple[int, int] | None = None


def scale(norm: str | None, size: int, is_inverse: bool) -> float:
    """What torch.fft multiplies a sum over `size` values with."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise RuntimeError(f'Invalid normalization mode: "{norm}"')
    if norm == "ortho":
        return 1 / math.sqrt(size)
    return 1 / size if is_inverse is (norm != "forward") else 1.0


def _without_autocast(sums: Callable) -> Callable:
    """Like torch.fft, which autocast leaves in full precision: these are products, which it would not."""

    def run(x: Tensor, *args, **kwargs) -> Tensor:
        if not autocast_on():
            return sums(x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return sums(x, *args, **kwargs)

    run.__doc__ = sums.__doc__
    return run


@_without_autocast
def forward_dft(x: Tensor, along: Sequence[DimModes], norm: str | None) -> Tensor:
    """The modes of the rows that are here: sums over x exp(-2 pi i k n / size), a dim at a time."""
    for step in _forward_steps(tuple(along), norm, _step_key(x, along)):
        x = step(x)
    return x


@_without_autocast
def inverse_dft(y: Tensor, along: Sequence[DimModes], norm: str | None, real: bool) -> Tensor:
    """The rows that belong here of the field with these modes: sums over y exp(2 pi i k n / size).

    With `real`, the last dim has one half of a spectrum whose other half is its conjugate. As torch.fft.irfftn has it,
    the mode 0 and that of half the size have no other half: their imaginary parts do not count.
    """
    for step in _inverse_steps(tuple(along), norm, real, _step_key(y, along)):
        y = step(y)
    return y


Step = Callable[[Tensor], Tensor]


class StepKey(NamedTuple):
    """What the way to take sums depends on, apart from them."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    empty: bool  # before or after
    exact: bool  # products are of full precision, like torch.fft


def _step_key(x: Tensor, along: Sequence[DimModes]) -> StepKey:
    empty = not x.numel() or any(not a.modes or (a.rows is not None and a.rows[0] == a.rows[1]) for a in along)
    return StepKey(x.dtype, x.device, x.ndim, empty, torch.get_float32_matmul_precision() == "highest")


def _cache_steps(find: Callable[..., list[Step]]) -> Callable[..., list[Step]]:
    """Steps that will be used again, elsewhere: their tensors are real ones, whatever is going on now.

    They are where they are needed, too: to bring them there every time would have a device wait.
    """

    @lru_cache(maxsize=256)
    def steps(*key: Any) -> list[Step]:
        with concrete(), torch.inference_mode(False), torch.no_grad():
            return find(*key)

    return steps


@_cache_steps
def _forward_steps(along: tuple[DimModes, ...], norm: str | None, x: StepKey) -> list[Step]:
    first, *left = _by_shrinkage(along)
    whole = x._replace(dtype=x.dtype.to_complex())
    # of real values, half the work for the first dim
    return [
        (_forward_step if x.dtype.is_complex else _real_forward_step)(first, norm, x),
        *(_forward_step(a, norm, whole) for a in left),
    ]


@_cache_steps
def _inverse_steps(along: tuple[DimModes, ...], norm: str | None, real: bool, y: StepKey) -> list[Step]:
    left, half = _by_shrinkage(along)[::-1], along[-1]
    if not real:
        return [_inverse_step(a, norm, y) for a in left]
    last = half if _use_fft(half, y) and _is_leading_half(half) else left[-1]
    left.remove(last)
    steps = [_inverse_step(a, norm, y) for a in left]
    if last is not half:
        steps.insert(0, _double_step(half, y))
    return [*steps, *_real_inverse_steps(last, norm, y, last is half)]


def _use_fft(a: DimModes, x: StepKey) -> bool:
    """Whether torch.fft transforms this dim: it lies whole, it is not empty (products may be), and it keeps enough."""
    return a.rows is None and not x.empty and not (x.dtype.is_complex and _prefers_matmul(a, x))


def _prefers_matmul(a: DimModes, x: StepKey) -> bool:
    """Whether one product with the modes' columns takes less time than a transform of as many modes as the dim has.

    On an H200 it does for complex values, and from modes back to a field of real ones (39 us against 97 for 33 of 1440
    in 5,760 rows). The real transform of a field it does not beat.
    """
    return x.device.type == "cuda" and x.exact and FEW_MODES_RATIO * len(a.modes) <= a.size


def _is_leading_half(a: DimModes) -> bool:
    """Whether the modes are the first of a half spectrum, as torch.fft.irfft takes them."""
    return 0 < len(a.modes) <= a.size // 2 + 1 and a.modes == tuple(range(len(a.modes)))


def _by_shrinkage(along: Sequence[DimModes]) -> list[DimModes]:
    """Dims in the order in which their sums leave the least to the next; of those alike, the last in memory first."""

    def left(a: DimModes) -> float:
        first, last = a.rows or (0, a.size)
        return len(a.modes) / max(last - first, 1)

    return sorted(along, key=lambda a: (left(a), -a.dim))


def _forward_step(a: DimModes, norm: str | None, x: StepKey) -> Step:
    """Modes along one dim of complex values."""
    if not _use_fft(a, x):
        return _matmul_step(_dft_matrix(a, -1, scale(norm, a.size, False), x.dtype, x.device), a.dim, x.ndim)
    picked = _select_step(a.dim, tuple(k % a.size for k in a.modes), x.device)
    return lambda x: picked(torch.fft.fft(x, dim=a.dim, norm=norm))


def _inverse_step(a: DimModes, norm: str | None, y: StepKey) -> Step:
    """The sum over the modes of one dim."""
    if not _use_fft(a, y):
        return _matmul_step(_dft_matrix(a, 1, scale(norm, a.size, True), y.dtype, y.device), a.dim, y.ndim)
    index = _index_tensor(tuple(k % a.size for k in a.modes), y.device)
    return lambda y: torch.fft.ifft(_scatter_modes(y, a.dim, a.size, index), dim=a.dim, norm=norm)


def _real_forward_step(a: DimModes, norm: str | None, x: StepKey) -> Step:
    """Modes along one dim of real values: those of negative frequencies are conjugates."""
    if not _use_fft(a, x):
        matrix = _real_dft_matrix(a, -1, scale(norm, a.size, False), x.dtype, x.device)
        return lambda x: torch.view_as_complex(
            (x.movedim(a.dim, -1) @ matrix).unflatten(-1, (len(a.modes), 2))
        ).movedim(-1, a.dim)
    folded = [_signed_frequency(k, a.size) for k in a.modes]
    picked = _select_step(a.dim, tuple(map(abs, folded)), x.device)
    if min(folded, default=0) >= 0:
        return lambda x: picked(torch.fft.rfft(x, dim=a.dim, norm=norm))
    signs = _vector(tuple(-1.0 if k < 0 else 1.0 for k in folded), x.dtype, x.device).view(
        _broadcast_shape(x.ndim, a.dim)
    )

    def turned(x: Tensor) -> Tensor:
        found = picked(torch.fft.rfft(x, dim=a.dim, norm=norm))
        return torch.complex(found.real, found.imag * signs)

    return turned


def _real_inverse_steps(a: DimModes, norm: str | None, y: StepKey, half: bool) -> list[Step]:
    """The real part of the sum over the last dim left; with `half`, of half a spectrum and its conjugate."""
    if not _use_fft(a, y):
        matrix = _real_dft_matrix(a, 1, scale(norm, a.size, True), y.dtype.to_real(), y.device, half)

        def product(y: Tensor) -> Tensor:
            pairs = torch.view_as_real(y.movedim(a.dim, -1).resolve_conj()).flatten(-2)
            return (pairs @ matrix).movedim(-1, a.dim)

        return [product]
    if half and _is_leading_half(a):
        return [lambda y: torch.fft.irfft(y, a.size, a.dim, norm)]
    # the real part of a field has the modes (y[k] + conj(y[-k])) / 2
    folded = [_signed_frequency(k, a.size) for k in a.modes]
    up, down = ([i for i, k in enumerate(folded) if k >= 0], [i for i, k in enumerate(folded) if k <= 0])
    down += [i for i, k in enumerate(folded) if 2 * k == a.size]
    chosen = [
        (_select_step(a.dim, tuple(at), y.device), _index_tensor(tuple(abs(folded[i]) for i in at), y.device), turned)
        for at, turned in ((up, False), (down, True))
        if at
    ]

    def transform(y: Tensor) -> Tensor:
        shape = list(y.shape)
        shape[a.dim] = a.size // 2 + 1
        found = y.new_zeros(shape)
        for picked, index, turned in chosen:
            found = found.index_add(a.dim, index, picked(y.conj() if turned else y) * 0.5)
        return torch.fft.irfft(found, a.size, a.dim, norm)

    return [_double_step(a, y), transform] if half else [transform]


def _double_step(a: DimModes, y: StepKey) -> Step:
    """Modes that stand for their conjugates as well, where they have one."""
    factors = _conjugate_factors(a.size, a.modes, y.dtype, y.device).view(_broadcast_shape(y.ndim, a.dim))
    return lambda y: y * factors


def _signed_frequency(k: int, size: int) -> int:
    """The frequency that k is on a grid of `size`: from -(size - 1) // 2 to size // 2."""
    k %= size
    return k if 2 * k <= size else k - size


def _broadcast_shape(ndim: int, dim: int) -> list[int]:
    return [-1 if d == dim else 1 for d in range(ndim)]


def _matmul_step(matrix: Tensor, dim: int, ndim: int) -> Step:
    if dim == ndim - 2:  # as it lies
        turned = matrix.mT
        return lambda x: turned @ x
    return lambda x: (x.movedim(dim, -1) @ matrix).movedim(-1, dim)


def _select_step(dim: int, index: Modes, device: torch.device) -> Step:
    """Some indices of a dim: slices side by side where they are runs."""
    marks = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1] + 1), len(index)]
    if len(marks) > 4:
        chosen = _index_tensor(index, device)
        return lambda x: x.index_select(dim, chosen)
    runs = [(index[i] if i < j else 0, j - i) for i, j in zip(marks, marks[1:], strict=False)]
    if len(runs) == 1:
        return lambda x: x.narrow(dim, *runs[0])
    return lambda x: torch.cat([x.narrow(dim, *run) for run in runs], dim)


def _scatter_modes(y: Tensor, dim: int, size: int, index: Tensor) -> Tensor:
    """Modes at their places among zeros; those at one place are summed."""
    shape = list(y.shape)
    shape[dim] = size
    return y.new_zeros(shape).index_add(dim, index, y)


def _dft_matrix(a: DimModes, sign: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(sign 2 pi i k n / size), rows by modes for sums over rows (sign -1), modes by rows for sums over modes."""
    rows = torch.arange(*(a.rows or (0, a.size)), device=device)
    modes = _index_tensor(tuple(k % a.size for k in a.modes), device)
    product = torch.outer(rows, modes) if sign < 0 else torch.outer(modes, rows)
    # taken modulo the size as integers: large products would cost digits
    angle = (product % a.size).to(torch.float64) * (sign * 2 * math.pi / a.size)
    return torch.polar(torch.full_like(angle, factor), angle).to(dtype)


def _real_dft_matrix(
    a: DimModes, sign: int, factor: float, dtype: torch.dtype, device: torch.device, half: bool = False
) -> Tensor:
    """The same in real numbers, for values that are real before (sign -1) or after: cosine and sine side by side.

    With `half`, each mode stands for its conjugate as well, where it has one.
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
