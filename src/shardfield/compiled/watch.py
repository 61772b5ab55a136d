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

from .. import tracing
from .._compat import within_transforms
from ..errors import Untraceable
from ..operands import map_tensors
from ..tensor import ShardTensor

ZEROS = {torch.zeros, torch.zeros_like, Tensor.new_zeros}
COUNTS = {torch.arange, torch.tensor, torch.as_tensor}
BY_SHAPE = {Tensor.expand_as: Tensor.expand, Tensor.view_as: Tensor.view, Tensor.reshape_as: Tensor.reshape}
BACKWARD = (
    "backward() is called inside: return the loss and call backward() on what the program returns, which has a "
    "compiled backward too"
)
REFUSED = {
    Tensor.backward: BACKWARD,
    torch.autograd.backward: BACKWARD,
    Tensor.data.__set__: "a tensor is given other data: write into it in place",  # type: ignore[attr-defined]
}
MARK = "_made_of_zeros"


class Watch(TorchFunctionMode):
    """Sees all calls that the traced callable makes.

    `known` are the real tensors that are part of the program. Where there are any, calls on them alone are made at
    once, on every rank, and so are those that make ranges of integers.
    """

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self._known: Any = WeakIdKeyDictionary({t: True for t in known})
        self._folds = bool(known)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ZEROS:
            out = func(*args, **kwargs)
            setattr(out, MARK, True)
            return out
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func in REFUSED:
            raise Untraceable(f"compile: {REFUSED[func]}")
        tensors: list[Tensor] = []
        map_tensors((args, kwargs), tensors.append)
        real = [t for t in tensors if _is_real(t)]
        if real or (self._folds and func in COUNTS and not tensors):
            return self._on_real(func, args, kwargs, tensors, real)
        try:
            return func(*args, **kwargs)  # which may look at the mark
        finally:
            for tensor in tensors:
                if MARK in tensor.__dict__:
                    delattr(tensor, MARK)

    def _on_real(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], real: list[Tensor]) -> Any:
        for tensor in real:
            if tensor not in self._known:
                raise Untraceable(
                    f"compile: {getattr(func, '__name__', func)} reads a tensor of shape {tuple(tensor.shape)} that is "
                    "neither an argument nor part of a module: a program would keep the one that is there now"
                )
        if func in BY_SHAPE and len(args) == 2 and _is_real(args[0]):  # the other one only tells a shape
            func, args, tensors = BY_SHAPE[func], (args[0], args[1].shape), real
        if len(real) < len(tensors):
            if _is_real(tensors[0]) and _writes(func, kwargs):
                raise NotImplementedError("an index that is part of the program is written into")
            return func(*args, **kwargs)
        with tracing.concrete():
            out = func(*args, **kwargs)
        if tensors or not out.is_floating_point():
            map_tensors(out, self._remember)
            return out
        return func(*args, **kwargs)  # no index: made when the program runs

    def _remember(self, tensor: Tensor) -> Tensor:
        self._known[tensor] = True
        return tensor


def _writes(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or name[:3] == "__i"
        or "out" in kwargs
    )


def _is_real(tensor: Tensor) -> bool:
    if tensor.__class__ is not ShardTensor:
        return tracing.is_real(within_transforms(tensor))
    local = tensor.__dict__.get("_local_tensor")  # what is not there yet is not asked for
    return local is not None and tracing.is_real(local)


def is_zeros(tensor: Tensor) -> bool:
    """Whether a plain tensor was made as zeros and nothing has touched it since."""
    return MARK in tensor.__dict__
