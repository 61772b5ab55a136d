"""What is known of tensors while a program is traced: which are zeros, and which are there already.

No value of a traced tensor can be looked at. But code asks: whether a spectrum that takes in modes was zeros, and where
the edges of a graph lead. So what is made as zeros is marked; and tensors that are part of the program (such edges) are
real ones, and so is all that is made of them alone.
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
    "backward() is called inside: return the loss and call backward() on what the program returns, which has a "
    "compiled backward too"
)
REFUSED = {
    Tensor.backward: BACKWARD_ERROR,
    torch.autograd.backward: BACKWARD_ERROR,
    Tensor.data.__set__: "a tensor is given other data: write into it in place",  # type: ignore[attr-defined]
}
ZEROS_MARK = "_made_of_zeros"


class TraceMode(TorchFunctionMode):
    """Sees all calls that the traced callable makes.

    `constants` are the real tensors that are part of the program. Where there are any, calls on them alone are made at
    once, on every rank, and so are those that make ranges of integers.
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
            return func(*args, **kwargs)  # which may look at the mark
        finally:
            for tensor in tensors:
                if ZEROS_MARK in tensor.__dict__:
                    delattr(tensor, ZEROS_MARK)

    def _run_constants(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], real: list[Tensor]) -> Any:
        for tensor in real:
            if tensor not in self._constants:
                raise Untraceable(
                    f"compile: {getattr(func, '__name__', func)} reads a tensor of shape {tuple(tensor.shape)} that is "
                    "neither an argument nor part of a module: a program would keep the one that is there now"
                )
        if func in AS_TO_SHAPE and len(args) == 2 and _is_real(args[0]):  # the other one only tells a shape
            func, args, tensors = AS_TO_SHAPE[func], (args[0], args[1].shape), real
        if len(real) < len(tensors):
            if _is_real(tensors[0]) and _is_in_place(func, kwargs):
                raise NotImplementedError("an index that is part of the program is written into")
            return func(*args, **kwargs)
        with trace_state.concrete():
            out = func(*args, **kwargs)
        if tensors or not out.is_floating_point():
            map_tensors(out, self._add_constant)
            return out
        return func(*args, **kwargs)  # no index: made when the program runs

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
    local = tensor.__dict__.get("_local_tensor")  # what is not there yet is not asked for
    return local is not None and trace_state.is_concrete(local)


def is_zeros(tensor: Tensor) -> bool:
    """Whether a plain tensor was made as zeros and nothing has touched it since."""
    return ZEROS_MARK in tensor.__dict__
