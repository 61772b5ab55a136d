"""Largest and smallest elements: values, global indices, and gradients among ties."""

import math

import torch

from tests.harness import T, case, raises

FEW = {"layouts": 5}


def ties(shape, generator):
    """Draw few different values, so that most extremes occur several times, on several ranks."""
    return torch.randint(3, shape, generator=generator).double()


def holes(shape, generator):
    value = torch.randint(3, shape, generator=generator).double()
    return value.masked_fill(torch.rand(shape, generator=generator) < 0.2, math.nan)


def lowest(shape, generator):
    """Fill with the identity of the reduction, which an empty shard contributes."""
    return torch.full(shape, -math.inf, dtype=torch.float64)


def into(x, dim):
    """Call max with `out=` sharded tensors."""
    x = x.detach()
    first = torch.max(x, dim)
    out = (first[0] * 0, first[1] * 0)
    return torch.max(x, dim, out=out)


CASES = [
    case(torch.max, T(5, 6)),
    case(torch.max, T(5, 6, fill=ties)),
    case(torch.min, T(3, 2, 4, fill=ties)),
    case(torch.min, T(5, 6, fill=holes), options=FEW),
    case(torch.max, T(5, 6), dim=0),
    case(torch.max, T(5, 6, fill=ties), 1, True),
    case(torch.min, T(5, 6, fill=ties), dim=-2),
    case(torch.max, T(5, 6, fill=holes), dim=0),
    case(torch.max, T(5, 6, fill=lowest), dim=0),
    case(torch.max, T(5, 6, fill="ints"), dim=0, options=FEW),
    case(torch.min, T(5, 6, fill="bool"), dim=1, options=FEW),
    case(torch.max, T(5, 6, dtype=torch.float16), dim=1, options=FEW | {"tolerance": 1e-3}),
    case(torch.max, T(5, 6, dtype=torch.int16, fill="ints"), dim=1, options=FEW),
    case(torch.max, T(3, 0, 4), dim=1, options=FEW | raises(IndexError, "to have non-zero size")),
    case(torch.max, T(0), options=FEW | raises(RuntimeError, "Expected reduction dim to be specified")),
    case(torch.max, T(3, 4), dim=2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.max, T(3, 4, dtype=torch.complex128), options=FEW | raises(NotImplementedError, "not implemented for")),
    case(torch.max, T(), options=FEW),
    case(torch.max, T(), dim=0, options=FEW),
    case(torch.max, T(5, 1, 6), T(4, 1)),
    case(torch.min, T(5, 6), other=T(5, 6)),
    case(into, T(5, 6), 1, options=FEW),
    case(lambda x: x.reshape(3, 20).max(1), T(3, 4, 5, fill=ties), options={"name": "max of a merged dim"}),
    case(torch.amax, T(5, 6, fill=ties), dim=0),
    case(torch.amin, T(3, 4, 5, fill=ties), dim=(0, 2), keepdim=True),
    case(torch.amax, T(5, 6, fill=ties)),
    case(torch.amax, T(5, 6, fill="ints"), dim=1, options=FEW),
    case(torch.amax, T(0, 3), dim=1, options=FEW),
    case(torch.amax, T(0, 3), dim=0, options=FEW | raises(IndexError, "to have non-zero size")),
    # torch 2.11 has no derivative of aminmax
    case(torch.aminmax, T(5, 6, fill=ties), dim=0, options={"grad": torch.__version__ >= "2.13"}),
    case(torch.aminmax, T(5, 6, fill=ties), options={"grad": torch.__version__ >= "2.13"}),
    case(torch.aminmax, T(5, 6, fill="ints"), dim=1, keepdim=True, options=FEW),
    case(torch.aminmax, T(5, 6, fill="bool"), options=FEW),
    case(torch.argmax, T(5, 6)),
    case(torch.argmax, T(3, 2, 5, fill=ties)),
    case(torch.argmin, T(3, 2, 5, fill=ties), keepdim=True),
    case(torch.argmin, T(5, 6, fill=ties), dim=1),
    case(torch.argmax, T(5, 6, fill=holes), dim=0, keepdim=True),
    case(torch.argmax, T(5, 6, fill="ints"), dim=0, options=FEW),
    case(
        torch.argmax,
        T(3, 2, fill="bool"),
        options=FEW | raises(RuntimeError, "argmax(): does not support bool input", since_2_15=NotImplementedError),
    ),
    case(lambda x: x.reshape(20, 3).argmax(), T(4, 5, 3, fill=ties), options={"name": "argmax of a merged dim"}),
]
