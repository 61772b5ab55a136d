"""Lazy padding: `F.pad` of a sharded field is deferred until its consumer is known.

A periodic or reflecting field is padded and then convolved. Padded eagerly, a sharded field would send the rows of the
padding in one exchange and the convolution's halo in another, and would be copied in between. So `F.pad` returns a
ShardTensor whose `Deferred` value holds the field and its padding. A convolution, a pool or `F.unfold` (the rules with
`accepts_deferred=accept_lazy_pad()`) takes the field with its padding and exchanges all it reads at once; any other
read of the local tensor materializes the padded field. Padding along an unsharded dim sends nothing: where it is wide
(the frames before a video, in causal convolutions) it is not deferred, since a convolution would compute it in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import runtime
from ..._compat import has_saved_tensor_hooks
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand
from ...dispatch.registry import DeferredHandler, handler
from ...dispatch.torch_aliases import function_name
from ...dispatch.write_tracking import SavedTensor
from ...errors import ShardingError
from ...layout import Layout
from ...tensor import Deferred, ShardTensor, wrap_deferred
from ...trace_state import same_memory
from .._common.autocast import cast_like_autocast
from .pad import PadSpec, padding_by_dim, plan_pad

eager_pad = make_handler(plan_pad, partial=True, merged=True, is_torch_function=True)


class LazyPad(Deferred):
    """A field and the arguments of successive `F.pad` calls on it, each along other dims than those before."""

    repeatable = True

    def __init__(self, source: ShardTensor, steps: tuple[tuple, ...], pre_pad: PadSpec, layout: Layout, grad: bool):
        self.source, self.steps, self.pre_pad, self.layout = source, steps, pre_pad, layout
        self.version, self.grad_enabled = source._version, grad
        runtime.active.write_observers.add(self)

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and self.source.requires_grad

    def field(self) -> ShardTensor:
        """Return the field as it was when it was padded; raise if it was written since, bypassing `before_write`."""
        if self.source._version != self.version:
            raise ShardingError(
                "F.pad: the local tensor of the padded field was written after the call and before the result was "
                "used; pad a clone() of the field"
            )
        return self.source if self.grad_enabled else self.source.detach()

    def before_write(self, target: Tensor) -> None:
        """Take a snapshot of the field before a write through `target`."""
        if same_memory(target, self.source._local_tensor):
            with torch.set_grad_enabled(self.grad_enabled):
                self.source = self.field().clone()
            self.version = self.source._version

    def materialize(self) -> ShardTensor:
        """Compute the padded field. Communicates."""
        with torch.set_grad_enabled(self.grad_enabled):
            padded = self.field()
            for step in self.steps:
                padded = eager_pad(F.pad, (), (padded, *step), {})
            return padded._redistribute_to(self.layout)


@runtime.memo
def _padded_layout(
    layout: Layout, dtype: torch.dtype, device: torch.device, pad: tuple[int, ...], mode: str, value: Any
):
    """Return the layout of the padded field, None if padding falls back to a gather; raise torch's errors."""
    plan = plan_pad(Operand(layout, dtype, device, 0), list(pad), mode, value, fn=F.pad)
    return None if plan is None else plan.layout


@handler("pad")
def pad(func, types, args, kwargs):
    """Defer padding that reads cells of a sharded field; run all other padding eagerly."""
    if len(args) > 1 and len(args) + len(kwargs) > 2:  # in mode constant autocast casts nothing
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        if mode in ("reflect", "replicate"):
            pad_one = partial(F.pad, pad=[1] * len(args[1]), mode=mode)
            args = cast_like_autocast(args, pad_one, 1, *[2] * (len(args[1]) // 2 + 1))
    deferred = _defer_pad(*args, **kwargs)
    return eager_pad(func, types, args, kwargs) if deferred is None else deferred


def _defer_pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> ShardTensor | None:
    if input.__class__ is not ShardTensor or not pad or not all(type(n) is int and n >= 0 for n in pad):
        return None
    input = input._settled()
    former: Any = input._deferred
    extends = isinstance(former, LazyPad) and former.grad_enabled == torch.is_grad_enabled()
    if mode not in ("reflect", "replicate", "circular") and not (extends and mode == "constant" and not value):
        return None
    layout = input._layout
    paddings = padding_by_dim(input.ndim, pad)
    pre_pad = tuple((d - input.ndim, mode, *sides) for d, sides in sorted(paddings.items()))
    extends = extends and not {d for d, *_ in former.pre_pad} & {d for d, *_ in pre_pad}
    if extends:
        source, steps, pre_pad = former.source, former.steps, former.pre_pad + pre_pad
    else:
        exchanges = any(map(layout.is_sharded, {*paddings, *range(2, layout.ndim)}))
        if mode == "constant" or not paddings or not exchanges or not layout.is_simple or layout.partial:
            return None
        if input._local_tensor.is_inference():  # it has no version counter to detect writes
            return None
        wide = {d for d, sides in paddings.items() if not layout.is_sharded(d) and 4 * sum(sides) >= layout.shape[d]}
        if wide and wide != set(paddings):
            first, rest = (_along(input.ndim, pad, chosen) for chosen in (wide, set(paddings) - wide))
            padded = eager_pad(F.pad, (), (input, first, mode, value), {})
            return _defer_pad(padded, rest, mode, value)
        source, steps = input, ()
    goal = _padded_layout(layout, input._dtype, input._device, tuple(pad), mode, value)
    if goal is None:
        return None
    padded = LazyPad(source, (*steps, (list(pad), mode, value)), pre_pad, goal, torch.is_grad_enabled())
    if extends:
        padded.version = former.version
    return wrap_deferred(padded, input._dtype, input._device)


def _along(ndim: int, pad: Any, dims: set[int]) -> list[int]:
    """Return the padding along `dims` alone."""
    return [n if ndim - 1 - i // 2 in dims else 0 for i, n in enumerate(pad)]


# ---------------------------------------------------------------------- rules that accept a lazily padded input

MODES = ("reflect", "replicate", "circular", "constant")


def accept_lazy_pad(*modes: str) -> Mapping[type[Deferred], DeferredHandler]:
    """Return the `accepts_deferred` of a rule whose planner takes `pre_pad` of these modes, by default all."""
    return {LazyPad: partial(_run_on_field, modes or MODES)}


def _run_on_field(modes: tuple[str, ...], handler, func, types, args, kwargs):
    """Call `handler` with the field and `pre_pad`; with the padded field where that is not supported."""
    input = args[0] if args else kwargs["input"]
    padded: LazyPad = input._deferred
    name = function_name(func)
    nd = next((int(c) for c in name if c.isdigit()), 2)  # conv1d, max_pool2d_with_indices, unfold
    if "out" in kwargs or any(d < -nd or mode not in modes for d, mode, *_ in padded.pre_pad):
        return handler(func, types, args, kwargs)
    field = padded.field()
    if field.requires_grad and torch.is_grad_enabled():
        input._grad_incomplete = True
    kwargs = {k: v for k, v in kwargs.items() if k != "input"} | {"pre_pad": padded.pre_pad}
    if not torch.is_grad_enabled():
        return handler(func, types, (field, *args[1:]), kwargs)
    if has_saved_tensor_hooks():
        return handler(func, types, (field.clone(), *args[1:]), kwargs)
    with torch.autograd.graph.saved_tensors_hooks(partial(_pack, field._local_tensor), _unpack):
        return handler(func, types, (field, *args[1:]), kwargs)


def _pack(field: Tensor, tensor: Tensor) -> Any:
    return SavedTensor(tensor) if same_memory(tensor, field) else tensor


def _unpack(saved: Any) -> Tensor:
    return saved.checked_tensor() if isinstance(saved, SavedTensor) else saved
