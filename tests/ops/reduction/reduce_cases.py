"""Reductions: sums, means, products, truth and counts."""

import math

import torch

from tests.harness import T, case, raises

FEW = {"layouts": 5}
NO_MESSAGES = {"no_messages": True}  # linear: the result is Partial


def zeros(shape, generator):
    """Draw values with a few zeros: gradients of products must not divide by them."""
    return torch.randn(shape, dtype=torch.float64, generator=generator) * (torch.rand(shape, generator=generator) > 0.2)


def holes(shape, generator):
    """Draw values with some NaNs."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    return value.masked_fill(torch.rand(shape, generator=generator) < 0.3, math.nan)


def into(fn):
    """Return `fn` with `out=`."""

    def call(x, *args, **kwargs):
        return fn(x.detach(), *args, **kwargs, out=fn(x.detach(), *args, **kwargs) * 0)

    call.__name__ = f"{fn.__name__} out="
    return call


CASES = [
    case(torch.sum, T(5, 6, 7), options=NO_MESSAGES),
    case(torch.sum, T(5, 6, 7), dim=1, options=NO_MESSAGES),
    case(torch.sum, T(5, 6, 7), dim=(0, -1), keepdim=True, options=NO_MESSAGES),
    case(torch.Tensor.sum, T(4), options=NO_MESSAGES),
    case(torch.sum, T(), dim=-1, keepdim=True, options=NO_MESSAGES | FEW),
    case(torch.sum, T(3, 0, 4), dim=1, options=NO_MESSAGES | FEW),
    case(torch.sum, T(3, 5), dim=(), options=NO_MESSAGES | FEW),
    case(torch.sum, T(3, 5), axis=1, keepdims=True, options=NO_MESSAGES | FEW),
    case(torch.sum, T(3, 5), dim=2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(
        torch.sum,
        T(3, 5),
        dim=(1, -1),
        options=FEW | raises(RuntimeError, "appears multiple times in the list of dims"),
    ),
    case(torch.sum, T(3, 5, fill="ints"), dim=0, options=NO_MESSAGES | FEW),
    case(torch.sum, T(3, 5, fill="bool"), options=NO_MESSAGES | FEW),
    case(torch.sum, T(3, 5, dtype=torch.complex128), dim=0, options=NO_MESSAGES | FEW),
    case(
        torch.sum,
        T(3, 5, dtype=torch.float32),
        dim=0,
        dtype=torch.float64,
        options=NO_MESSAGES | FEW | {"tolerance": 1e-6},
    ),
    case(into(torch.sum), T(3, 5), dim=0, options=FEW),
    case(
        lambda x: x.reshape(3, 20).sum(1),
        T(3, 4, 5),
        options=NO_MESSAGES | {"name": "sum of a merged dim", "try_partial": False},
    ),
    case(torch.nansum, T(5, 6, fill=holes), dim=0),
    case(torch.nansum, T(5, 6, fill=holes), options=FEW),
    case(torch.mean, T(5, 6, 7), options=NO_MESSAGES),
    case(torch.mean, T(5, 6, 7), dim=(0, 2), options=NO_MESSAGES),
    case(torch.mean, T(5, 6), -1, True, options=NO_MESSAGES),
    case(torch.mean, T(3, 0, 4), dim=1, options=FEW),
    case(
        torch.mean,
        T(3, 5, fill="ints"),
        options=FEW | raises(RuntimeError, "mean(): could not infer output dtype", since_2_15=NotImplementedError),
    ),
    case(torch.mean, T(3, 5, fill="ints"), dim=0, dtype=torch.float64, options=NO_MESSAGES | FEW),
    case(torch.mean, T(3, 5, dtype=torch.complex128), dim=0, options=NO_MESSAGES | FEW),
    case(torch.mean, T(6, 5, dtype=torch.bfloat16), dim=0, options=NO_MESSAGES | FEW | {"tolerance": 2e-2}),
    case(torch.nanmean, T(5, 6, fill=holes), dim=1, keepdim=True),
    case(torch.nanmean, T(5, 6, 2, fill=holes), options=FEW),
    case(torch.prod, T(5, 6)),
    case(torch.prod, T(5, 6, fill=zeros), dim=0),
    case(torch.prod, T(2, 3, fill=zeros)),
    case(torch.prod, T(2, 6, 3, fill=zeros), dim=1, keepdim=True),
    case(torch.prod, T(3, 5, fill="ints"), dim=1, options=FEW),
    case(torch.prod, T(3, 5, dtype=torch.complex128), dim=1, options=FEW),
    case(torch.prod, T(3, 0), dim=1, options=FEW),
    case(torch.prod, T(), options=FEW),
    case(torch.prod, T(6, 5, dtype=torch.float16), dim=0, options=FEW | {"tolerance": 2e-2}),
    case(torch.any, T(5, 6, fill="bool")),
    case(torch.any, T(3, 6, fill="bool"), dim=1),
    case(torch.any, T(3, 6, fill="bool"), dim=(), options=FEW),
    case(torch.all, T(3, 2, fill="bool"), dim=1, keepdim=True),
    case(torch.all, T(3, 2, 2, fill="bool"), dim=(0, 2), options=FEW),
    case(torch.all, T(3, 2, fill="ints", dtype=torch.uint8), dim=0, options=FEW),
    case(torch.all, T(0, 2, fill="bool"), dim=0, options=FEW),
    case(torch.Tensor.any, T(3, 4), options=FEW),
    case(torch._is_all_true, T(3, 2, 2, fill="bool")),
    case(torch._is_any_true, T(3, 2, fill="bool"), options=FEW),
    case(torch._is_all_true, T(3, 2, fill="ints"), options=FEW | raises(RuntimeError, "kBool")),
    case(torch.count_nonzero, T(5, 6, fill="ints"), options=NO_MESSAGES),
    case(torch.count_nonzero, T(5, 6, fill="ints"), dim=(0,), options=NO_MESSAGES | FEW),
    case(torch.count_nonzero, T(5, 6, fill=zeros), dim=1, options=FEW),
]
