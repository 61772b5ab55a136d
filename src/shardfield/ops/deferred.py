"""Spectra that are not there yet: a transform along a cut dim waits until it is known what of it is wanted.

Code that keeps some modes of a field takes its spectrum, perhaps shifts it, and slices it; what it makes of the slice
it writes into zeros, shifts back and inverts. `Asked` remembers the first half: a slice of it is a truncated transform.
`Given` remembers the second half: its inverse is evaluated from the blocks that were written. Both stand behind an
ordinary ShardTensor without a local tensor; whatever else asks for that gets the spectrum as it would have been.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import make_wrapper
from ..errors import ShardingError
from ..layout import Factor, Layout
from ..tensor import ShardTensor, wrap
from .blocks import freed
from .parse import parse, plain_key
from .spectral import FLOATS, resized, truncated_fft, truncated_ifft

Runs = list[range]

# Where fields lay whose modes were taken, by the sizes of their spectra: a spectrum of these sizes that is put together
# from modes belongs to such a field. Were it another, its inverse would be as right, and lie differently.
HOMES: OrderedDict[tuple, Layout] = OrderedDict()
HOMES_BOUND = 64


class Asked:
    """The spectrum of a field along `dims`, rolled by `shifts`."""

    def __init__(self, source: ShardTensor, dims, norm, real: bool, layout: Layout, now: Callable[[], Any]):
        self.source, self.dims, self.norm, self.real = source, tuple(dims), norm, real
        self.layout, self.now = layout, now
        self.shifts: dict[int, int] = {}
        self.version, self.grad = source._version, torch.is_grad_enabled()

    def rolled(self, by: Mapping[int, int]) -> Asked:
        """The same, rolled further."""
        other = Asked(self.source, self.dims, self.norm, self.real, self.layout, self.now)
        other.shifts = {d: self.shifts.get(d, 0) + by.get(d, 0) for d in {*self.shifts, *by}}
        other.version, other.grad = self.version, self.grad and torch.is_grad_enabled()
        return other

    def whole(self) -> ShardTensor:
        """The spectrum itself."""
        self._unchanged()
        with torch.set_grad_enabled(self.grad):
            return _rolled(self.now(), self.shifts)._placed(self.layout)

    def part(self, index: Any) -> ShardTensor | None:
        """The modes at an index, whole on every rank; None where the index is no block or the block is large."""
        shape = self.layout.shape
        runs = _block(shape, index)
        if runs is None or set(self.shifts) - set(self.dims) or not _pays(self.source._layout, self.dims, shape, runs):
            return None
        self._unchanged()
        modes = [tuple((i - self.shifts.get(d, 0)) % shape[d] for i in runs[d]) for d in self.dims]
        others = tuple(slice(None) if d in self.dims else _slice(r) for d, r in enumerate(runs))
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            found = truncated_fft(self.source, self.dims, modes, self.norm)
            found = found._placed(found._layout.with_partial(()))[others]
        found._copied_view = True
        home = (self.layout.mesh, self.dims, tuple(shape[d] for d in self.dims), self.real)
        HOMES[home] = self.source._layout.with_partial(())
        HOMES.move_to_end(home)
        if len(HOMES) > HOMES_BOUND:
            HOMES.popitem(last=False)
        return found

    def _unchanged(self) -> None:
        if self.source._version != self.version:
            raise ShardingError(
                "the field was written into after its transform was asked for and before that was used; "
                "transform a clone() of the field"
            )


class Given:
    """A spectrum that is zero but for some blocks, rolled by `shifts`; its field is to lie as `home`."""

    def __init__(self, layout: Layout, dtype, device, dims, home: Layout, real: bool):
        self.layout, self.dtype, self.device = layout, dtype, device
        self.dims, self.home, self.real = dims, home, real
        self.blocks: list[tuple[Runs, ShardTensor]] = []
        self.shifts: dict[int, int] = {}
        self.grad = torch.is_grad_enabled()

    def rolled(self, by: Mapping[int, int]) -> Given:
        """The same, rolled further."""
        other = Given(self.layout, self.dtype, self.device, self.dims, self.home, self.real)
        other.blocks = list(self.blocks)
        other.shifts = {d: self.shifts.get(d, 0) + by.get(d, 0) for d in {*self.shifts, *by}}
        return other

    def put(self, index: Any, value: Any) -> bool:
        """Take in a block; False where it is none, is large, or meets another."""
        runs = _block(self.layout.shape, index)
        if self.shifts or runs is None or value.__class__ is not ShardTensor or not value._dtype.is_complex:
            return False
        if tuple(map(len, runs)) != tuple(value.shape) or not _pays(self.home, self.dims, self.layout.shape, runs):
            return False
        if any(len(r) != n for d, (r, n) in enumerate(zip(runs, self.layout.shape, strict=True)) if d not in self.dims):
            return False
        if any(all(set(a) & set(b) for a, b in zip(runs, other, strict=True)) for other, _ in self.blocks):
            return False
        self.blocks.append((runs, value.to(self.dtype).clone()))
        return True

    def whole(self) -> ShardTensor:
        """The spectrum itself."""
        with torch.set_grad_enabled(self.grad):
            made = wrap(torch.zeros(self.layout.shape, dtype=self.dtype, device=self.device), self.layout)
            for runs, value in self.blocks:
                made[tuple(map(_slice, runs))] = value
            return _rolled(made, self.shifts)._placed(self.layout)

    def inverse(self, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool) -> Any:
        """The field, of these sizes along `dims`; None where that asks for other dims than were transformed."""
        if real != self.real or set(dims) != set(self.dims) or (real and dims[-1] != self.dims[-1]):
            return None
        if set(self.shifts) - set(dims):
            return None
        goal = [self._size(d, n, real and d == dims[-1]) for d, n in zip(dims, sizes, strict=True)]
        if min(goal) < 1:
            return None
        like, total = resized(self.home, dims, goal), None
        for runs, value in self.blocks:
            modes = []
            for d, n in zip(dims, goal, strict=True):
                places = [(i + self.shifts.get(d, 0)) % self.layout.shape[d] for i in runs[d]]
                fit = [j for j, p in enumerate(places) if p < (n // 2 + 1 if real and d == dims[-1] else n)]
                if len(fit) < len(places):  # the array is cropped, as torch.fft does
                    value = value.index_select(d, torch.tensor(fit, dtype=torch.int64, device=self.device))
                modes.append(tuple(places[j] for j in fit))
            field = truncated_ifft(value, dims, modes, goal, norm, real, like)
            total = field if total is None else total + field
        return total

    def _size(self, dim: int, asked: int | None, half: bool) -> int:
        if asked is not None:
            return asked
        return 2 * (self.layout.shape[dim] - 1) if half else self.layout.shape[dim]


# ---------------------------------------------------------------------- where torch's calls come in


def asked(input: Any, dims: Sequence[int], sizes: Sequence[int | None], norm, real: bool, now: Callable) -> Any:
    """The spectrum of a cut field, later; None where it is better had at once. `now` takes it of a field."""
    if input.__class__ is not ShardTensor or "_deferred" in input.__dict__:
        return None
    if input._dtype not in FLOATS or (real and input._dtype.is_complex) or 0 in input.shape or not dims:
        return None
    if norm not in (None, "backward", "ortho", "forward") or input._local_tensor.is_inference():
        return None
    if any(n is not None and n != input.shape[d] for d, n in zip(dims, sizes, strict=True)):
        return None
    source = input._simple_value()
    if not any(source._layout.is_cut(d) for d in dims):
        return None
    layout = _transformed(source._layout, dims, real)
    if layout is None:
        return None
    return _later(Asked(source, dims, norm, real, layout, lambda: now(source)), source._dtype.to_complex(), source)


def given(x: Tensor, index: Any, value: Any, mesh: Any) -> Any:
    """Plain zeros that take in a block of modes; None where they are no zeros, or no spectrum known here."""
    if value.__class__ is not ShardTensor or x.dtype not in FLOATS[2:] or x.requires_grad or not x.is_contiguous():
        return None
    for (known, dims, sizes, real), home in reversed(HOMES.items()):
        if known == mesh and home.ndim == x.ndim and all(x.shape[d] == n for d, n in zip(dims, sizes, strict=True)):
            made = Given(Layout.replicate(mesh, x.shape), x.dtype, x.device, dims, home, real)
            if made.put(index, value) and not x.view(torch.int64).any():
                return _later(made, x.dtype, x)
            return None
    return None


def part(x: ShardTensor, index: Any) -> ShardTensor | None:
    """A slice of a spectrum that is not there yet."""
    spectrum = x.__dict__["_deferred"]
    return spectrum.part(index) if isinstance(spectrum, Asked) else None


def put(x: ShardTensor, index: Any, value: Any) -> bool:
    """A block written into a spectrum that is not there yet."""
    spectrum = x.__dict__["_deferred"]
    return isinstance(spectrum, Given) and spectrum.put(index, value)


def rolled(x: Any, by: Mapping[int, int]) -> ShardTensor | None:
    """A shifted spectrum that is not there yet."""
    spectrum = x.__dict__.get("_deferred") if x.__class__ is ShardTensor else None
    return _later(spectrum.rolled(by), x._dtype, x) if isinstance(spectrum, (Asked, Given)) else None


def inverse(x: Any, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool) -> Any:
    """The field of a spectrum that is not there yet."""
    spectrum = x.__dict__.get("_deferred") if x.__class__ is ShardTensor else None
    return spectrum.inverse(dims, sizes, norm, real) if isinstance(spectrum, Given) else None


def _arrived(self: ShardTensor, name: str) -> Any:
    """The local tensor of a spectrum, when something wants it. Python calls this for attributes it does not find."""
    if name != "_local_tensor" or "_deferred" not in self.__dict__:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    local = self.__dict__["_deferred"].whole()._local_tensor
    self._local_tensor = local
    del self.__dict__["_deferred"]
    return local


ShardTensor.__getattr__ = _arrived  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- small things


def _later(spectrum: Asked | Given, dtype: torch.dtype, like: Any) -> ShardTensor:
    layout = spectrum.layout
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, like.device)
    made.__dict__ = {"_layout": layout, "_dtype": dtype, "_device": like.device, "_deferred": spectrum}
    return made


def _transformed(layout: Layout, dims: Sequence[int], real: bool) -> Layout | None:
    """Where the spectrum lies once it is taken; None if a dim has nowhere to leave its cut."""
    left = list(dims)
    half = left.pop() if real else None
    order = [] if half is None else [half]
    while order or left:
        if not order:
            order = sorted(reversed(left), key=layout.is_cut)  # as `fft._each` takes them
            left = []
        d = order.pop(0)
        moved = freed(layout, d, crowded=True) if layout.is_cut(d) else layout.uncut([d])
        if moved is None:
            return None
        layout = moved.with_dim(d, Factor(layout.shape[d] // 2 + 1 if d == half else layout.shape[d]))
    return layout


def _block(shape: Sequence[int], index: Any) -> Runs | None:
    """The indices along each dim of an index of slices; None for any other, and for nothing or everything."""
    if plain_key(index) is None:
        return None
    items = parse(shape, index, torch.device("cpu")).items
    if len(items) != len(shape) or not all(isinstance(i, tuple) for i in items):
        return None
    runs = [range(*i) for i in items if isinstance(i, tuple)]
    return None if min(map(len, runs)) == 0 or tuple(map(len, runs)) == tuple(shape) else runs


def _pays(field: Layout, dims: Sequence[int], shape: Sequence[int], runs: Runs) -> bool:
    """Whether summing a block of modes over all ranks sends less than swapping cuts of the spectrum."""
    summed = swapped = 0.0
    here = math.prod(max(field.lengths(d)) / field.shape[d] for d in range(field.ndim) if d not in dims)
    there = math.prod(max(field.lengths(d)) / field.shape[d] for d in range(field.ndim))
    for axis in {a for d in dims for a in field.wide(field.axes_of(d))}:
        away = 1 - 1 / field.mesh.size(axis)
        summed += 2 * away * here * math.prod(map(len, runs))
        swapped += away * there * math.prod(shape)
    return summed < swapped


def _slice(run: range) -> slice:
    return slice(run.start, run.stop, run.step)


def _rolled(x: Any, by: Mapping[int, int]) -> Any:
    return torch.roll(x, list(by.values()), list(by)) if by else x
