"""Fourier sums over some rows of a dim and at some of its frequencies, on plain tensors of one rank.

A dim that lies whole is transformed by torch.fft; of one that does not, the rows that are here meet the columns of
the DFT matrix that are asked for. Frequencies are lists of integers, of any sign and in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._compat import autocast_on
from ..tracing import concrete

Modes = tuple[int, ...]
FEW = 16  # on a GPU, of so many modes that a dim has, one is kept at most: see `_few`


class Along(NamedTuple):
    """A transformed dim: its size, the frequencies of its modes, and which of its rows are here, if not all."""

    dim: int
    size: int
    modes: Modes
    rows: tuple[int, int] | None = None


def scale(norm: str | None, size: int, back: bool) -> float:
    """What torch.fft multiplies a sum over `size` values with."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise RuntimeError(f'Invalid normalization mode: "{norm}"')
    if norm == "ortho":
        return 1 / math.sqrt(size)
    return 1 / size if back is (norm != "forward") else 1.0


def _exactly(sums: Callable) -> Callable:
    """Like torch.fft, which autocast leaves in full precision: these are products, which it would not."""

    def run(x: Tensor, *args, **kwargs) -> Tensor:
        if not autocast_on():
            return sums(x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return sums(x, *args, **kwargs)

    run.__doc__ = sums.__doc__
    return run


@_exactly
def analyse(x: Tensor, along: Sequence[Along], norm: str | None) -> Tensor:
    """The modes of the rows that are here: sums over x exp(-2 pi i k n / size), a dim at a time."""
    left = _shrinking(x, along)
    if not x.is_complex():
        x = _real_modes(x, left.pop(0), norm)  # half the work for the first dim
    for a in left:
        if _fast(x, a):
            x = _picked(torch.fft.fft(x, dim=a.dim, norm=norm), a.dim, tuple(k % a.size for k in a.modes))
        else:
            x = _times(x, a.dim, _matrix(a, -1, scale(norm, a.size, False), x.dtype, x.device))
    return x


@_exactly
def evaluate(y: Tensor, along: Sequence[Along], norm: str | None, real: bool) -> Tensor:
    """The rows that belong here of the field with these modes: sums over y exp(2 pi i k n / size).

    With `real`, the last dim has one half of a spectrum whose other half is its conjugate. As torch.fft.irfftn has it,
    the mode 0 and that of half the size have no other half: their imaginary parts do not count.
    """
    left, half = _shrinking(y, along)[::-1], along[-1]
    last = half if real and _fast(y, half) and _first_half(half) else left[-1]
    if real:
        left.remove(last)
        if last is not half:
            y = y * _halves(half.size, half.modes, y.dtype, y.device).view(_column(y, half.dim))
    for a in left:
        if _fast(y, a):
            y = torch.fft.ifft(_placed(y, a.dim, a.size, [k % a.size for k in a.modes]), dim=a.dim, norm=norm)
        else:
            y = _times(y, a.dim, _matrix(a, 1, scale(norm, a.size, True), y.dtype, y.device))
    return _real_field(y, last, norm, last is half) if real else y


def _fast(x: Tensor, a: Along) -> bool:
    """Whether torch.fft transforms this dim: it lies whole, it is not empty (products may be), and it keeps enough."""
    return a.rows is None and x.numel() > 0 and not (x.is_complex() and _few(a, x.device))


def _few(a: Along, device: torch.device) -> bool:
    """Whether one product with the modes' columns takes less time than a transform of as many modes as the dim has.

    On an H200 it does for complex values, and from modes back to a field of real ones (39 us against 97 for 33 of 1440
    in 5,760 rows). The real transform of a field it does not beat. At full precision only: torch.fft has no other.
    """
    if device.type != "cuda" or FEW * len(a.modes) > a.size:
        return False
    return torch.get_float32_matmul_precision() == "highest"


def _first_half(a: Along) -> bool:
    """Whether the modes are the first of a half spectrum, as torch.fft.irfft takes them."""
    return 0 < len(a.modes) <= a.size // 2 + 1 and a.modes == tuple(range(len(a.modes)))


def _shrinking(x: Tensor, along: Sequence[Along]) -> list[Along]:
    """Dims in the order in which their sums leave the least to the next; of those alike, the last in memory first."""

    def left(a: Along) -> float:
        first, last = a.rows or (0, a.size)
        return len(a.modes) / max(last - first, 1)

    return sorted(along, key=lambda a: (left(a), -a.dim))


def _real_modes(x: Tensor, a: Along, norm: str | None) -> Tensor:
    """Modes along one dim of real values: those of negative frequencies are conjugates."""
    if _fast(x, a):
        folded = [_folded(k, a.size) for k in a.modes]
        found = _picked(torch.fft.rfft(x, dim=a.dim, norm=norm), a.dim, tuple(map(abs, folded)))
        if min(folded, default=0) >= 0:
            return found
        signs = _vector(tuple(-1.0 if k < 0 else 1.0 for k in folded), x.dtype, x.device).view(_column(x, a.dim))
        return torch.complex(found.real, found.imag * signs)
    both = x.movedim(a.dim, -1) @ _pairs(a, -1, scale(norm, a.size, False), x.dtype, x.device)
    return torch.view_as_complex(both.unflatten(-1, (len(a.modes), 2))).movedim(-1, a.dim)


def _real_field(y: Tensor, a: Along, norm: str | None, half: bool) -> Tensor:
    """The real part of the sum over the last dim left; with `half`, of half a spectrum and its conjugate."""
    if not _fast(y, a):
        pairs = torch.view_as_real(y.movedim(a.dim, -1).resolve_conj()).flatten(-2)
        return (pairs @ _pairs(a, 1, scale(norm, a.size, True), y.dtype.to_real(), y.device, half)).movedim(-1, a.dim)
    if half and _first_half(a):
        return torch.fft.irfft(y, a.size, a.dim, norm)
    if half:
        y = y * _halves(a.size, a.modes, y.dtype, y.device).view(_column(y, a.dim))
    # the real part of a field has the modes (y[k] + conj(y[-k])) / 2
    folded = [_folded(k, a.size) for k in a.modes]
    up, down = ([i for i, k in enumerate(folded) if k >= 0], [i for i, k in enumerate(folded) if k <= 0])
    down += [i for i, k in enumerate(folded) if 2 * k == a.size]
    shape = list(y.shape)
    shape[a.dim] = a.size // 2 + 1
    found = y.new_zeros(shape)
    for at, part in ((up, y), (down, y.conj())):
        if at:
            chosen = _picked(part, a.dim, tuple(at)) * 0.5
            found = found.index_add(a.dim, _index(tuple(abs(folded[i]) for i in at), y.device), chosen)
    return torch.fft.irfft(found, a.size, a.dim, norm)


def _folded(k: int, size: int) -> int:
    """The frequency that k is on a grid of `size`: from -(size - 1) // 2 to size // 2."""
    k %= size
    return k if 2 * k <= size else k - size


def _column(x: Tensor, dim: int) -> list[int]:
    return [-1 if d == dim else 1 for d in range(x.ndim)]


def _times(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    if dim == x.ndim - 2:  # as it lies
        return matrix.mT @ x
    return (x.movedim(dim, -1) @ matrix).movedim(-1, dim)


def _picked(x: Tensor, dim: int, index: Modes) -> Tensor:
    """Some indices of a dim: slices side by side where they are runs."""
    marks = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1] + 1), len(index)]
    if len(marks) > 4:
        return x.index_select(dim, _index(index, x.device))
    runs = [x.narrow(dim, index[i] if i < j else 0, j - i) for i, j in zip(marks, marks[1:], strict=False)]
    return torch.cat(runs, dim) if len(runs) > 1 else runs[0]


def _placed(y: Tensor, dim: int, size: int, index: Sequence[int]) -> Tensor:
    """Modes at their places among zeros; those at one place are summed."""
    shape = list(y.shape)
    shape[dim] = size
    return y.new_zeros(shape).index_add(dim, _index(tuple(index), y.device), y)


@lru_cache(maxsize=256)
def _matrix(a: Along, sign: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(sign 2 pi i k n / size), rows by modes for sums over rows (sign -1), modes by rows for sums over modes."""
    first, last = a.rows or (0, a.size)
    with concrete(), torch.inference_mode(False), torch.no_grad():  # it will be used again, elsewhere
        rows = torch.arange(first, last, device=device)
        modes = torch.tensor([k % a.size for k in a.modes], dtype=torch.int64, device=device)
        product = torch.outer(rows, modes) if sign < 0 else torch.outer(modes, rows)
        # taken modulo the size as integers: large products would cost digits
        angle = (product % a.size).to(torch.float64) * (sign * 2 * math.pi / a.size)
        return torch.polar(torch.full_like(angle, factor), angle).to(dtype)


@lru_cache(maxsize=256)
def _pairs(a: Along, sign: int, factor: float, dtype: torch.dtype, device: torch.device, half: bool = False) -> Tensor:
    """The same in real numbers, for values that are real before (sign -1) or after: cosine and sine side by side.

    With `half`, each mode stands for its conjugate as well, where it has one.
    """
    with concrete(), torch.inference_mode(False), torch.no_grad():
        matrix = _matrix(a, sign, factor, dtype.to_complex(), device)
        if sign < 0:
            return torch.view_as_real(matrix).flatten(1).contiguous()
        if half:
            matrix = matrix * _halves(a.size, a.modes, matrix.dtype, device)[:, None]
        return torch.stack((matrix.real, -matrix.imag), 1).flatten(0, 1)


@lru_cache(maxsize=256)
def _halves(size: int, modes: Modes, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _vector(tuple(1.0 if 2 * k % size == 0 else 2.0 for k in modes), dtype.to_real(), device)


@lru_cache(maxsize=256)
def _index(values: Modes, device: torch.device) -> Tensor:
    """Integers where they are used: brought there once, since every time would have the device wait."""
    with concrete(), torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def _vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with concrete(), torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
