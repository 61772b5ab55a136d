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

from ... import trace_state
from ..._compat import make_wrapper
from ...comm.consensus import Consensus
from ...layout import Layout
from ...tensor import ShardTensor
from .._common.probe import autocast_to_fp32
from .lazy_forward import FIELD_LAYOUTS as FIELD_LAYOUTS
from .lazy_forward import LazySpectrum
from .lazy_inverse import SparseSpectrum
from .mode_blocks import spectrum_layout
from .truncation import FLOATS


def lazy_spectrum_of(x: Any) -> LazySpectrum | SparseSpectrum | None:
    """The spectrum that a tensor stands for, if it is not there yet."""
    found = x.__dict__.get("_deferred") if x.__class__ is ShardTensor else None
    return found if isinstance(found, (LazySpectrum, SparseSpectrum)) else None


def defer_forward(
    input: Any, dims: Sequence[int], sizes: Sequence[int | None], norm, real: bool, is_inverse: bool, compute: Callable
) -> Any:
    """The spectrum of a cut field, later; None where it is better had at once. `compute` takes it of a field."""
    if input.__class__ is not ShardTensor or lazy_spectrum_of(input) is not None:
        return None
    (input,) = autocast_to_fp32(input)
    if input._dtype not in FLOATS or (real and input._dtype.is_complex) or 0 in input.shape or not dims:
        return None
    if norm not in (None, "backward", "ortho", "forward"):
        return None
    if any(n is not None and n != input.shape[d] for d, n in zip(dims, sizes, strict=True)):
        return None
    source = input._unmerged_value()
    if not any(source._layout.is_sharded(d) for d in dims):
        return None
    layout = spectrum_layout(source._layout, dims, real)
    return _wrap_lazy(
        LazySpectrum(source, dims, norm, real, is_inverse, layout, compute), source._dtype.to_complex(), source
    )


def defer_block_write(x: Tensor, index: Any, value: Any, mesh: Any) -> Any:
    """Plain zeros that take in a block of modes; None where they are no zeros, or no spectrum known here."""
    if value.__class__ is not ShardTensor or x.dtype not in FLOATS[2:] or x.requires_grad or not x.is_contiguous():
        return None
    for (known, dims, sizes, real), home in reversed(FIELD_LAYOUTS.items()):
        if known == mesh and home.ndim == x.ndim and all(x.shape[d] == n for d, n in zip(dims, sizes, strict=True)):
            made = SparseSpectrum(Layout.replicate(mesh, x.shape), x.dtype, x.device, dims, home, real)
            try:
                taken = made.write_block(index, value) and _is_zeros(x)
            except Exception as error:
                Consensus.start(mesh, f"modes that cannot be put into {made}: {error}").wait()
                raise
            if taken:
                return _wrap_lazy(made, x.dtype, x)
            # ranks on which it was taken compare when its field is wanted: this is where the others meet them
            Consensus.start(mesh, f"modes of {value._layout} that are put where {made} could not take them in").wait()
            return None
    return None


def _is_zeros(x: Tensor) -> bool:
    if trace_state.tracer is not None:
        return trace_state.tracer.is_zeros(x)
    return trace_state.fake_tensors or not x.view(torch.int64).any()  # what is only counted is taken for zeros


def lazy_zeros_like(x: Any, dtype: torch.dtype) -> ShardTensor | None:
    """Zeros like a spectrum that is not there yet."""
    spectrum = lazy_spectrum_of(x)
    if not isinstance(spectrum, LazySpectrum) or spectrum.is_inverse or not dtype.is_complex:
        return None
    home = spectrum.field._layout
    return _wrap_lazy(SparseSpectrum(x._layout, dtype, x.device, spectrum.dims, home, spectrum.real), dtype, x)


def proxy_local(x: ShardTensor) -> Tensor:
    """A local tensor that tells dtype and device; the own one, unless that would have to be taken first."""
    if "_deferred" in x.__dict__:
        return torch.empty((1,) * x.ndim, dtype=x.dtype, device=x.device)
    return x._local_tensor


def read_block(x: ShardTensor, index: Any) -> ShardTensor | None:
    """A slice of a spectrum that is not there yet."""
    spectrum = x.__dict__["_deferred"]
    found = spectrum.read_block(index) if isinstance(spectrum, LazySpectrum) else None
    if found is not None and found.requires_grad:
        x._grad_incomplete = True
    return found


def write_block(x: ShardTensor, index: Any, value: Any) -> bool:
    """A block written into a spectrum that is not there yet."""
    spectrum = x.__dict__["_deferred"]
    return isinstance(spectrum, SparseSpectrum) and spectrum.write_block(index, value)


def lazy_roll(x: Any, by: Mapping[int, int]) -> ShardTensor | None:
    """A shifted spectrum that is not there yet."""
    spectrum = lazy_spectrum_of(x)
    other = None if spectrum is None else spectrum.roll(by)
    return None if other is None else _wrap_lazy(other, x._dtype, x)


def check_consensus(x: Any, call: str, has_sizes: bool) -> Consensus:
    """Start to compare a transform over the ranks, if lengths are `defer_block_write` or its field is made without a
    message."""
    spectrum = lazy_spectrum_of(x)
    if x.__class__ is not ShardTensor or not (has_sizes or isinstance(spectrum, SparseSpectrum)):
        return Consensus.start(None, call)
    check = Consensus.start(x.device_mesh, f"{call} of {x._layout if spectrum is None else spectrum}")
    if isinstance(spectrum, SparseSpectrum) and not spectrum.is_replicated:
        check.wait()
    return check


def defer_inverse(x: Any, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool) -> Any:
    """The field of a spectrum that is not there yet."""
    spectrum = lazy_spectrum_of(x)
    found = spectrum.inverse(dims, sizes, norm, real) if isinstance(spectrum, SparseSpectrum) else None
    return _wrap_lazy(found, x._dtype, x) if isinstance(found, SparseSpectrum) else found


class _LazyLocalTensor:
    """The local tensor of a spectrum, when something wants it: Python asks the class where the tensor has none itself.

    (A `__getattr__` would do, and every attribute of every ShardTensor would take longer.)
    """

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None or "_deferred" not in tensor.__dict__:
            raise AttributeError(f"{owner.__name__!r} object has no attribute '_local_tensor'")
        local = tensor.__dict__["_deferred"].materialize()._local_tensor
        tensor._local_tensor = local
        del tensor.__dict__["_deferred"]
        return local


def _lazy_property(plain: property, answer: Callable[[Any], Any]) -> property:
    """A property that can be told of a tensor that is not there yet; ranks need not all ask."""

    def get(self: ShardTensor) -> Any:
        later = self.__dict__.get("_deferred")
        return plain.fget(self) if later is None else answer(later)  # type: ignore[misc]

    return property(get, plain.fset, plain.fdel, plain.__doc__)


ShardTensor._local_tensor = _LazyLocalTensor()  # type: ignore[assignment]
for _name, _answer in {
    "requires_grad": lambda s: s.requires_grad,
    "is_leaf": lambda s: not s.requires_grad,
    "grad": lambda s: None,
    "retains_grad": lambda s: False,
    "_version": lambda s: 0,
}.items():
    setattr(ShardTensor, _name, _lazy_property(vars(ShardTensor)[_name], _answer))
_grad_fn = vars(ShardTensor)["grad_fn"].fget
ShardTensor.grad_fn = property(lambda self: _grad_fn(self) if self.requires_grad else None)  # type: ignore[assignment]


def _wrap_lazy(spectrum: LazySpectrum | SparseSpectrum, dtype: torch.dtype, like: Any) -> ShardTensor:
    layout = spectrum.layout
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, like.device)
    made.__dict__ = {"_layout": layout, "_dtype": dtype, "_device": like.device, "_deferred": spectrum}
    return made
