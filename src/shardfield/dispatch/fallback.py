"""Fall back to a gather for a call without a rule. Correct but costly, so it warns once per function."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import runtime
from .._compat import OpOverload
from ..debug import explain
from ..errors import ShardingError
from ..layout import Layout
from ..tensor import ShardTensor, wrap
from .arguments import map_tensors, mesh_of, to_full_tensor
from .copied_views import CopiedView
from .lost_sharding import user_stacklevel
from .torch_aliases import function_name
from .write_tracking import set_copied_view


def gather_fallback(func, types, args, kwargs):
    """Gather the operands, run the function on the full tensors, and return a Replicate result."""
    name = function_name(func)
    mesh = mesh_of(args, kwargs)
    inside: list[Any] = []

    def note(value):
        if isinstance(value, ShardTensor):
            inside.append(value)
        return value

    map_tensors((args, kwargs), note)
    sharded = [t for t in inside if not t._layout.is_replicated]
    nbytes = sum(t._layout.numel * t._local_tensor.element_size() for t in sharded)
    if sharded:
        if runtime.active.strict_depth:
            raise ShardingError(
                f"{name}: strict() allows no gather, and there is no rule for {[t._layout for t in sharded]}"
            )
        explain.record_outcome("gather")
        if name not in runtime.active.warned:
            runtime.active.warned.add(name)
            warnings.warn(
                f"shardfield: no rule for {name} on {sharded[0]._layout}: {nbytes} bytes are gathered on every rank. "
                f"Add one with @shardfield.rule or ShardTensor.register_function_handler.",
                stacklevel=user_stacklevel(),
            )

    copies: list[tuple[ShardTensor, Any, Any]] = []  # operands that the function may write into, and their versions
    may_write = _may_write(func, kwargs)

    def to_full(value):
        if not isinstance(value, (ShardTensor, DTensor)):
            return value
        full = to_full_tensor(value)
        if may_write and isinstance(value, ShardTensor):
            full = full.clone()
            copies.append((value, full, full.clone() if full.is_inference() else full._version))
        return full

    out = func(*map_tensors(args, to_full), **map_tensors(kwargs or {}, to_full))
    written: dict[int, ShardTensor] = {}  # by the id of the copy
    for target, copy, before in copies:
        if not torch.equal(copy, before) if copy.is_inference() else copy._version != before:
            written[id(copy)] = target._write(wrap(copy, Layout.replicate(mesh, copy.shape)))

    def wrap_full(value):
        if value.is_nested:
            raise ShardingError(f"{name}: a ShardTensor cannot be nested; call it on full_tensor()")
        return written[id(value)] if id(value) in written else wrap(value, Layout.replicate(mesh, value.shape))

    out = map_tensors(out, wrap_full)
    if sharded and _returns_view(func):
        return _as_copied_view(out, func, args, kwargs)
    return out


def _returns_view(func: Any) -> bool:
    """Return whether an aten operator returns a view of its first tensor."""
    returned: Any = func._schema.returns if isinstance(func, OpOverload) else ()
    return len(returned) == 1 and returned[0].alias_info is not None and not returned[0].alias_info.is_write


def _as_copied_view(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a copy, where one device has a view: a write into it is refused, and it shows those into its source."""
    if isinstance(out, ShardTensor) and isinstance(args[0], ShardTensor):
        set_copied_view(out, True)
        CopiedView(out, args[0], lambda source: func(source, *args[1:], **(kwargs or {})))
    return out


def _may_write(func: Any, kwargs: Any) -> bool:
    """Return whether a function writes into an argument, by its name or its schema."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") and name != "__invert__"
    in_place = in_place and name not in ("__index__", "__int__", "__iter__")
    mutable = isinstance(func, OpOverload) and func._schema.is_mutable
    return in_place or mutable or name == "__setitem__" or "out" in (kwargs or {})
