"""natten's `na1d`, `na2d` and `na3d` on sharded fields: each rank runs natten's kernel on its cells and a halo.

They, and natten's modules, call one function, which is replaced once natten is imported. A window that moves in steps
(`stride`) depends on its distance from the start of the field: along such a dim the field is not sharded in the call,
and its sharding moves to another dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..._compat.patches import replace_natten
from ...tensor import ShardTensor
from ..stencil.decorators import Radii, stencil


def reach(query, key, kernel_size, stride, dilation, is_causal, additional_keys, **options: Any) -> Radii:
    """Return how far a cell reads along each dim of (batch, space..., heads, features).

    A block has at least `size * step` cells, which natten requires: dilated windows that shift inward end there.
    Samples and heads are independent, unless all of them share further keys or heads share keys.
    """
    space = query.ndim - 3
    try:
        sizes, strides, steps, causal = (_per_dim(x, space) for x in (kernel_size, stride, dilation, is_causal))
    except ValueError:
        return {}  # natten raises its error on all ranks
    found: dict[int, Any] = {}
    for dim in (d for d in range(space) if strides[d] == 1):
        width = sizes[dim] * steps[dim]
        # A causal block has a further cell: natten takes one of exactly `size` cells for plain attention.
        found[1 + dim] = (width, 0) if causal[dim] else (width // 2, width // 2)
    if additional_keys is None:
        found[0] = 0
        if query.shape[-2] == key.shape[-2]:
            found[1 + space] = 0
    return found


def _per_dim(argument: Any, space: int) -> tuple:
    if not isinstance(argument, (tuple, list)):
        return (argument,) * space
    if len(argument) != space:
        raise ValueError(argument)
    return tuple(argument)


@lru_cache(maxsize=4)
def on_shards(attention: Callable) -> Callable:
    """Return natten's function for sharded fields."""
    return stencil(radius=reach, fields=("query", "key", "value"))(attention)


def call_natten(plain: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the rule of a call with ShardTensors."""
    return on_shards(plain)(*args, **kwargs)


replace_natten(call_natten, ShardTensor)
