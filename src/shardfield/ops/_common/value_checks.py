"""Raise torch's errors about values on all ranks, though only some ranks hold such values."""

from __future__ import annotations

from torch import Tensor

from ... import runtime
from ...comm import collectives
from ...comm.autograd_collectives import Groups


def raise_if_any_rank(bad: Tensor, over: Groups, error: type[Exception], why: str) -> None:
    """Raise on all ranks the error that torch raises on one device if any element of `bad` is set on any rank.

    On the CPU only: on other devices torch does not raise but stops the device, and reading a flag would stall it.
    """
    if bad.device.type == "cpu":
        flag = bad.any()
        for group in over:
            flag = collectives.all_reduce(flag, group, "max")
        raise_if(flag, error, why)


def raise_if(flag: Tensor, error: type[Exception], why: str) -> None:
    """Raise if `flag`, which is equal on all ranks, is set. A traced program checks the flag on every run."""
    if runtime.active.tracer is not None:
        runtime.active.tracer.raise_if(flag, error, why)
    elif not runtime.active.fake_tensors and flag:
        raise error(why)
