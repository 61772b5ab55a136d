"""Compile kernels with Triton, if it is installed. It is imported with the first kernel, as the import takes long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import runtime

ALIGNMENT = 16  # bytes; Triton compiles other code for tensors that start elsewhere


@lru_cache(maxsize=16)
def jit(function: Callable) -> Any:
    """Return the Triton kernel of a function, or None without Triton. Sets `tl` in the function's module."""
    try:
        import triton
        import triton.language
    except ImportError:  # builds of torch without CUDA do not include it
        return None
    function.__globals__["tl"] = triton.language
    return triton.jit(function)


class Launch:
    """A kernel with its grid and all arguments except the tensors, which come first and are given by each call.

    Numbers and constants are in the order of the kernel's parameters.

    Triton reads every argument of every launch to find the compiled kernel, which takes most of its host time. Numbers
    do not change here, so dtypes and alignment of the tensors determine it: it is looked up once and then called
    directly, with addresses. The tensors of a virtual rank are brought into memory first.
    """

    def __init__(self, kernel: Callable, grid: tuple[int, ...], *numbers: float, **constants: int | bool):
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._rest = (*numbers, *constants.values())
        self._compiled: dict[tuple, Callable[..., Any] | None] = {}  # by device and dtypes, of aligned tensors

    def __call__(self, *tensors: Tensor) -> None:
        virtual = runtime.active.virtual
        if virtual is None:
            return self._run(tensors)
        with virtual.in_memory(*tensors):
            self._run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(tensors)
        kinds = device, *[t.dtype for t in tensors]
        addresses = [t.data_ptr() for t in tensors]
        aligned = not any([a % ALIGNMENT for a in addresses])
        ready = self._compiled.get(kinds) if aligned else None
        if ready is not None:
            try:
                return ready(*addresses, *self._rest)
            except TypeError:  # a version of Triton whose compiled kernels take other arguments
                self._compiled[kinds] = None
        made = jit(self._kernel)[self._grid](*tensors, *self._numbers, **self._constants)
        if aligned and kinds not in self._compiled:
            whole = (*self._grid, 1, 1)[:3]
            self._compiled[kinds] = made[whole] if hasattr(made, "__getitem__") else None


def on_cuda(*tensors: Tensor) -> bool:
    """Return whether all tensors are plain CUDA tensors. Tensors of a trace have no memory to launch a kernel on."""
    return all(t.is_cuda and t.__class__ is Tensor for t in tensors)
