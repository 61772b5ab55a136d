"""Find calls whose results lose a sharding, an event that `explain` lists and `strict` refuses, or become unbalanced.

The promise: a result at least as large as a rank's share of its sharded operands stays sharded over the mesh axes they
were sharded on. A result that is Partial over an axis, or deferred, has not lost it yet: it keeps `_pending_shares`,
and the call that makes it Replicate loses the sharding. A gradient has the placement of its value, so it needs no
examination of its own.

A result is unbalanced if a rank has at least twice an even share of it, and of no operand: few ranks compute what
follows. A crop may want this, so `strict` does not refuse it.

The decision follows from layouts, so it is the same on all ranks. While calls are observed, every call is examined;
otherwise only calls that made a plan: shardfield warns once for each function, so calls with a cached plan need no
examination.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import runtime
from ..debug import explain
from ..errors import ShardingError
from ..layout import UNBALANCED, Layout, outer_shard_sizes
from .torch_aliases import function_name

USER_LEVEL_MODULES = (
    "shardfield.models.",
    "shardfield.train.",
)  # a warning may point at a line of these modules, as at user code

# Functions whose results take no values from operands, or each from an operand of its own.
UNRELATED = frozenset(
    "new_zeros new_ones new_empty new_full new_tensor new_empty_strided broadcast_tensors grad backward "
    "embedding_renorm_".split()
)
# Functions that read the values of the first operand alone.
OF_FIRST = frozenset("expand_as view_as reshape_as type_as".split())


def shares_of(operands: Iterable[Any]) -> dict[int, int]:
    """Return by mesh axis the largest share, in elements, that a rank has of the operands sharded over this axis.

    A dim with fewer indices than ranks does not count: some of them have no share of it.
    """
    found: dict[int, int] = {}
    for tensor in operands:
        layout: Layout = tensor._layout
        axes = [
            axis
            for factor in (f for d in layout.dims for f in d)
            if factor.axes and factor.size >= len(factor.shard_sizes) > 1
            for axis in layout.nontrivial_axes(factor.axes)
        ]
        if axes:
            share = -(-layout.numel // math.prod(layout.axis_sizes[a] for a in axes))
            for axis in axes:
                found[axis] = max(found.get(axis, 0), share)
        for axis, share in (tensor._pending_shares or {}).items():
            found[axis] = max(found.get(axis, 0), share)
    return found


def lost_axes(shares: Mapping[int, int], result: Any) -> tuple[list[int], dict[int, int]]:
    """Return the mesh axes over which a result loses the sharding of its operands, and the shares that are pending.

    A result with fewer elements than the axis has ranks cannot be shared among them, so it loses nothing. Nor does one
    of fewer than `Runtime.min_scattered` elements on a rank: it is too small to be worth a message.
    """
    layout: Layout = result._layout
    lost, pending = [], {}
    is_small = layout.numel < runtime.active.min_scattered * math.prod(layout.axis_sizes[a] for a in layout.shard_axes)
    for axis, share in shares.items():
        if layout.numel < max(share, layout.axis_sizes[axis]) or axis in layout.shard_axes:
            continue
        if axis in layout.partial_axes or result._deferred is not None:
            pending[axis] = share
        elif not is_small:
            lost.append(axis)
    return lost, pending


def _lost_by_plain(shares: Mapping[int, int], layout: Layout) -> list[int]:
    """Return the mesh axes whose sharding a plain tensor lacks, into which sharded values were written."""
    if layout.numel < runtime.active.min_scattered:
        return []
    return [axis for axis, share in shares.items() if layout.numel >= max(share, layout.axis_sizes[axis])]


def imbalances(layout: Layout) -> dict[int, float]:
    """Return mesh axis -> the largest shard over it in even shares, of axes over which this is at least `UNBALANCED`.

    Of two axes that shard one dim, the inner one has what the outer one does not explain. A dim with fewer indices than
    ranks does not count.
    """
    found: dict[int, float] = {}
    for factor in (f for d in layout.dims for f in d if f.is_unbalanced):
        outer = 1.0
        for number, axis in enumerate(factor.axes, 1):
            sizes = outer_shard_sizes(factor.shard_sizes, math.prod(layout.axis_sizes[a] for a in factor.axes[number:]))
            largest = max(sizes) * len(sizes) / factor.size
            if largest >= UNBALANCED * outer:
                found[axis] = largest / outer
            outer = largest
    return found


def unbalanced_axes(shares: Mapping[int, int], operands: Iterable[Any], result: Any) -> dict[int, float]:
    """Return the `imbalances` of a result that its operands do not have.

    Tensors of which no rank has `Runtime.min_scattered` elements are too small to count, and so is a result that is
    smaller than a rank's share of the operands.
    """
    if not shares or result._layout.numel < max(shares.values()):
        return {}
    before = {axis for tensor in operands for axis in _imbalances_of_large(tensor._layout)}
    return {axis: times for axis, times in _imbalances_of_large(result._layout).items() if axis not in before}


def _imbalances_of_large(layout: Layout) -> dict[int, float]:
    found = imbalances(layout)
    ranks = math.prod(layout.axis_sizes[a] for a in layout.shard_axes)
    is_large = layout.numel * math.prod(found.values()) >= runtime.active.min_scattered * ranks
    return found if is_large else {}


def examine(func: Any, args: tuple, kwargs: Mapping[str, Any] | None, out: Any) -> None:
    """Record, warn of or refuse lost shardings of the results of a call on ShardTensors; record unbalanced results."""
    layout: Layout | None = getattr(out, "_layout", None)
    if (
        layout is not None
        and layout.is_sharded_over_all_axes
        and out._pending_shares is None
        and not imbalances(layout)
        and not (kwargs and "out" in kwargs)
    ):
        return  # most results: no axis is left to be lost
    name = function_name(func)
    shares = shares_of(sharded_tensors(args[:1] if name in OF_FIRST else (args, kwargs)))
    if not shares or name in UNRELATED:
        return
    lost: dict[int, int] = {}
    unbalanced: dict[int, float] = {}
    target, given = args[0] if name == "__setitem__" else out, (kwargs or {}).get("out")
    for plain in _plain_tensors((target if args and target is args[0] else None, given)):  # that were written
        layout = Layout.replicate(next(iter(sharded_tensors((args, kwargs))))._layout.mesh, plain.shape)
        for axis in _lost_by_plain(shares, layout):
            lost[axis] = lost.get(axis, 0) + plain.numel() * plain.dtype.itemsize
            worst = layout
    for result in sharded_tensors((target, given if given is not target else None)):
        axes, pending = lost_axes(shares, result)
        if pending or result._pending_shares:
            result._pending_shares = pending or None
        for axis in axes:
            lost[axis] = lost.get(axis, 0) + result._layout.numel * result.dtype.itemsize
            worst = result._layout
        found = unbalanced_axes(shares, sharded_tensors((args, kwargs)), result)
        if found:
            unbalanced, skewed = found, result._layout
    if unbalanced:
        times = {axis_name(skewed, a): n for a, n in unbalanced.items()}
        explain.record_unbalanced(times)
        warn_once(
            name,
            "unbalanced",
            f"unbalanced over axis {_quoted(times)}: one rank has {math.prod(times.values()):.3g} times "
            f"an even share of its result {skewed}. explain() lists such calls.",
        )
    if lost and explain.record_lost({axis_name(worst, a): n for a, n in sorted(lost.items())}):
        report(name, worst, sorted(lost), max(lost.values()))


def examined(found: Callable, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run and examine a call."""
    out = found(func, types, args, kwargs)
    examine(func, args, kwargs, out)
    return out


def report(name: str, layout: Layout, axes: list[int], nbytes: int) -> None:
    """Refuse a lost sharding inside `strict()`, else warn once for each function."""
    over = _quoted(axis_name(layout, a) for a in axes)
    text = f"lost sharding over axis {over}: each rank has its result as {layout}"
    if runtime.active.strict_sharding:
        raise ShardingError(f"{name}: strict() refuses it: {text}")
    warn_once(name, "lost sharding", f"{text}, {nbytes} bytes. explain() lists such calls, strict() refuses them.")


def warn_once(name: str, event: str, text: str) -> None:
    """Warn of an event once for each function, and once for each line of the user's."""
    warned, level = runtime.active.warned, user_stacklevel()
    frame = sys._getframe(level - 1)
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"  # calls made inside a call have its line
    if name in warned or f"{name}: {event}" in warned or line in warned:
        return
    warned.update((f"{name}: {event}", line))
    warnings.warn(f"shardfield: {name} {text}", stacklevel=level)


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(map(repr, names))


def axis_name(layout: Layout, axis: int) -> str:
    """Return the name of a mesh axis, or its number."""
    return (layout.mesh.mesh_dim_names or tuple(map(str, range(layout.mesh.ndim))))[axis]


def sharded_tensors(value: Any) -> list[Any]:
    """Return the ShardTensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value] if hasattr(value, "_layout") else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
        return [t for v in value for t in sharded_tensors(v)]
    return []


def _plain_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the plain tensors among values and in tuples and lists of them."""
    flat = [t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,))]
    return [t for t in flat if t.__class__ is Tensor]


def user_stacklevel() -> int:
    """Return the stack level of the user's line that made the call, above the frames of torch and this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "shardfield.")) or name.startswith(USER_LEVEL_MODULES):
            break
        level, frame = level + 1, frame.f_back
    return level
