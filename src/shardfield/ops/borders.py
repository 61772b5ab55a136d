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

from .. import dispatch
from .._compat import hooks_on_saving, make_wrapper
from ..aliasing import LENT
from ..errors import ShardingError
from ..layout import Layout
from ..names import aliases
from ..plan import Operand
from ..tensor import ShardTensor
from ..tracing import same_memory
from .pad import Borders, amounts
from .pad import pad as plan_pad

at_once = dispatch.TABLE[F.pad]


class Padded:
    """A field and the pads it is to get, each along other dims than those before it."""

    def __init__(self, source: ShardTensor, steps: tuple[tuple, ...], borders: Borders, layout: Layout, grad: bool):
        self.source, self.steps, self.borders, self.layout = source, steps, borders, layout
        self.version, self.grad = source._version, grad
        LENT.add(self)

    @property
    def requires_grad(self) -> bool:
        return self.grad and self.source.requires_grad

    def field(self) -> ShardTensor:
        """The field as it was when it was padded."""
        if self.source._version != self.version:
            raise ShardingError(
                "the local tensor of a field was written into after the field was padded and before that was used; "
                "pad a clone() of it"
            )
        return self.source if self.grad else self.source.detach()

    def keep(self, target: Tensor) -> None:
        """Take a copy of the field, into which someone is about to write by way of `target`."""
        if same_memory(target, self.source._local_tensor):
            with torch.set_grad_enabled(self.grad):
                self.source = self.field().clone()
            self.version = self.source._version

    def whole(self) -> ShardTensor:
        """The padded field itself."""
        with torch.set_grad_enabled(self.grad):
            found = self.field()
            for step in self.steps:
                found = at_once(F.pad, (), (found, *step), {})
            return found._placed(self.layout)


class Kept:
    """What backward keeps of a field. On one device that is its padded copy: the field may be written into."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version
        LENT.add(self)

    def keep(self, target: Tensor) -> None:
        if same_memory(target, self.tensor):
            self.tensor = self.unchanged().clone()
            self.version = self.tensor._version

    def unchanged(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "the local tensor of a field that backward needs has been modified by an inplace operation"
            )
        return self.tensor


@lru_cache(4096)
def _padded(layout: Layout, dtype: torch.dtype, device: torch.device, pad: tuple[int, ...], mode: str, value: Any):
    """Where a padded field lies; None if it takes a gather. torch's own errors."""
    plan = plan_pad(Operand(layout, dtype, device, 0), list(pad), mode, value, fn=F.pad)
    return None if plan is None else plan.layout


@dispatch.handler("pad")
def pad(func, types, args, kwargs):
    """Later, where cells of a cut field are to show in its border."""
    later = _later(*args, **kwargs)
    return at_once(func, types, args, kwargs) if later is None else later


def _later(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> ShardTensor | None:
    if input.__class__ is not ShardTensor or not pad or not all(type(n) is int and n >= 0 for n in pad):
        return None
    waiting: Any = input.__dict__.get("_deferred")
    joins = isinstance(waiting, Padded) and waiting.grad == torch.is_grad_enabled()
    if mode not in ("reflect", "replicate", "circular") and not (joins and mode == "constant" and not value):
        return None
    layout = input._layout
    by = amounts(input.ndim, pad)
    borders = tuple((d - input.ndim, mode, *both) for d, both in sorted(by.items()))
    joins = joins and not {d for d, *_ in waiting.borders} & {d for d, *_ in borders}
    if joins:
        source, steps, borders = waiting.source, waiting.steps, waiting.borders + borders
    else:
        cut = any(map(layout.is_cut, {*by, *range(2, layout.ndim)}))  # so that an exchange is to come
        if mode == "constant" or not by or not cut or not layout.is_simple or layout.partial:
            return None
        if input._local_tensor.is_inference():  # nobody counts its writes
            return None
        source, steps = input, ()
    goal = _padded(layout, input._dtype, input._device, tuple(pad), mode, value)
    if goal is None:
        return None
    made = make_wrapper(ShardTensor, goal.shape, None, None, None, input._dtype, torch.strided, input._device)
    padded = Padded(source, (*steps, (list(pad), mode, value)), borders, goal, torch.is_grad_enabled())
    if joins:
        padded.version = waiting.version
    made.__dict__ = {"_layout": goal, "_dtype": input._dtype, "_device": input._device, "_deferred": padded}
    return made


# ---------------------------------------------------------------------- who takes a field with its borders


def pick_up(function: Any, nd: int, modes: tuple[str, ...] = ("reflect", "replicate", "circular", "constant")) -> None:
    """Calls of a function over the last `nd` dims whose planner takes `borders` of these modes."""
    for alias in [function] if callable(function) else aliases(function):
        dispatch.TABLE[alias] = _picking_up(dispatch.TABLE[alias], nd, modes)


def _picking_up(handler: Callable, nd: int, modes: tuple[str, ...]) -> Callable:
    def call(func, types, args, kwargs):
        input = args[0] if args else kwargs.get("input")
        if input.__class__ is not ShardTensor or "_deferred" not in input.__dict__:
            return handler(func, types, args, kwargs)
        waiting: Any = input.__dict__["_deferred"]
        if not isinstance(waiting, Padded) or "out" in kwargs:
            return handler(func, types, args, kwargs)
        if any(d < -nd or mode not in modes for d, mode, *_ in waiting.borders):
            return handler(func, types, args, kwargs)
        field = waiting.field()
        if field.requires_grad and torch.is_grad_enabled():
            input._passed_by = True
        kwargs = {k: v for k, v in kwargs.items() if k != "input"} | {"borders": waiting.borders}
        if not torch.is_grad_enabled():
            return handler(func, types, (field, *args[1:]), kwargs)
        if hooks_on_saving():
            return handler(func, types, (field.clone(), *args[1:]), kwargs)
        with torch.autograd.graph.saved_tensors_hooks(partial(_pack, field._local_tensor), _unpack):
            return handler(func, types, (field, *args[1:]), kwargs)

    return call


def _pack(field: Tensor, tensor: Tensor) -> Any:
    return Kept(tensor) if same_memory(tensor, field) else tensor


def _unpack(kept: Any) -> Tensor:
    return kept.unchanged() if isinstance(kept, Kept) else kept


for _nd in (1, 2, 3):
    pick_up(f"conv{_nd}d", _nd)
    pick_up(f"avg_pool{_nd}d", _nd)
    for _name in (f"max_pool{_nd}d", f"max_pool{_nd}d_with_indices"):
        pick_up(_name, _nd, ("reflect", "replicate", "circular"))  # no zeros outside: nothing is larger there
pick_up(F.unfold, 2)
