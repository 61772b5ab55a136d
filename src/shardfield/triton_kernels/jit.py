"""Compile kernels with Triton, if it is installed. It is imported with the first kernel, as the import takes long."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor


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


def on_cuda(*tensors: Tensor) -> bool:
    """Return whether all tensors are plain CUDA tensors. Tensors of a trace have no memory to launch a kernel on."""
    return all(t.is_cuda and t.__class__ is Tensor for t in tensors)
