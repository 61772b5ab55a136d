"""Softmax, log-softmax, log-sum-exp, also along sharded dims."""

import math

import torch
import torch.nn.functional as F

from tests.harness import T, case, raises

FEW = {"layouts": 5}


def masked(shape, generator):
    """Draw values with a masked half of -inf, which may be all of a shard."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    value[: shape[0] // 2] = -math.inf
    return value


def large(shape, generator):
    return torch.randn(shape, dtype=torch.float64, generator=generator) * 1000


CASES = [
    case(torch.softmax, T(5, 6), 0),
    case(torch.softmax, T(5, 6, 3), -1),
    case(torch.softmax, T(5, 6, fill=large), 0, options=FEW),
    case(torch.softmax, T(6, 5, fill=masked), 0),
    case(torch.softmax, T(6, 5, fill=masked), 1, options=FEW),
    case(torch.softmax, T(5, 6, fill="ints"), 0, dtype=torch.float64, options=FEW),
    case(torch.softmax, T(5, 6, fill="ints"), 0, options=FEW | raises(NotImplementedError, "not implemented for")),
    case(torch.softmax, T(5, 6), 2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.softmax, T(0, 6), 0, options=FEW),
    case(torch.softmax, T(), 0, options=FEW),
    case(torch.softmax, T(6, 5, dtype=torch.float16), 0, options=FEW | {"tolerance": 2e-3}),
    case(torch.Tensor.softmax, T(5, 6), dim=0, options=FEW),
    case(torch.special.softmax, T(5, 6), 1, options=FEW),
    case(F.softmax, T(5, 6), 0),
    case(F.softmax, T(5, 6, dtype=torch.float32), dim=1, dtype=torch.float64, options=FEW | {"tolerance": 1e-6}),
    case(F.softmin, T(5, 6), dim=0),
    case(torch.nn.Softmax(dim=1), T(5, 6), options=FEW | {"name": "nn.Softmax"}),
    case(torch.log_softmax, T(5, 6), 0),
    case(torch.log_softmax, T(6, 5, fill=masked), 0, options=FEW),
    case(torch.log_softmax, T(5, 6, fill=large), 1, options=FEW),
    case(F.log_softmax, T(2, 5, 6), dim=-1),
    case(
        lambda x: x.reshape(3, 20).softmax(1),
        T(3, 4, 5),
        options={"name": "softmax of a merged dim", "try_partial": False},
    ),
    case(torch.logsumexp, T(5, 6), 0),
    case(torch.logsumexp, T(5, 6, 3), (0, -1), True),
    case(torch.logsumexp, T(6, 5, fill=masked), 0),
    case(torch.logsumexp, T(5, 6, fill=large), 1, options=FEW),
    case(torch.logsumexp, T(5, 6, fill="ints"), 1, options=FEW | {"tolerance": 1e-6}),
    case(torch.logsumexp, T(5, 6, dtype=torch.complex128), 0, options=FEW),
    case(torch.logsumexp, T(6, 5, dtype=torch.float16), 0, options=FEW | {"tolerance": 2e-3}),
    case(torch.special.logsumexp, T(5, 6), 0, options=FEW),
    # ---- rows of -inf alone give zeros
    case(torch._safe_softmax, T(5, 6), 0),
    case(torch._safe_softmax, T(6, 5, fill=masked), 0, options=FEW),
    case(torch._safe_softmax, T(6, 5, fill=masked), 1, options=FEW),
    case(  # the sum of a Partial is rounded in float32
        torch._safe_softmax,
        T(6, 5, dtype=torch.float32, grad=False),
        -1,
        dtype=torch.float64,
        options=FEW | {"tolerance": 1e-6},
    ),
    case(torch._safe_softmax, T(6, 5), 2, options=FEW | raises(IndexError, "Dimension out of range")),
    # ---- the operators behind the functions
    case(torch.ops.aten._safe_softmax.default, T(6, 5, fill=masked), 1, options=FEW),
    case(torch.ops.aten.softmax.int, T(5, 6), 0, options=FEW),
    case(torch.ops.aten.log_softmax.int, T(5, 6), 0, options=FEW),
]
