"""In-place forms that are computed out of place and then written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...dispatch.registry import handler


def register_inplace(*names: str) -> None:
    """Register in-place methods (`"renorm_"`) by their out-of-place functions (`torch.renorm`).

    If gradients are needed, the function runs on a copy: its backward may read its input, which the write changes.
    """
    for name in names:
        handler(name)(_write_result_of(getattr(torch, name[:-1])))


def _write_result_of(function: Callable) -> Callable:
    def run(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        target, *rest = args
        target._check_writable()
        source = target.clone() if target.requires_grad else target
        return target._write(function(source, *rest, **kwargs))

    return run
