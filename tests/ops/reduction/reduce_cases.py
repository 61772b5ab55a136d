"""Reductions: sums, means, products, truth and counts."""

import math

import torch

from tests.harness import T, case

FEW = {"layouts": 5}
FREE = {"free": True}  # linear: addends stay where they are


def zeros(shape, generator):
    """Values with a few zeros among them: products and their gradients must not divide by one."""
    return torch.randn(shape, dtype=torch.float64, generator=generator) * (torch.rand(shape, generator=generator) > 0.2)


def holes(shape, generator):
    """Values with NaNs among them."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    return value.masked_fill(torch.rand(shape, generator=generator) < 0.3, math.nan)


def into(fn):
    """`fn` through `out=`."""

    def call(x, *args, **kwargs):
        return fn(x.detach(), *args, **kwargs, out=fn(x.detach(), *args, **kwargs) * 0)

    call.__name__ = f"{fn.__name__} out="
    return call


CASES = [
    case(torch.sum, T(5, 6, 7), how=FREE),
    case(torch.sum, T(5, 6, 7), dim=1, how=FREE),
    case(torch.sum, T(5, 6, 7), dim=(0, -1), keepdim=True, how=FREE),
    case(torch.Tensor.sum, T(4), how=FREE),
    case(torch.sum, T(), dim=-1, keepdim=True, how=FREE | FEW),
    case(torch.sum, T(3, 0, 4), dim=1, how=FREE | FEW),
    case(torch.sum, T(3, 5), dim=(), how=FREE | FEW),
    case(torch.sum, T(3, 5), axis=1, keepdims=True, how=FREE | FEW),
    case(torch.sum, T(3, 5), dim=2, how=FEW),
    case(torch.sum, T(3, 5), dim=(1, -1), how=FEW),
    case(torch.sum, T(3, 5, fill="ints"), dim=0, how=FREE | FEW),
    case(torch.sum, T(3, 5, fill="bool"), how=FREE | FEW),
    case(torch.sum, T(3, 5, dtype=torch.complex128), dim=0, how=FREE | FEW),
    case(torch.sum, T(3, 5, dtype=torch.float32), dim=0, dtype=torch.float64, how=FREE | FEW | {"tolerance": 1e-6}),
    case(into(torch.sum), T(3, 5), dim=0, how=FEW),
    case(lambda x: x.reshape(3, 20).sum(1), T(3, 4, 5), how=FREE | {"name": "sum of a merged dim", "partial": False}),
    case(torch.nansum, T(5, 6, fill=holes), dim=0),
    case(torch.nansum, T(5, 6, fill=holes), how=FEW),
    case(torch.mean, T(5, 6, 7), how=FREE),
    case(torch.mean, T(5, 6, 7), dim=(0, 2), how=FREE),
    case(torch.mean, T(5, 6), -1, True, how=FREE),
    case(torch.mean, T(3, 0, 4), dim=1, how=FEW),
    case(torch.mean, T(3, 5, fill="ints"), how=FEW),
    case(torch.mean, T(3, 5, fill="ints"), dim=0, dtype=torch.float64, how=FREE | FEW),
    case(torch.mean, T(3, 5, dtype=torch.complex128), dim=0, how=FREE | FEW),
    case(torch.mean, T(6, 5, dtype=torch.bfloat16), dim=0, how=FREE | FEW | {"tolerance": 2e-2}),
    case(torch.nanmean, T(5, 6, fill=holes), dim=1, keepdim=True),
    case(torch.nanmean, T(5, 6, 2, fill=holes), how=FEW),
    case(torch.prod, T(5, 6)),
    case(torch.prod, T(5, 6, fill=zeros), dim=0),
    case(torch.prod, T(2, 3, fill=zeros)),
    case(torch.prod, T(2, 6, 3, fill=zeros), dim=1, keepdim=True),
    case(torch.prod, T(3, 5, fill="ints"), dim=1, how=FEW),
    case(torch.prod, T(3, 5, dtype=torch.complex128), dim=1, how=FEW),
    case(torch.prod, T(3, 0), dim=1, how=FEW),
    case(torch.prod, T(), how=FEW),
    case(torch.prod, T(6, 5, dtype=torch.float16), dim=0, how=FEW | {"tolerance": 2e-2}),
    case(torch.any, T(5, 6, fill="bool")),
    case(torch.any, T(3, 6, fill="bool"), dim=1),
    case(torch.any, T(3, 6, fill="bool"), dim=(), how=FEW),
    case(torch.all, T(3, 2, fill="bool"), dim=1, keepdim=True),
    case(torch.all, T(3, 2, 2, fill="bool"), dim=(0, 2), how=FEW),
    case(torch.all, T(3, 2, fill="ints", dtype=torch.uint8), dim=0, how=FEW),
    case(torch.all, T(0, 2, fill="bool"), dim=0, how=FEW),
    case(torch.Tensor.any, T(3, 4), how=FEW),
    case(torch.count_nonzero, T(5, 6, fill="ints"), how=FREE),
    case(torch.count_nonzero, T(5, 6, fill="ints"), dim=(0,), how=FREE | FEW),
    case(torch.count_nonzero, T(5, 6, fill=zeros), dim=1, how=FEW),
]
