"""Masks: results whose size depends on the data."""

from operator import getitem

import torch

from tests.harness import T, case, raises

S = slice
OPTIONS = {"layouts": 6}
M = dict(fill="bool", dtype=torch.bool)


def none(shape, generator):
    return torch.zeros(shape, dtype=torch.bool)


def every(shape, generator):
    return torch.ones(shape, dtype=torch.bool)


def two_of_five(shape, generator):
    return torch.tensor([True, False, False, True, False])


def three_of_five(shape, generator):
    return torch.tensor([True, False, True, False, True])


def sparse(shape, generator):
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x * (torch.rand(shape, generator=generator) > 0.6)


def at(*index, shape=(5, 6, 4), options=OPTIONS):
    return case(getitem, T(*shape), index if len(index) != 1 else index[0], options=options)


CASES = [
    at(T(5, 6, 4, **M)),
    at(T(5, 6, **M)),
    at(T(5, **M)),
    at(S(None), T(6, **M)),
    at(S(None), T(6, 4, **M)),
    at(S(None), S(None), T(4, **M)),
    at(2, T(6, **M)),
    at(S(1, 3), T(6, **M), S(None, None, 2)),
    at(T(5, **M), 1),
    at(T(5, fill=two_of_five), S(None), torch.tensor([0, 3])),
    at(
        T(5, fill=three_of_five),
        S(None),
        torch.tensor([0, 3]),
        options=OPTIONS | raises(IndexError, "indexing tensors could not be broadcast"),
    ),
    at(T(5, fill=three_of_five), T(3, fill="ints", high=4)),
    at(T(5, 6, 4, fill=none, dtype=torch.bool)),
    at(T(5, 6, 4, fill=every, dtype=torch.bool)),
    at(T(5, 5, **M), options=OPTIONS | raises(IndexError, "does not match the shape of the indexed tensor")),
    at([True, False, True, True, False]),
    case(lambda x: x[x > 0], T(5, 6), options=OPTIONS | {"name": "x[x > 0]"}),
    case(lambda x: x.reshape(4, 30)[x.reshape(4, 30) > 0], T(4, 5, 6), options={"name": "x[x > 0] of a merged dim"}),
    case(torch.masked_select, T(5, 6), T(5, 6, **M), options=OPTIONS),
    case(torch.Tensor.masked_select, T(5, 6, 4), T(5, 6, 4, **M), options=OPTIONS),
    case(torch.masked_select, T(), T(**M), options=OPTIONS),
    case(
        torch.masked_select,
        T(5, 6),
        T(5, 6, fill="ints"),
        options=OPTIONS | raises(RuntimeError, "masked_select: expected BoolTensor for mask"),
    ),
    case(torch.nonzero, T(5, 6, 4, fill=sparse, grad=False), options=OPTIONS),
    case(torch.nonzero, T(5, 6, fill="bool"), as_tuple=True, options=OPTIONS),
    case(torch.Tensor.nonzero, T(5, fill="ints", high=2), options=OPTIONS),
    case(torch.nonzero, T(fill=every, grad=False), options=OPTIONS),
    case(torch.nonzero, T(fill=every, grad=False), as_tuple=True, options=OPTIONS),
    case(torch.nonzero, T(4, 0, fill="bool"), options=OPTIONS),
    case(torch.argwhere, T(5, 6, fill="bool"), options=OPTIONS),
    case(torch.where, T(5, 6, fill="bool"), options=OPTIONS),
    case(torch.count_nonzero, T(5, 6, fill=sparse, grad=False), options=OPTIONS),
    case(torch.count_nonzero, T(5, 6, 4, fill=sparse, grad=False), dim=(0, 2), options=OPTIONS),
    case(torch.Tensor.count_nonzero, T(5, 6, fill="ints", high=2), 1, options=OPTIONS),
]
