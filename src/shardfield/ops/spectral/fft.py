"""Fourier transforms: a dim that lies whole is transformed where it is; a cut moves to a free dim and stays there.

A transform over several dims is done dim by dim, those that lie whole first, so that a cut moves as late as can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import HANDLERS, composed, rule
from ...layout import DimSharding
from ...tensor import ShardTensor
from .._common.blockwise import move_shard_off
from . import lazy_spectrum

fft = torch.fft

# transforms that wait for what is wanted of them, and those that end such a wait
LAZY_FORWARD = (fft.fft, fft.rfft, fft.ifft)
LAZY_INVERSE = (fft.ifft, fft.irfft)
FROM_HALF_SPECTRUM = (
    fft.irfft,
    fft.hfft,
)  # of half a spectrum: the length asked for along the last dim is that of the result
# the length of the result along the transformed dim, from the length asked for and the operand's
OUT_LENGTH = {
    "fft_fft": lambda n, size: size if n is None else n,
    "fft_ifft": lambda n, size: size if n is None else n,
    "fft_rfft": lambda n, size: (size if n is None else n) // 2 + 1,
    "fft_ihfft": lambda n, size: (size if n is None else n) // 2 + 1,
    "fft_irfft": lambda n, size: 2 * (size - 1) if n is None else n,
    "fft_hfft": lambda n, size: 2 * (size - 1) if n is None else n,
}


@rule(fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft)
def transform(input: Operand, n=None, dim=-1, norm=None, *, fn):
    """One dim, whole on every rank."""
    if not -input.ndim <= dim < input.ndim or 0 in input.shape:
        return None  # the fallback raises torch's error
    if n is not None and n < 1:
        raise RuntimeError(f"Invalid number of data points ({n}) specified")
    dim %= input.ndim
    length = OUT_LENGTH[fn.__name__](n, input.shape[dim])
    source = (
        move_shard_off(input.layout, dim, allow_empty=True)
        if input.layout.is_sharded(dim)
        else input.layout.unshard([dim])
    )
    if source is None or length < 1:
        return None
    return Plan(
        local=lambda input: _apply(fn, input, n, dim, norm, length),
        operands={"input": source},
        layout=source.with_dim(dim, DimSharding(length)),
    )


def _apply(fn, input, n, dim, norm, length):
    if input.numel():
        return fn(input, n, dim, norm)
    shape = list(input.shape)
    shape[dim] = length
    return _empty_result(fn, input, shape)


def _empty_result(fn, input, shape):
    """torch has no transform of nothing: the empty piece of a batch, of the dtype that the others get."""
    dtype = fn(torch.ones(2, dtype=input.dtype, device=input.device), 2).dtype
    nothing = input.sum() * 0
    return (nothing.real if input.is_complex() and not dtype.is_complex else nothing).to(dtype).expand(shape)


EAGER = {one: HANDLERS[one] for one in (fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft)}


def _is_local(input, dims) -> bool:
    """Whether a transform of a ShardTensor is one of the pieces that ranks have, without a message."""
    if input.__class__ is not ShardTensor or "_deferred" in input.__dict__:
        return False
    layout = input._layout
    return layout.is_simple and not layout.partial and not any(map(layout.is_sharded, dims))


def _eager_fft(one, input, n, dim, norm):
    """A transform along one dim that does not wait."""
    return EAGER[one](one, (), (input, n, dim, norm), {})


def _try_lazy(input, dims, sizes, norm, last, compute):
    """A transform that waits, or ends a wait; None where it is to be done now."""
    found = lazy_spectrum.defer_inverse(input, dims, sizes, norm, last is fft.irfft) if last in LAZY_INVERSE else None
    if found is None and last in LAZY_FORWARD:
        found = lazy_spectrum.defer_forward(input, dims, sizes, norm, last is fft.rfft, last is fft.ifft, compute)
    return found


def _fft_handler(one):
    """A transform along one dim, as those over several: it waits if the dim is cut."""

    def run(func, types, args, kwargs):
        with comparing(*args, **kwargs) as check:
            found = None if "out" in kwargs else known(*args, **kwargs)
            if found is None:
                if moves(*args, **kwargs):
                    check.wait()
                found = EAGER[one](func, types, args, kwargs)
        return found

    def comparing(input, n=None, dim=-1, norm=None, out=None):
        return lazy_spectrum.check_consensus(input, f"{one.__name__}(n={n}, dim={dim}, norm={norm})", n is not None)

    def moves(input, n=None, dim=-1, norm=None, out=None):
        return out is not None or not -input.ndim <= dim < input.ndim or not _is_local(input, [dim])

    def known(input, n=None, dim=-1, norm=None):
        if input.__class__ is not ShardTensor or not -input.ndim <= dim < input.ndim:
            return None
        dims = [dim % input.ndim]
        return _try_lazy(input, dims, [n], norm, one, lambda x: _eager_fft(one, x, n, dims[0], norm))

    return run


for _one in EAGER:
    HANDLERS[_one] = _fft_handler(_one)


def _dims(input, s, dim) -> tuple[list[int], list[int | None]]:
    """The dims of a transform over several, and the length asked for along each, as torch reads them."""
    if dim is None:
        count = len(s) if s is not None else input.ndim
        dim = range(input.ndim - count, input.ndim)
    dims = [dim] if isinstance(dim, int) else list(dim)
    wrong = [d for d in dims if not -input.ndim <= d < input.ndim]
    if wrong:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-input.ndim}, {input.ndim - 1}], but got {wrong[0]})"
        )
    dims = [d % input.ndim for d in dims]
    if len(set(dims)) < len(dims):
        raise RuntimeError("FFT dims must be unique")
    if s is not None and len(s) != len(dims):
        raise RuntimeError("When given, dim and shape arguments must have the same length")
    return dims, [None] * len(dims) if s is None else [None if n == -1 else n for n in s]


def _fft_each_dim(one, input, dims: Sequence[int], sizes: Sequence[int | None], norm):
    """A complex transform along each dim; those that lie whole first."""
    cut = getattr(input, "_layout", None)
    order = sorted(range(len(dims)), key=lambda i: (cut is not None and cut.is_sharded(dims[i]), -i))
    for i in order:
        input = _eager_fft(one, input, sizes[i], dims[i], norm)
    return input


def _fft_nd(fn, one, last, first: bool):
    """A transform over several dims: `last` along the last of them, before or after `one` along the others."""

    def together(input: Operand, dims, sizes, norm):
        """All dims lie whole: torch's own call, on the piece of each rank."""
        layout = input.layout.unshard(dims)
        for d, n in zip(dims, sizes, strict=True):
            layout = layout.with_dim(
                d, DimSharding(OUT_LENGTH[(last if d == dims[-1] else one).__name__](n, input.shape[d]))
            )
        asked = [
            layout.shape[d] if last in FROM_HALF_SPECTRUM else n or input.shape[d]
            for d, n in zip(dims, sizes, strict=True)
        ]

        def local(input):
            return fn(input, asked, dims, norm) if input.numel() else _empty_result(last, input, layout.local_shape)

        return Plan(local=local, operands={"input": input.layout.unshard(dims)}, layout=layout)

    run_together = make_handler(together, partial=False, merged=False)

    def nd(input, s=None, dim=None, norm=None):
        call = f"{fn.__name__}(s={s}, dim={dim}, norm={norm})"
        with lazy_spectrum.check_consensus(input, call, s is not None) as check:
            dims, sizes = _dims(input, s, dim)
            found = _try_lazy(input, dims, sizes, norm, last, lambda x: now(x, dims, sizes, norm))
            if found is None:
                if not _is_local(input, dims):
                    check.wait()
                found = now(input, dims, sizes, norm)
        return found

    def now(input, dims, sizes, norm):
        whole = getattr(input, "_layout", None)
        if whole is not None and len(dims) > 1 and whole.is_simple and not any(map(whole.is_sharded, dims)):
            if 0 not in input.shape and all(n is None or n > 0 for n in sizes):
                return run_together(fn, (), (input, tuple(dims), tuple(sizes), norm), {})
        if last is one:
            return _fft_each_dim(one, input, dims, sizes, norm)
        if first:
            return _fft_each_dim(one, _eager_fft(last, input, sizes[-1], dims[-1], norm), dims[:-1], sizes[:-1], norm)
        return _eager_fft(last, _fft_each_dim(one, input, dims[:-1], sizes[:-1], norm), sizes[-1], dims[-1], norm)

    def two(input, s=None, dim=(-2, -1), norm=None):
        return nd(input, s, dim, norm)

    return nd, two


for _name, _one, _last, _first in [
    ("fft", fft.fft, fft.fft, True),
    ("ifft", fft.ifft, fft.ifft, True),
    ("rfft", fft.fft, fft.rfft, True),
    ("irfft", fft.ifft, fft.irfft, False),
    ("hfft", fft.fft, fft.hfft, False),
    ("ihfft", fft.ifft, fft.ihfft, True),
]:
    _nd, _two = _fft_nd(getattr(fft, _name + "n"), _one, _last, _first)
    composed(getattr(fft, _name + "n"))(_nd)
    composed(getattr(fft, _name + "2"))(_two)


@composed(fft.fftshift)
def fftshift(input, dim=None):
    """Half a turn forward."""
    return _shift(input, dim, 1)


@composed(fft.ifftshift)
def ifftshift(input, dim=None):
    """Half a turn back."""
    return _shift(input, dim, -1)


def _shift(input, dim, sign: int):
    dims = list(range(input.ndim) if dim is None else [dim] if isinstance(dim, int) else dim)
    by = [sign * (input.shape[d] // 2) for d in dims]
    turns = {d % input.ndim: n for d, n in zip(dims, by, strict=True)}
    later = lazy_spectrum.lazy_roll(input, turns) if len(turns) == len(dims) else None
    return torch.roll(input, by, dims) if later is None else later
