"""Calls on lists of tensors, as optimizers, averages of weights and gradient scalers make them.

A `_foreach_` function calls the function of one tensor for each entry of its lists, so that each has a layout of its
own, and plain tensors may be among them. A fused optimizer step runs on the local tensors, in one call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._compat.lists import FOREACH, FUSED_STEPS, unscale_all_
from ...dispatch.arguments import map_tensors, to_full_tensor
from ...dispatch.registry import handler
from ...errors import ShardingError
from ...tensor import ShardTensor

# Functions of one tensor that have another name, or other arguments, than those of lists.
SINGLE: dict[str, Any] = {
    "maximum": torch.Tensor.clamp_min,  # takes numbers too
    "maximum_": torch.Tensor.clamp_min_,
    "minimum": torch.Tensor.clamp_max,
    "minimum_": torch.Tensor.clamp_max_,
    "norm": torch.linalg.vector_norm,
    "powsum": lambda x, ord=2, dtype=None: x.abs().pow(ord).sum(dtype=dtype),
    "pow": torch.pow,  # a number to the power of tensors, too
}
OPTIONS = ("alpha", "value", "ord", "dtype", "non_blocking")


def for_each(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Call the function of one tensor for each entry of the lists."""
    name = func.__name__.removeprefix("_foreach_")
    options = {key: value for key, value in kwargs.items() if key in OPTIONS}
    columns = [*args, *(value for key, value in kwargs.items() if key not in OPTIONS)]
    if name.startswith(("addcmul", "addcdiv")) and len(columns) == 4:  # one factor, or one for each tensor
        options["value"] = columns.pop()
    single = SINGLE.get(name) or getattr(torch.Tensor, name)
    count = next(len(column) for column in columns if isinstance(column, (list, tuple)))
    out = [
        single(*(_entry(column, i) for column in columns), **{k: _factor(v, i) for k, v in options.items()})
        for i in range(count)
    ]
    return out if name.endswith("_") else tuple(out)


def _entry(column: Any, i: int) -> Any:
    return column[i] if isinstance(column, (list, tuple)) else column


def _factor(value: Any, i: int) -> Any:
    return value[i].item() if isinstance(value, torch.Tensor) and value.ndim else _entry(value, i)


def fused_step(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run a fused optimizer step on the local tensors; gradients and states have the layouts of their parameters."""
    params, *others = args
    for column in others:
        for param, value in zip(params, column, strict=False):  # a list may be empty
            sharded = [t._layout for t in (param, value) if isinstance(t, ShardTensor)]
            scalar = not isinstance(value, ShardTensor) and value.numel() == 1  # the number of the step
            if sharded and not scalar and (len(sharded) < 2 or sharded[0] != sharded[1]):
                raise ShardingError(
                    f"{func.__name__}: gradients and states must have the layout of their parameter, found {sharded}"
                )
    for value in (t for column in args for t in column if isinstance(t, ShardTensor)):
        if value._layout.partial:
            raise ShardingError(f"{func.__name__}: a Partial parameter cannot be updated by shards: {value._layout}")
        value._check_writable()
    locals_ = map_tensors(args, lambda t: t._local_tensor if isinstance(t, ShardTensor) else t)
    return func(*locals_, **map_tensors(kwargs, lambda t: to_full_tensor(t) if isinstance(t, ShardTensor) else t))


def unscale(func: Any, types: Any, args: tuple, kwargs: dict) -> None:
    """Multiply gradients by `inv_scale`; set `found_inf` on all ranks where one element of a gradient is not finite."""
    grads, found_inf, inv_scale = args
    plain = [g for g in grads if not isinstance(g, ShardTensor)]
    if plain:
        func(plain, found_inf, inv_scale)
    for grad in (g for g in grads if isinstance(g, ShardTensor)):
        finite = to_full_tensor(grad.isfinite().all())
        found_inf.copy_(torch.maximum(found_inf, finite.logical_not().to(found_inf)))
        grad.mul_(inv_scale)


for _function in FOREACH:
    handler(_function)(for_each)
for _function in FUSED_STEPS:
    handler(_function)(fused_step)
handler(unscale_all_)(unscale)
