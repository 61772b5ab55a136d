"""Triton, where it is installed. It takes long to import, so that is done when a kernel is first wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor


@cache
def jit(function: Callable) -> Any:
    """The kernel that Triton makes of a function, or None without Triton. It finds Triton's language as `tl`."""
    try:
        import triton
        import triton.language
    except ImportError:  # torch without CUDA comes without it
        return None
    function.__globals__["tl"] = triton.language
    return triton.jit(function)


def on_cuda(*tensors: Tensor) -> bool:
    """Whether kernels can work on these tensors: on a device, with memory, which a trace's tensors have not."""
    return all(t.is_cuda and t.__class__ is Tensor for t in tensors)
