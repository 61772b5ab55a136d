"""unique, searchsorted, isin, histograms and bincount."""

import torch

from tests.harness import T, case, raises

NAN = float("nan")
FEW = {"layouts": 6}
TWO = {"layouts": 2}
ALL = {"return_inverse": True, "return_counts": True}


def I(*shape, high=4, **more):  # noqa: E743
    return T(*shape, fill="ints", high=high, **more)


def ordered(shape, generator):
    return torch.randint(-4, 5, shape, generator=generator).double().sort(-1)[0] / 2


def halves(shape, generator):
    return torch.randint(-5, 6, shape, generator=generator).double() / 2


def shuffle(shape, generator):
    return torch.argsort(halves_for_sorter(shape), -1)


def halves_for_sorter(shape):
    return halves(shape, torch.Generator().manual_seed(5))


def by_sorter(table, values, sorter, **kwargs):
    return torch.searchsorted(table, values, sorter=sorter, **kwargs)


def nans(shape, generator):
    x = torch.randint(3, shape, generator=generator).double()
    return torch.where(torch.rand(shape, generator=generator) < 0.3, NAN, x)


def unordered(x, **kwargs):
    """Call unique without an order and reconstruct the input from the inverse."""
    values, inverse = torch.unique(x, sorted=False, return_inverse=True, **kwargs)
    full = values.full_tensor() if hasattr(values, "full_tensor") else values
    at = inverse.full_tensor() if hasattr(inverse, "full_tensor") else inverse
    return full.sort()[0], full[at]


V = {"name": "unique unordered"}
S = T(7, fill=ordered, grad=False)

CASES = [
    case(torch.unique, I(9)),
    case(torch.unique, I(3, 5), **ALL),
    case(torch.Tensor.unique, I(2, 3, 2), return_inverse=True, options=FEW),
    case(torch.unique, T(8, fill=halves, grad=False), return_counts=True, options=FEW),
    case(torch.unique, T(3, 5, fill="distinct", grad=False), **ALL),
    case(torch.unique, I(4, 6, high=30), **ALL),
    case(torch.unique, I(24, high=2), **ALL, options=FEW),  # few values are gathered on every rank
    case(torch.unique, I(12, 2, high=4), dim=0, **ALL),
    case(torch.unique, T(3, 7, fill=halves, grad=False), dim=1, **ALL, options=FEW),
    case(torch.unique, T(6, fill="bool"), **ALL, options=FEW),
    case(torch.unique, I(0), **ALL, options=TWO),
    case(torch.unique, I(), **ALL, options=TWO),
    case(lambda x: torch.unique(x, **ALL)[0::2], T(7, fill=nans, grad=False), options=FEW | {"name": "unique of nans"}),
    case(unordered, T(7, fill=nans, grad=False), options=FEW | V),
    case(unordered, I(3, 4), options=FEW | V),
    case(torch.unique, I(6, 2, high=2), dim=0, **ALL),
    case(torch.unique, I(2, 5, high=2), dim=1, **ALL),
    case(torch.Tensor.unique, I(2, 4, 2, high=2), dim=-2, options=FEW),
    case(torch.unique, I(0, 3), dim=0, **ALL, options=TWO),
    case(torch.unique, I(3, 0), dim=0, options=TWO | raises(RuntimeError, "There are 0 sized dimensions")),
    case(torch.unique, I(3), dim=1, options=TWO | raises(IndexError, "Dimension out of range")),
    case(torch.unique_consecutive, I(9, high=2), **ALL),
    case(torch.unique_consecutive, I(3, 5, high=2), **ALL),
    case(torch.Tensor.unique_consecutive, I(2, 2, 3, high=2), return_counts=True, options=FEW),
    case(torch.unique_consecutive, T(7, fill=nans, grad=False), **ALL, options=FEW),
    case(torch.unique_consecutive, I(8, 2, high=2), dim=0, **ALL),
    case(torch.unique_consecutive, I(2, 7, high=2), dim=-1, return_inverse=True),
    case(torch.unique_consecutive, I(0), **ALL, options=TWO),
    case(torch.unique_consecutive, I(0, 2), dim=0, **ALL, options=TWO),
    case(torch.unique_consecutive, I(2, 0), dim=0, options=TWO | raises(RuntimeError, "There are 0 sized dimensions")),
    case(torch.unique_consecutive, I(), **ALL, options=TWO),
    case(torch.searchsorted, S, T(5, fill=halves, grad=False)),
    case(torch.searchsorted, S, T(2, 3, fill=halves, grad=False), right=True),
    case(torch.searchsorted, S, T(4, fill=halves, grad=False), side="right", out_int32=True, options=FEW),
    case(torch.searchsorted, S, T(fill=halves, grad=False), options=FEW),
    case(torch.searchsorted, S, 0.5, options=FEW),
    case(torch.searchsorted, T(3, 6, fill=ordered, grad=False), T(3, 4, fill=halves, grad=False)),
    case(torch.searchsorted, T(2, 3, 4, fill=ordered, grad=False), T(2, 3, 6, fill=halves, grad=False), options=FEW),
    case(
        torch.searchsorted,
        T(3, 6, fill=ordered, grad=False),
        T(2, 4, fill=halves, grad=False),
        options=TWO | raises(RuntimeError, "boundaries tensor should be 1 dimension"),
    ),
    case(
        torch.searchsorted,
        S,
        T(4, fill=halves, grad=False),
        side="left",
        right=True,
        options=TWO | raises(RuntimeError, "side and right can't be set to opposites"),
    ),
    case(
        by_sorter,
        T(6, fill=lambda s, g: halves_for_sorter(s), grad=False),
        T(4, fill=halves, grad=False),
        T(6, fill=shuffle),
    ),
    case(
        by_sorter,
        T(2, 5, fill=lambda s, g: halves_for_sorter(s), grad=False),
        T(2, 3, fill=halves, grad=False),
        T(2, 5, fill=shuffle),
        right=True,
        options=FEW,
    ),
    case(
        by_sorter,
        T(2, 5, fill=lambda s, g: halves_for_sorter(s), grad=False, shard_dims=(0,)),
        T(2, 3, fill=halves, grad=False),
        T(2, 5, fill=lambda s, g: torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 9]])),
        options=TWO | raises(RuntimeError, "sorter index out of range"),
    ),
    case(torch.bucketize, T(3, 4, fill=halves, grad=False), S),
    case(torch.bucketize, T(5, fill=halves, grad=False), T(40, fill=ordered, grad=False), right=True, out_int32=True),
    case(torch.bucketize, 0.5, S, options=FEW),
    case(
        torch.bucketize,
        T(40, fill=halves, grad=False),
        T(4, fill=ordered, grad=False),
        options={"try_partial": False} | FEW,
    ),
    case(
        torch.bucketize,
        T(4, 3, fill=halves, grad=False),
        T(4, fill=ordered, shard_dims=()),
        options={"no_messages": True, "try_partial": False},
    ),
    case(torch.isin, I(3, 5, high=9), I(4, high=9)),
    case(torch.isin, I(3, high=9), I(4, 2, high=9), invert=True),
    case(torch.isin, T(6, fill=halves, grad=False), T(3, fill=halves, grad=False), assume_unique=False, options=FEW),
    case(torch.isin, I(4, 3), I(4, 3), options={"layouts": 8}),  # torch takes contiguous tensors only
    case(torch.isin, I(5), 2, options=FEW),
    case(torch.isin, 2, I(5), invert=True, options=FEW),
    case(torch.isin, I(5, shard_dims=(0,)), I(3, shard_dims=()), options={"no_messages": True}),
    case(torch.histc, T(3, 7, grad=False), 5),
    case(torch.histc, T(9, grad=False), bins=4, min=-1, max=1.5),
    case(torch.Tensor.histc, T(6, fill="positive", grad=False), 3, options=FEW),
    case(
        torch.histc, T(6, fill=lambda s, g: torch.ones(s).double(), grad=False), 4, options=FEW | {"try_partial": False}
    ),
    case(torch.histc, T(6, fill=nans, grad=False), 4, options=FEW | raises(RuntimeError, "is not finite")),
    case(torch.histc, T(0, grad=False), 4, options=TWO),
    case(
        torch.histc,
        T(4, grad=False),
        4,
        2,
        1,
        options=TWO | raises(RuntimeError, "torch.histc: max must be larger than min"),
    ),
    case(torch.histogram, T(3, 7, grad=False), 5),
    case(torch.histogram, T(9, grad=False), 4, range=(-1.0, 1.0), weight=T(9, grad=False), options=FEW),
    case(torch.histogram, T(9, grad=False), T(5, fill=lambda s, g: torch.linspace(-1, 2, 5).double(), grad=False)),
    case(torch.histogram, T(4, 3, grad=False), 4, weight=T(4, 3, fill="positive", grad=False), density=True),
    case(torch.Tensor.histogram, T(4, grad=False), 3, density=True, options=FEW),
    case(
        torch.histogram,
        T(4, fill=lambda s, g: torch.ones(s).double(), grad=False),
        3,
        options=FEW | {"try_partial": False},
    ),
    case(
        torch.histogram,
        T(4, grad=False),
        3,
        weight=T(3, grad=False),
        options=TWO | raises(RuntimeError, "if weight tensor is provided it should have the same shape"),
    ),
    case(torch.histogram, T(0, grad=False), 3, options=TWO),
    case(torch.histogramdd, T(7, 2, grad=False), [2, 3]),
    case(torch.histogramdd, T(3, 4, 2, grad=False), 2, weight=T(3, 4, fill="positive", grad=False), density=True),
    case(torch.histogramdd, T(5, 1, grad=False), [3], range=[-1.0, 1.0], options=FEW),
    case(
        torch.histogramdd,
        T(6, 2, grad=False),
        [T(3, fill=ordered, grad=False), T(4, fill=ordered, grad=False)],
        options=FEW,
    ),
    case(
        torch.histogramdd,
        T(5, 2, grad=False),
        [3],
        options=TWO | raises(RuntimeError, "The size of bins must be equal to the innermost dimension"),
    ),
    case(torch.bincount, I(9, high=6)),
    case(torch.bincount, I(9, high=6), minlength=9, options=FEW),
    case(torch.bincount, I(7, high=6), T(7, grad=False)),
    case(
        torch.Tensor.bincount,
        I(7, dtype=torch.uint8),
        T(7, grad=False, dtype=torch.float32),
        options=FEW | {"tolerance": 1e-6},
    ),
    case(torch.bincount, I(0), minlength=2, options=TWO),
    case(torch.bincount, I(0), T(0, grad=False), options=TWO),
    case(
        torch.bincount,
        T(5, fill=lambda s, g: torch.tensor([1, 2, -1, 0, 3])),
        options=FEW | raises(RuntimeError, "only supports 1-d non-negative integral inputs"),
    ),
    case(torch.bincount, I(2, 2), options=TWO | raises(RuntimeError, "only supports 1-d non-negative integral inputs")),
    case(
        torch.bincount,
        I(3),
        T(4, grad=False),
        options=TWO | raises(RuntimeError, "weights should be 1-d and have the same length"),
    ),
]
