"""Rules of torch.fft on sharded tensors.

An unsharded dim is transformed locally. To transform a sharded dim, an all_to_all moves its sharding to another,
unsharded dim, where it stays. A transform over several dims transforms the unsharded dims first, so that the all_to_all
comes as late as possible. Transforms along sharded dims are deferred if they can be (`lazy_spectrum.py`): a model that
keeps only some modes then needs no all_to_all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, handler_of, register, rule
from ...layout import DimSharding
from ...redistribute import without_partial
from ...tensor import ShardTensor
from .._common.autocast import HALF_DTYPES
from .._common.blockwise import move_shard_off, moved_origins
from .._common.probe import probe, stand_in
from . import lazy_spectrum

fft = torch.fft

LAZY_FORWARD = (fft.fft, fft.rfft, fft.ifft)  # transforms that may be deferred
LAZY_INVERSE = (fft.ifft, fft.irfft)  # transforms that may consume a deferred spectrum
# Transforms of a half spectrum: the argument `n` along the last dim is the size of the result.
FROM_HALF_SPECTRUM = (fft.irfft, fft.hfft)
# (argument `n`, size of the operand) -> size of the result along the transformed dim
OUT_LENGTH = {
    "fft_fft": lambda n, size: size if n is None else n,
    "fft_ifft": lambda n, size: size if n is None else n,
    "fft_rfft": lambda n, size: (size if n is None else n) // 2 + 1,
    "fft_ihfft": lambda n, size: (size if n is None else n) // 2 + 1,
    "fft_irfft": lambda n, size: 2 * (size - 1) if n is None else n,
    "fft_hfft": lambda n, size: 2 * (size - 1) if n is None else n,
}


@rule(fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft, partial=True)
def transform(input: Operand, n=None, dim=-1, norm=None, *, fn):
    """Transform one dim; if it is sharded, its sharding is first moved to another dim."""
    if not -input.ndim <= dim < input.ndim or 0 in input.shape:
        return None  # the fallback raises torch's error
    if n is not None and n < 1:
        raise RuntimeError(f"Invalid number of data points ({n}) specified")
    dim %= input.ndim
    length = OUT_LENGTH[fn.__name__](n, input.shape[dim])
    if length < 1:
        return None
    layout = without_partial(input.layout, input.layout.numel // input.shape[dim] * length)
    source = move_shard_off(layout, dim, allow_empty=True) if layout.is_sharded(dim) else layout.unshard([dim])
    if source is None:
        return None
    return Plan(
        local=lambda input: _apply(fn, input, n, dim, norm, length),
        operands={"input": source},
        layout=source.with_dim(dim, DimSharding(length).with_origins(moved_origins(source, dim))),
    )


def _apply(fn, input, n, dim, norm, length):
    if input.numel():
        return fn(input, n, dim, norm).resolve_conj()  # ifft of a real input; empty shards have no such bit
    shape = list(input.shape)
    shape[dim] = length
    return _empty_result(fn, input, shape)


def _empty_result(fn, input, shape):
    """Return the result of an empty shard, which torch.fft refuses, with the dtype of the other ranks' results."""
    dtype = probe(fn, stand_in(input, (2,)), 2).dtype
    zero = input.sum() * 0  # in the autograd graph of the input
    return (zero.real if input.is_complex() and not dtype.is_complex else zero).to(dtype).expand(shape)


EAGER = {one: handler_of(one) for one in (fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft)}


def _is_local(input, dims) -> bool:
    """Return whether every rank can transform its local tensor without communication."""
    if input.__class__ is not ShardTensor or input._deferred is not None:
        return False
    layout = input._layout
    return layout.is_simple and not layout.partial and not any(map(layout.is_sharded, dims))


def _eager_fft(fft_1d, input, n, dim, norm):
    """Transform one dim now, without deferring."""
    return EAGER[fft_1d](fft_1d, (), (input, n, dim, norm), {})


def _try_lazy(input, dims, sizes, norm, last_fft, compute):
    """Defer a transform, or invert a deferred spectrum; return None if the transform must be computed now."""
    lazy = (
        lazy_spectrum.defer_inverse(input, dims, sizes, norm, last_fft is fft.irfft)
        if last_fft in LAZY_INVERSE
        else None
    )
    if lazy is None and last_fft in LAZY_FORWARD:
        lazy = lazy_spectrum.defer_forward(
            input, dims, sizes, norm, last_fft is fft.rfft, last_fft is fft.ifft, compute
        )
    return lazy


def _fft_handler(fft_1d):
    """Return the handler of a transform along one dim, which is deferred if the dim is sharded."""

    def run(func, types, args, kwargs):
        with start_check(*args, **kwargs) as check:
            result = None if "out" in kwargs else try_lazy(*args, **kwargs)
            if result is None:
                if communicates(*args, **kwargs):
                    check.wait()
                result = EAGER[fft_1d](func, types, args, kwargs)
        return result

    def start_check(input, n=None, dim=-1, norm=None, out=None):
        return lazy_spectrum.check_consensus(input, f"{fft_1d.__name__}(n={n}, dim={dim}, norm={norm})", n is not None)

    def communicates(input, n=None, dim=-1, norm=None, out=None):
        return out is not None or not -input.ndim <= dim < input.ndim or not _is_local(input, [dim])

    def try_lazy(input, n=None, dim=-1, norm=None):
        if input.__class__ is not ShardTensor or not -input.ndim <= dim < input.ndim:
            return None
        dims = [dim % input.ndim]
        return _try_lazy(input, dims, [n], norm, fft_1d, lambda x: _eager_fft(fft_1d, x, n, dims[0], norm))

    return run


for _one in EAGER:
    register(_one, _fft_handler(_one))


def _dims(input, s, dim) -> tuple[list[int], list[int | None]]:
    """Return the dims of an n-dim transform and the requested size of each, from torch's arguments `s` and `dim`."""
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


def _fft_each_dim(fft_1d, input, dims: Sequence[int], sizes: Sequence[int | None], norm):
    """Apply a complex transform along each dim, unsharded dims first."""
    layout = getattr(input, "_layout", None)
    order = sorted(range(len(dims)), key=lambda i: (layout is not None and layout.is_sharded(dims[i]), -i))
    for i in order:
        input = _eager_fft(fft_1d, input, sizes[i], dims[i], norm)
    return input


def _fft_nd(fn, fft_1d, last_fft, last_dim_first: bool):
    """Return handlers of an n-dim and a 2-dim transform: `last_fft` along the last dim, `fft_1d` along the others.

    `last_dim_first`: the last dim is transformed before the others.
    """

    def plan_unsharded(input: Operand, dims, sizes, norm):
        """Plan torch's n-dim call on the local tensor: no dim is sharded."""
        layout = input.layout.unshard(dims)
        for d, n in zip(dims, sizes, strict=True):
            length = OUT_LENGTH[(last_fft if d == dims[-1] else fft_1d).__name__](n, input.shape[d])
            layout = layout.with_dim(d, DimSharding(length).with_origins(moved_origins(layout, d)))
        s = [
            layout.shape[d] if last_fft in FROM_HALF_SPECTRUM else n or input.shape[d]
            for d, n in zip(dims, sizes, strict=True)
        ]

        def local(input):
            found = fn(input, s, dims, norm) if input.numel() else _empty_result(last_fft, input, layout.local_shape)
            return found.resolve_conj()

        return Plan(local=local, operands={"input": input.layout.unshard(dims)}, layout=layout)

    run_unsharded = make_handler(plan_unsharded, partial=False, merged=False)

    def nd(input, s=None, dim=None, norm=None):
        call = f"{fn.__name__}(s={s}, dim={dim}, norm={norm})"
        with lazy_spectrum.check_consensus(input, call, s is not None) as check:
            if input.dtype in HALF_DTYPES:  # autocast may cast in the steps below and not in the function itself
                probe(fn, stand_in(input, (2, 2)), None, (0, 1), norm)
            dims, sizes = _dims(input, s, dim)
            result = _try_lazy(input, dims, sizes, norm, last_fft, lambda x: compute_now(x, dims, sizes, norm))
            if result is None:
                if not _is_local(input, dims):
                    check.wait()
                result = compute_now(input, dims, sizes, norm)
        return result

    def compute_now(input, dims, sizes, norm):
        layout = getattr(input, "_layout", None)
        if layout is not None and len(dims) > 1 and layout.is_simple and not any(map(layout.is_sharded, dims)):
            if 0 not in input.shape and all(n is None or n > 0 for n in sizes):
                return run_unsharded(fn, (), (input, tuple(dims), tuple(sizes), norm), {})
        if last_fft is fft_1d:
            return _fft_each_dim(fft_1d, input, dims, sizes, norm)
        if last_dim_first:
            return _fft_each_dim(
                fft_1d, _eager_fft(last_fft, input, sizes[-1], dims[-1], norm), dims[:-1], sizes[:-1], norm
            )
        return _eager_fft(
            last_fft, _fft_each_dim(fft_1d, input, dims[:-1], sizes[:-1], norm), sizes[-1], dims[-1], norm
        )

    def two_dim(input, s=None, dim=(-2, -1), norm=None):
        return nd(input, s, dim, norm)

    return nd, two_dim


for _name, _one, _last, _first in [
    ("fft", fft.fft, fft.fft, True),
    ("ifft", fft.ifft, fft.ifft, True),
    ("rfft", fft.fft, fft.rfft, True),
    ("irfft", fft.ifft, fft.irfft, False),
    ("hfft", fft.fft, fft.hfft, False),
    ("ihfft", fft.ifft, fft.ihfft, True),
]:
    _nd, _two_dim = _fft_nd(getattr(fft, _name + "n"), _one, _last, _first)
    composed(getattr(fft, _name + "n"))(_nd)
    composed(getattr(fft, _name + "2"))(_two_dim)


@composed(fft.fftshift)
def fftshift(input, dim=None):
    """Roll every dim by half its size."""
    return _shift(input, dim, 1)


@composed(fft.ifftshift)
def ifftshift(input, dim=None):
    """Roll every dim back by half its size."""
    return _shift(input, dim, -1)


def _shift(input, dim, sign: int):
    dims = list(range(input.ndim) if dim is None else [dim] if isinstance(dim, int) else dim)
    shifts = [sign * (input.shape[d] // 2) for d in dims]
    shift_by_dim = {d % input.ndim: n for d, n in zip(dims, shifts, strict=True)}
    lazy = lazy_spectrum.lazy_roll(input, shift_by_dim) if len(shift_by_dim) == len(dims) else None
    return torch.roll(input, shifts, dims) if lazy is None else lazy
