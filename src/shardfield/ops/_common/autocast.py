"""Apply autocast to ops that are composed of other ops here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)


def autocast_to_fp32(*tensors: Any) -> list[Any]:
    """Return the arguments of a function that autocast runs in fp32, with half-precision tensors cast if it is enabled.

    Autocast recognizes torch's function, but not the ops that it is composed of here.
    """

    def cast(value: Any) -> Any:
        half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
        return value.float() if half and torch.is_autocast_enabled(value.device.type) else value

    return [cast(t) for t in tensors]
