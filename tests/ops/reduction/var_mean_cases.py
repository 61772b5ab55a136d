"""Variances by merging moments."""

import torch

from tests.harness import T, case, raises

FEW = {"layouts": 5}
SINGLE = {"tolerance": 1e-5}


def far(shape, generator):
    """Draw values of mean 1000 and deviation 1: a difference of squares loses all digits in float32."""
    return (torch.randn(shape, dtype=torch.float64, generator=generator) + 1000).float()


def still(shape, generator):
    """Fill with ones: the gradient of std at zero deviation is 0, not NaN."""
    return torch.ones(shape, dtype=torch.float64)


def tenths(shape, generator):
    """Fill with a number that fp32 rounds: equal values have no deviation, and no gradient of it."""
    return torch.full(shape, 0.1, dtype=torch.float32)


def hole(shape, generator):
    """Draw values of which one is NaN."""
    value = torch.randn(shape, generator=generator)
    value[2, 3] = torch.nan
    return value


CASES = [
    case(torch.var, T(5, 6)),
    case(torch.var, T(5, 6), False),
    case(torch.var, T(5, 6, 3), (0, 2), True, True),
    case(torch.var, T(5, 6), dim=1, correction=0),
    case(torch.var, T(5, 6), dim=0, keepdim=True, correction=2, options=FEW),
    case(torch.var, T(8, 6, dtype=torch.complex128), dim=0, options=FEW),
    case(torch.var, T(7, 5, dtype=torch.bfloat16), dim=0, options=FEW | {"tolerance": 3e-2}),
    case(torch.var, T(64, 6, fill=far), dim=0, options={"tolerance": 4e-7, "grad": False}),
    case(torch.std_mean, T(40, 12, fill=far), options={"tolerance": 4e-7, "grad": False}),
    # one device rounds the mean to float32 before it subtracts it in backward
    case(torch.var, T(64, 6, fill=far), dim=0, options=FEW | {"tolerance": 1e-5}),
    case(torch.var, T(3, 0), dim=1, options=FEW | {"grad": False}),
    case(
        torch.var,
        T(3, 4, fill="ints"),
        options=FEW
        | raises(RuntimeError, "std and var only support floating point and complex", since_2_15=NotImplementedError),
    ),
    case(torch.var, T(3, 4), dim=5, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.std, T(5, 6), dim=0),
    case(torch.std, T(5, 6), unbiased=False),
    case(torch.std, T(5, 6, fill=still), dim=0, options=FEW),
    case(torch.std, T(5, 6), dim=1, correction=1, keepdim=True),
    # sums of fp32 values are all-reduced in fp64
    case(torch.var, T(5, 6, dtype=torch.float32), options=SINGLE),
    case(torch.var, T(5, 6, 3, dtype=torch.float32), (0, 2), True, True, options=SINGLE),
    case(torch.std, T(5, 6, fill=tenths), dim=0, options=SINGLE | FEW),
    case(torch.std_mean, T(5, 6, dtype=torch.float32), dim=0, correction=0, options=SINGLE),
    case(torch.var_mean, T(4, 3, dtype=torch.complex64), dim=0, options=SINGLE | FEW),
    case(torch.var, T(3, 0, dtype=torch.float32), dim=1, options=FEW | {"grad": False}),
    case(torch.var_mean, T(1, 6, dtype=torch.float32), dim=0, correction=0, options=SINGLE | FEW),
    case(torch.var, T(5, 6, fill=hole), dim=0, options=SINGLE | FEW | {"grad": False}),
    case(torch.var_mean, T(5, 6), dim=0),
    case(torch.var_mean, T(0, 6), dim=0, options=FEW | {"grad": False}),
    case(torch.var_mean, T(4, 3, dtype=torch.complex128), options=FEW),
    case(torch.std_mean, T(5, 6, 2), dim=(-1, 0), keepdim=True),
    case(torch.std_mean, T(5, 6), False, options=FEW),
]
