"""Spectra that are not there yet: a transform along a cut dim waits until it is known what of it is wanted.

Code that keeps some modes of a field takes its spectrum, perhaps shifts it, and slices it; what it makes of the slice
it writes into zeros, shifts back and inverts. `Asked` remembers the first half: a slice of it is a truncated transform.
`Given` remembers the second half: its inverse is evaluated from the blocks that were written. Both stand behind an
ordinary ShardTensor without a local tensor; whatever else asks for that gets the spectrum as it would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tracing
from .._compat import make_wrapper
from ..comm.alike import Alike, alike
from ..layout import Layout
from ..tensor import ShardTensor
from .across import as_autocast
from .asked import HOMES as HOMES
from .asked import Asked
from .given import Given
from .spectra import transformed
from .spectral import FLOATS


def waiting(x: Any) -> Asked | Given | None:
    """The spectrum that a tensor stands for, if it is not there yet."""
    found = x.__dict__.get("_deferred") if x.__class__ is ShardTensor else None
    return found if isinstance(found, (Asked, Given)) else None


def asked(
    input: Any, dims: Sequence[int], sizes: Sequence[int | None], norm, real: bool, back: bool, now: Callable
) -> Any:
    """The spectrum of a cut field, later; None where it is better had at once. `now` takes it of a field."""
    if input.__class__ is not ShardTensor or waiting(input) is not None:
        return None
    (input,) = as_autocast(input)
    if input._dtype not in FLOATS or (real and input._dtype.is_complex) or 0 in input.shape or not dims:
        return None
    if norm not in (None, "backward", "ortho", "forward"):
        return None
    if any(n is not None and n != input.shape[d] for d, n in zip(dims, sizes, strict=True)):
        return None
    source = input._simple_value()
    if not any(source._layout.is_cut(d) for d in dims):
        return None
    layout = transformed(source._layout, dims, real)
    return _later(Asked(source, dims, norm, real, back, layout, now), source._dtype.to_complex(), source)


def given(x: Tensor, index: Any, value: Any, mesh: Any) -> Any:
    """Plain zeros that take in a block of modes; None where they are no zeros, or no spectrum known here."""
    if value.__class__ is not ShardTensor or x.dtype not in FLOATS[2:] or x.requires_grad or not x.is_contiguous():
        return None
    for (known, dims, sizes, real), home in reversed(HOMES.items()):
        if known == mesh and home.ndim == x.ndim and all(x.shape[d] == n for d, n in zip(dims, sizes, strict=True)):
            made = Given(Layout.replicate(mesh, x.shape), x.dtype, x.device, dims, home, real)
            try:
                taken = made.put(index, value) and _is_zeros(x)
            except Exception as error:
                alike(mesh, f"modes that cannot be put into {made}: {error}").settle()
                raise
            if taken:
                return _later(made, x.dtype, x)
            # ranks on which it was taken compare when its field is wanted: this is where the others meet them
            alike(mesh, f"modes of {value._layout} that are put where {made} could not take them in").settle()
            return None
    return None


def _is_zeros(x: Tensor) -> bool:
    if tracing.writer is not None:
        return tracing.writer.is_zeros(x)
    return tracing.hollow or not x.view(torch.int64).any()  # what is only counted is taken for zeros


def zeros(x: Any, dtype: torch.dtype) -> ShardTensor | None:
    """Zeros like a spectrum that is not there yet."""
    spectrum = waiting(x)
    if not isinstance(spectrum, Asked) or spectrum.back or not dtype.is_complex:
        return None
    home = spectrum.field._layout
    return _later(Given(x._layout, dtype, x.device, spectrum.dims, home, spectrum.real), dtype, x)


def stand_in(x: ShardTensor) -> Tensor:
    """A local tensor that tells dtype and device; the own one, unless that would have to be taken first."""
    if "_deferred" in x.__dict__:
        return torch.empty((1,) * x.ndim, dtype=x.dtype, device=x.device)
    return x._local_tensor


def part(x: ShardTensor, index: Any) -> ShardTensor | None:
    """A slice of a spectrum that is not there yet."""
    spectrum = x.__dict__["_deferred"]
    found = spectrum.part(index) if isinstance(spectrum, Asked) else None
    if found is not None and found.requires_grad:
        x._passed_by = True
    return found


def put(x: ShardTensor, index: Any, value: Any) -> bool:
    """A block written into a spectrum that is not there yet."""
    spectrum = x.__dict__["_deferred"]
    return isinstance(spectrum, Given) and spectrum.put(index, value)


def rolled(x: Any, by: Mapping[int, int]) -> ShardTensor | None:
    """A shifted spectrum that is not there yet."""
    spectrum = waiting(x)
    other = None if spectrum is None else spectrum.rolled(by)
    return None if other is None else _later(other, x._dtype, x)


def comparing(x: Any, call: str, given: bool) -> Alike:
    """Start to compare a transform over the ranks, if lengths are `given` or its field is made without a message."""
    spectrum = waiting(x)
    if x.__class__ is not ShardTensor or not (given or isinstance(spectrum, Given)):
        return alike(None, call)
    check = alike(x.device_mesh, f"{call} of {x._layout if spectrum is None else spectrum}")
    if isinstance(spectrum, Given) and not spectrum.is_here:
        check.settle()
    return check


def inverse(x: Any, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool) -> Any:
    """The field of a spectrum that is not there yet."""
    spectrum = waiting(x)
    found = spectrum.inverse(dims, sizes, norm, real) if isinstance(spectrum, Given) else None
    return _later(found, x._dtype, x) if isinstance(found, Given) else found


class _Arrival:
    """The local tensor of a spectrum, when something wants it: Python asks the class where the tensor has none itself.

    (A `__getattr__` would do, and every attribute of every ShardTensor would take longer.)
    """

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None or "_deferred" not in tensor.__dict__:
            raise AttributeError(f"{owner.__name__!r} object has no attribute '_local_tensor'")
        local = tensor.__dict__["_deferred"].whole()._local_tensor
        tensor._local_tensor = local
        del tensor.__dict__["_deferred"]
        return local


def _unless_waiting(plain: property, answer: Callable[[Any], Any]) -> property:
    """A property that can be told of a tensor that is not there yet; ranks need not all ask."""

    def get(self: ShardTensor) -> Any:
        later = self.__dict__.get("_deferred")
        return plain.fget(self) if later is None else answer(later)  # type: ignore[misc]

    return property(get, plain.fset, plain.fdel, plain.__doc__)


ShardTensor._local_tensor = _Arrival()  # type: ignore[assignment]
for _name, _answer in {
    "requires_grad": lambda s: s.requires_grad,
    "is_leaf": lambda s: not s.requires_grad,
    "grad": lambda s: None,
    "retains_grad": lambda s: False,
    "_version": lambda s: 0,
}.items():
    setattr(ShardTensor, _name, _unless_waiting(vars(ShardTensor)[_name], _answer))
_grad_fn = vars(ShardTensor)["grad_fn"].fget
ShardTensor.grad_fn = property(lambda self: _grad_fn(self) if self.requires_grad else None)  # type: ignore[assignment]


def _later(spectrum: Asked | Given, dtype: torch.dtype, like: Any) -> ShardTensor:
    layout = spectrum.layout
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, like.device)
    made.__dict__ = {"_layout": layout, "_dtype": dtype, "_device": like.device, "_deferred": spectrum}
    return made
