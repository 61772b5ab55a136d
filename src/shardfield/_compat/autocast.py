"""The state of autocast, and functions that it leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

# torch 2.11-2.15: unlike the public function it needs no device type, and costs a few nanoseconds.
autocast_on = torch._C._is_any_autocast_enabled


def autocast_state() -> tuple:
    """Return the autocast dtypes, as part of cache keys; () when autocast is off."""
    if not autocast_on():
        return ()
    kinds = ("cpu", torch.accelerator.current_accelerator().type) if torch.accelerator.is_available() else ("cpu",)
    return tuple(torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in kinds)


def _outside_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `function` as it is outside autocast.

    Autocast to one half-precision dtype refuses to join tensors of the other. Messages are packed, and shards joined,
    for calls that one device accepts; and ranks with nothing to join would not raise.

    torch 2.11-2.15: the guard switches autocast off for all devices at once; no public name.
    """

    @functools.wraps(function)
    def run(*args):
        if not autocast_on():
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)

    return run


# Assembly of local tensors. The last one packs tensors of one dtype into a flat one in one call (torch 2.11-2.15, no
# public name).
concatenate = _outside_autocast(torch.cat)
stack = _outside_autocast(torch.stack)
index_copy = _outside_autocast(torch.index_copy)
flatten_tensors = _outside_autocast(torch._C._nn.flatten_dense_tensors)
