"""Facts about the values of tensors in a trace: which are all zeros, and which are constants of the program.

A traced tensor has no values, but some rules need them: whether a spectrum was zeros before modes were written into it,
or which nodes the edges of a graph connect. Results of `torch.zeros` and the like are therefore marked. Constants of
the program (such edges) are real tensors, and so are all results of calls on constants alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .. import trace_state
from .._compat import unwrap_functorch
from ..dispatch.arguments import map_tensors
from ..errors import Untraceable
from ..tensor import ShardTensor

ZERO_FACTORIES = {torch.zeros, torch.zeros_like, Tensor.new_zeros}
INT_FACTORIES = {torch.arange, torch.tensor, torch.as_tensor}
AS_TO_SHAPE = {Tensor.expand_as: Tensor.expand, Tensor.view_as: Tensor.view, Tensor.reshape_as: Tensor.reshape}
BACKWARD_ERROR = (
    "backward() is called inside the compiled callable. Return the loss and call backward() on it: that runs the "
    "compiled backward"
)
REFUSED = {
    Tensor.backward: BACKWARD_ERROR,
    torch.autograd.backward: BACKWARD_ERROR,
    Tensor.data.__set__: "assignment to `.data` of a tensor: write into it in place",  # type: ignore[attr-defined]
}
ZEROS_MARK = "_made_of_zeros"


class TraceMode(TorchFunctionMode):
    """Intercept all torch calls of the traced callable.

    `constants` are the real tensors that are constants of the program. If there are any, calls on constants alone are
    executed during the trace, on every rank, and so are factory calls for integers.
    """

    def __init__(self, constants: list[Tensor]):
        super().__init__()
        self._constants: Any = WeakIdKeyDictionary({t: True for t in constants})
        self._folds_constants = bool(constants)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ZERO_FACTORIES:
            out = func(*args, **kwargs)
            setattr(out, ZEROS_MARK, True)
            return out
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func in REFUSED:
            raise Untraceable(f"compile: {REFUSED[func]}")
        tensors: list[Tensor] = []
        map_tensors((args, kwargs), tensors.append)
        real = [t for t in tensors if _is_real(t)]
        if real or (self._folds_constants and func in INT_FACTORIES and not tensors):
            return self._run_constants(func, args, kwargs, tensors, real)
        try:
            return func(*args, **kwargs)  # a rule may read the mark, so it is removed after the call
        finally:
            for tensor in tensors:
                if ZEROS_MARK in tensor.__dict__:
                    delattr(tensor, ZEROS_MARK)

    def _run_constants(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], real: list[Tensor]) -> Any:
        for tensor in real:
            if tensor not in self._constants:
                raise Untraceable(
                    f"compile: {getattr(func, '__name__', func)} reads a tensor of shape {tuple(tensor.shape)} that is "
                    "neither an argument nor part of a module: the program would always use its current value"
                )
        if func in AS_TO_SHAPE and len(args) == 2 and _is_real(args[0]):  # only the shape of the other one is used
            func, args, tensors = AS_TO_SHAPE[func], (args[0], args[1].shape), real
        if len(real) < len(tensors):
            if _is_real(tensors[0]) and _is_in_place(func, kwargs):
                raise NotImplementedError("write into an index tensor that is a constant of the program")
            return func(*args, **kwargs)
        with trace_state.concrete():
            out = func(*args, **kwargs)
        if tensors or not out.is_floating_point():
            map_tensors(out, self._add_constant)
            return out
        return func(*args, **kwargs)  # a floating-point factory call: no index, so it is traced

    def _add_constant(self, tensor: Tensor) -> Tensor:
        self._constants[tensor] = True
        return tensor


def _is_in_place(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or name[:3] == "__i"
        or "out" in kwargs
    )


def _is_real(tensor: Tensor) -> bool:
    if tensor.__class__ is not ShardTensor:
        return trace_state.is_concrete(unwrap_functorch(tensor))
    local = tensor.__dict__.get("_local_tensor")  # read from __dict__, so that a lazy value is not materialized
    return local is not None and trace_state.is_concrete(local)


def is_zeros(tensor: Tensor) -> bool:
    """Return whether a plain tensor was created as zeros and has not been used since."""
    return ZEROS_MARK in tensor.__dict__
