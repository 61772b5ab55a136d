"""`lockstep()`: check that all ranks make the same calls with the same arguments.

Ranks that make different calls hang or mix up their data. The check takes a small message per call, so it is off by
default; switch it on for a program that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .. import runtime
from ..comm.consensus import Consensus
from ..dispatch.arguments import mesh_of
from ..dispatch.torch_aliases import function_name

# Arguments of these types are compared by `repr`; of all others only the type is compared.
_COMPARABLE_TYPES = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    slice,
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
    np.generic,
    Placement,
    DeviceMesh,
)


@contextmanager
def lockstep() -> Iterator[None]:
    """Compare every torch call on ShardTensors over all ranks before it runs; each takes one small message.

    `redistribute`, `full_tensor` and reads of values that communicate are compared too. If ranks differ in the
    function, the layouts or other arguments, all of them raise a ShardingError that shows the call of each rank. All
    ranks must enter the context, or none. Backward is not checked.
    """
    with runtime.observing(observer=_Lockstep(runtime.active.observer)):
        yield


class _Lockstep:
    """An observer that checks each call and passes it on to the observer that was active before, if any."""

    def __init__(self, before: Any):
        self._outer, self._inside = before, False

    @property
    def _row(self) -> Any:
        return None if self._outer is None else self._outer._row

    def run_call(self, func: Any, found: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        outermost, self._inside = not self._inside, True
        try:
            if outermost:
                call = f"{function_name(func)}{_describe(args)}" + (f" {_describe(kwargs)}" if kwargs else "")
                Consensus.start(mesh_of(args, kwargs), call, always=True).wait()
            if self._outer is not None:
                return self._outer.run_call(func, found, types, args, kwargs)
            return found(func, types, args, kwargs)
        finally:
            self._inside = not outermost


def _describe(value: Any) -> str:
    """Describe an argument."""
    if isinstance(value, Tensor):
        layout = getattr(value, "_layout", None)
        return f"<{tuple(value.shape) if layout is None else layout} {value.dtype}>"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_describe(v) for v in value) + ")"
    return repr(value) if isinstance(value, _COMPARABLE_TYPES) else f"<{type(value).__name__}>"
