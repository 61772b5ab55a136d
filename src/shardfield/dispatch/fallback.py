"""Fall back to a gather for a call without a rule. Correct but costly, so it warns once per function."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.tensor import DTensor

from .. import runtime
from ..debug import explain
from ..errors import ShardingError
from ..layout import Layout
from ..tensor import ShardTensor, wrap
from .arguments import map_tensors, mesh_of, to_full_tensor
from .lost_sharding import user_stacklevel
from .torch_aliases import function_name


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

    def to_full(value):
        return to_full_tensor(value) if isinstance(value, (ShardTensor, DTensor)) else value

    written = _in_place_target(func, args, kwargs)
    plain_args, plain_kwargs = map_tensors(args, to_full), map_tensors(kwargs or {}, to_full)
    if written is not None:
        copy = plain_args[0].clone()
        func(copy, *plain_args[1:], **plain_kwargs)
        return written._write(wrap(copy, Layout.replicate(mesh, copy.shape)))
    out = func(*plain_args, **plain_kwargs)
    return map_tensors(out, lambda t: wrap(t, Layout.replicate(mesh, t.shape)))


def _in_place_target(func, args, kwargs):
    """Return the ShardTensor that an in-place call writes, or None."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") and name != "__invert__"
    in_place = in_place and name not in ("__index__", "__int__", "__iter__")
    if (in_place or name == "__setitem__") and args and isinstance(args[0], ShardTensor):
        return args[0]
    return None
