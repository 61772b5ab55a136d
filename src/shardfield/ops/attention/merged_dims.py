"""Attention on merged dims, in the order in which ranks hold their entries: tokens of tiles, windows of tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from ...dispatch.arguments import as_operand
from ...dispatch.registry import Handler
from ...layout import DimSharding, Layout, shard_sizes_of
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap

OPERANDS = ("query", "key", "value")


def run_merged(run: Handler, func, types, args, kwargs, named: dict[str, Any]) -> Any:
    """Run the rule `run` on operands that may have merged dims. The result has the queries' layout.

    Attention does not depend on the order of a batch, nor, without a mask, causal order and dropout, on the order of
    rows and keys. Such a dim is taken in the order in which ranks hold it, and nothing is exchanged. Otherwise the rule
    unmerges the dim, and the result is redistributed.
    """
    tensors: dict[str, Any] = {name: named.get(name) for name in OPERANDS}
    layouts = [t._layout if isinstance(t, ShardTensor) and t.ndim > 1 else None for t in tensors.values()]
    if all(x is None or x.is_simple for x in layouts):
        return run(func, types, args, kwargs)
    batch = _free_batch_dim(layouts, named)
    if batch is not None:
        return _run_batch_as_held(run, func, types, named, batch)
    if all(x is None or len(x.dims[-2]) == 1 for x in layouts):
        return run(func, types, args, kwargs)
    as_held = _order_is_free(layouts, named)
    if as_held:
        for (name, tensor), layout in zip(tensors.items(), layouts, strict=True):
            if layout is not None:
                named[name] = wrap(tensor._local_tensor, layout.with_dim(-2, _as_held(layout.dims[-2])))
    out, query = run(func, types, (), named), layouts[0]
    if query is None or set(out._layout.axes_of(-2)) != set(query.axes_of(-2)):
        return out
    as_query = out._layout.with_dim(-2, *query.dims[-2])
    return wrap(out._local_tensor, as_query) if as_held else out._redistribute_to(as_query)


def _order_is_free(layouts: Sequence[Layout | None], named: dict[str, Any]) -> bool:
    """Return whether the rows may be taken in any order, and the result of the rule has the sharding of the queries."""
    if named.get("attn_mask") is not None or named.get("is_causal") or named.get("dropout_p"):
        return False
    query, key, value = layouts
    if (key and key.dims[-2]) != (value and value.dims[-2]):
        return False
    used = {a for x in layouts if x is not None for a in x.nontrivial_axes(x.shard_axes)}
    return used <= (set() if query is None else {a for d in range(query.ndim - 1) for a in query.axes_of(d)})


def _free_batch_dim(layouts: Sequence[Layout | None], named: dict[str, Any]) -> int | None:
    """Return a merged dim before the rows, counted from the end, that all operands have, and a mask may have.

    Dropout draws numbers by the global index, and heads that share keys are consecutive.
    """
    query, *others = layouts
    if query is None or named.get("dropout_p") or named.get("enable_gqa"):
        return None
    for dim in range(-query.ndim, -2):
        merged, axes = query.dims[dim], query.axes_of(dim)
        if len(merged) == 1 or list(axes) != sorted(axes):  # the rule nests axes in order
            continue
        if any(x is None or x.ndim < -dim or x.dims[dim] != merged for x in others):
            continue
        mask = named.get("attn_mask")
        of_mask = mask._layout if isinstance(mask, ShardTensor) and mask.ndim >= -dim else None
        if of_mask is None or not set(axes) & (set(of_mask.shard_axes) - set(of_mask.axes_of(dim))):
            return dim
    return None


def _run_batch_as_held(run: Handler, func, types, named: dict[str, Any], dim: int) -> Any:
    """Run the rule with a merged batch dim as a simple one, and its part of the mask in the same order."""
    merged, given = named["query"]._layout.dims[dim], dict(named)
    held = _as_held(merged)
    for name in OPERANDS:
        given[name] = wrap(named[name]._local_tensor, named[name]._layout.with_dim(dim, held))
    mask = named.get("attn_mask")
    if mask is not None and mask.ndim >= -dim and mask.shape[dim] > 1:
        local, layout = as_operand(mask, named["query"]._layout.mesh, merged=True)
        in_order = layout.with_dim(dim, *merged)
        given["attn_mask"] = wrap(redistribute(local, layout, in_order), in_order.with_dim(dim, held))
    out = run_merged(run, func, types, (), given, given)
    layout = out._layout.with_dim(dim, held)
    return wrap(out._redistribute_to(layout)._local_tensor, layout.with_dim(dim, *merged))


def _as_held(factors: Sequence[DimSharding]) -> DimSharding:
    """Return a merged dim as a simple one, with its entries in the order of ranks."""
    sizes = [math.prod(parts) for parts in product(*(shard_sizes_of(f) for f in factors))]
    axes = tuple(a for f in factors for a in f.axes)
    return DimSharding(math.prod(f.size for f in factors), axes, tuple(sizes) if axes else ())
