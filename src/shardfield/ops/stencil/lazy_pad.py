"""Borders that are not there yet: a padded field waits until it is known who reads it.

A field that goes round in a circle, or is mirrored at its ends, is padded and then convolved. Padded at once, a cut
field would send the border's rows in one exchange and the convolution's halo in another, and would be copied whole in
between. So `F.pad` of a cut field makes an ordinary ShardTensor without a local tensor, which remembers the field and
its borders. A convolution, a pool or `F.unfold` takes the field with its borders, which may be others along each dim,
and asks for all it reads at once; whatever else wants the padded field gets it as it would have been.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import has_saved_tensor_hooks
from ...dispatch import registry
from ...dispatch.plan import Operand
from ...dispatch.torch_aliases import aliases
from ...dispatch.write_tracking import WRITE_OBSERVERS, WriteObserver
from ...errors import ShardingError
from ...layout import Layout
from ...tensor import Deferred, ShardTensor, wrap_deferred
from ...trace_state import same_memory
from .pad import PadSpec, padding_by_dim
from .pad import pad as plan_pad

eager_pad = registry.HANDLERS[F.pad]


class LazyPad(Deferred):
    """A field and the pads it is to get, each along other dims than those before it."""

    def __init__(self, source: ShardTensor, steps: tuple[tuple, ...], pre_pad: PadSpec, layout: Layout, grad: bool):
        self.source, self.steps, self.pre_pad, self.layout = source, steps, pre_pad, layout
        self.version, self.grad_enabled = source._version, grad
        WRITE_OBSERVERS.add(self)

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and self.source.requires_grad

    def field(self) -> ShardTensor:
        """The field as it was when it was padded."""
        if self.source._version != self.version:
            raise ShardingError(
                "the local tensor of a field was written into after the field was padded and before that was used; "
                "pad a clone() of it"
            )
        return self.source if self.grad_enabled else self.source.detach()

    def before_write(self, target: Tensor) -> None:
        """Take a copy of the field, into which someone is about to write by way of `target`."""
        if same_memory(target, self.source._local_tensor):
            with torch.set_grad_enabled(self.grad_enabled):
                self.source = self.field().clone()
            self.version = self.source._version

    def materialize(self) -> ShardTensor:
        """The padded field itself."""
        with torch.set_grad_enabled(self.grad_enabled):
            found = self.field()
            for step in self.steps:
                found = eager_pad(F.pad, (), (found, *step), {})
            return found._redistribute_to(self.layout)


class SavedInput(WriteObserver):
    """What backward keeps of a field. On one device that is its padded copy: the field may be written into."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version
        WRITE_OBSERVERS.add(self)

    def before_write(self, target: Tensor) -> None:
        if same_memory(target, self.tensor):
            self.tensor = self.checked_tensor().clone()
            self.version = self.tensor._version

    def checked_tensor(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "the local tensor of a field that backward needs has been modified by an inplace operation"
            )
        return self.tensor


@lru_cache(4096)
def _padded_layout(
    layout: Layout, dtype: torch.dtype, device: torch.device, pad: tuple[int, ...], mode: str, value: Any
):
    """Where a padded field lies; None if it takes a gather. torch's own errors."""
    plan = plan_pad(Operand(layout, dtype, device, 0), list(pad), mode, value, fn=F.pad)
    return None if plan is None else plan.layout


@registry.handler("pad")
def pad(func, types, args, kwargs):
    """Later, where cells of a cut field are to show in its border."""
    later = _defer_pad(*args, **kwargs)
    return eager_pad(func, types, args, kwargs) if later is None else later


def _defer_pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> ShardTensor | None:
    if input.__class__ is not ShardTensor or not pad or not all(type(n) is int and n >= 0 for n in pad):
        return None
    waiting: Any = input._deferred
    joins = isinstance(waiting, LazyPad) and waiting.grad_enabled == torch.is_grad_enabled()
    if mode not in ("reflect", "replicate", "circular") and not (joins and mode == "constant" and not value):
        return None
    layout = input._layout
    by = padding_by_dim(input.ndim, pad)
    borders = tuple((d - input.ndim, mode, *both) for d, both in sorted(by.items()))
    joins = joins and not {d for d, *_ in waiting.pre_pad} & {d for d, *_ in borders}
    if joins:
        source, steps, borders = waiting.source, waiting.steps, waiting.pre_pad + borders
    else:
        cut = any(map(layout.is_sharded, {*by, *range(2, layout.ndim)}))  # so that an exchange is to come
        if mode == "constant" or not by or not cut or not layout.is_simple or layout.partial:
            return None
        if input._local_tensor.is_inference():  # nobody counts its writes
            return None
        source, steps = input, ()
    goal = _padded_layout(layout, input._dtype, input._device, tuple(pad), mode, value)
    if goal is None:
        return None
    padded = LazyPad(source, (*steps, (list(pad), mode, value)), borders, goal, torch.is_grad_enabled())
    if joins:
        padded.version = waiting.version
    return wrap_deferred(padded, input._dtype, input._device)


# ---------------------------------------------------------------------- who takes a field with its borders


def accept_lazy_pad(
    function: Any, nd: int, modes: tuple[str, ...] = ("reflect", "replicate", "circular", "constant")
) -> None:
    """Calls of a function over the last `nd` dims whose planner takes `pre_pad` of these modes."""
    for alias in [function] if callable(function) else aliases(function):
        registry.HANDLERS[alias] = _accepting_lazy_pad(registry.HANDLERS[alias], nd, modes)


def _accepting_lazy_pad(handler: Callable, nd: int, modes: tuple[str, ...]) -> Callable:
    def call(func, types, args, kwargs):
        input = args[0] if args else kwargs.get("input")
        waiting: Any = input._deferred if input.__class__ is ShardTensor else None
        if not isinstance(waiting, LazyPad) or "out" in kwargs:
            return handler(func, types, args, kwargs)
        if any(d < -nd or mode not in modes for d, mode, *_ in waiting.pre_pad):
            return handler(func, types, args, kwargs)
        field = waiting.field()
        if field.requires_grad and torch.is_grad_enabled():
            input._grad_incomplete = True
        kwargs = {k: v for k, v in kwargs.items() if k != "input"} | {"pre_pad": waiting.pre_pad}
        if not torch.is_grad_enabled():
            return handler(func, types, (field, *args[1:]), kwargs)
        if has_saved_tensor_hooks():
            return handler(func, types, (field.clone(), *args[1:]), kwargs)
        with torch.autograd.graph.saved_tensors_hooks(partial(_pack, field._local_tensor), _unpack):
            return handler(func, types, (field, *args[1:]), kwargs)

    return call


def _pack(field: Tensor, tensor: Tensor) -> Any:
    return SavedInput(tensor) if same_memory(tensor, field) else tensor


def _unpack(kept: Any) -> Tensor:
    return kept.checked_tensor() if isinstance(kept, SavedInput) else kept


for _nd in (1, 2, 3):
    accept_lazy_pad(f"conv{_nd}d", _nd)
    accept_lazy_pad(f"avg_pool{_nd}d", _nd)
    for _name in (f"max_pool{_nd}d", f"max_pool{_nd}d_with_indices"):
        accept_lazy_pad(_name, _nd, ("reflect", "replicate", "circular"))  # no zeros outside: nothing is larger there
accept_lazy_pad(F.unfold, 2)
