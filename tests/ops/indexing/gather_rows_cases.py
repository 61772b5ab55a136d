"""Index tensors: advanced indexing, index_select, gather, take."""

from operator import getitem

import torch

from tests.harness import T, case, double_backward, raises

S = slice
OPTIONS = {"layouts": 6}


def I(*shape, high=5, low=0):  # noqa: E743
    def fill(shape, generator):
        return torch.randint(low, high, shape, generator=generator)

    return T(*shape, fill=fill, dtype=torch.int64)


def at(*index, shape=(5, 6, 4), options=OPTIONS):
    return case(getitem, T(*shape), index if len(index) != 1 else index[0], options=options)


CASES = [
    case(
        lambda x, i: torch.gather(x, 0, i.view(-1, 1).expand(-1, 3)), T(5, 3), I(9), options=OPTIONS | {"name": "rows"}
    ),
    case(
        lambda x, i: torch.gather(x, 1, i.view(1, -1, 1).expand(2, -1, 3)),
        T(2, 5, 3),
        I(4),
        options=OPTIONS | {"name": "rows"},
    ),
    case(
        lambda x, i: torch.take_along_dim(x, i.view(-1, 1), 0),
        T(5, 3),
        I(9, low=-5),
        options=OPTIONS | {"name": "along"},
    ),
    case(double_backward(lambda x: x[torch.tensor([0, 4, 4, 1, 0, 4, 2])]), T(5, 3), options=OPTIONS),
    case(torch.index_select, T(4, 3), 0, I(11, high=4), options=OPTIONS),
    at(torch.tensor([0, 3, 3])),
    at([1, 4, -1]),
    at(I(3)),
    at(I(7, low=-5)),
    at(S(None), I(3, 2, high=6)),
    at(S(None), S(None), I(2, high=4)),
    at(I(3), I(3, high=6)),
    at(I(3, 1), I(2, high=6)),
    at(I(3), S(None), I(3, high=4)),
    at(S(None), I(3, high=6), I(3, high=4)),
    at(S(None), I(2, 1, high=6), I(3, low=-4, high=4)),
    at(I(3), I(3, high=6), I(3, high=4)),
    at(I(2, high=3), 2),
    at(2, S(None), I(2, high=4)),
    at(2, I(3, high=6)),
    at(S(1, 4), I(3, high=6), S(None, None, 2)),
    at(I(3), None, S(1, 5), I(3, high=4)),
    at(None, I(3)),
    at(Ellipsis, I(3, high=4)),
    at([], S(None)),
    at(I(0)),
    at(torch.zeros(2, 0, dtype=torch.int64)),
    at(I(3, high=0, low=-5)),
    at(True),
    at(False),
    at(S(None), True, I(3, high=6)),
    at([0, 1], [2, 3]),
    at(torch.tensor([1, 2], dtype=torch.int32)),
    at(I(3), shape=(5,)),
    at(I(3, high=6), options=OPTIONS | raises(IndexError, "is out of bounds for dimension", device_asserts=True)),
    at(I(40, high=9), options=OPTIONS | raises(IndexError, "is out of bounds for dimension", device_asserts=True)),
    at(
        I(2, low=-7, high=-6),
        options=OPTIONS | raises(IndexError, "is out of bounds for dimension", device_asserts=True),
    ),
    at(I(3), I(2), options=OPTIONS | raises(IndexError, "indexing tensors could not be broadcast")),
    at(
        I(2), I(2), I(2, high=4), I(2), options=OPTIONS | raises(IndexError, "too many indices for tensor of dimension")
    ),
    at(torch.tensor([0.5]), options=OPTIONS | raises(IndexError, "tensors used as indices must be long")),
    case(getitem, T(5, 6, fill="bool"), I(3), options=OPTIONS),
    case(getitem, T(5, 6, dtype=torch.complex128), (S(None), I(3)), options=OPTIONS),
    case(lambda x, i: x.reshape(4, 30)[:, i], T(4, 5, 6), I(5, high=30), options={"name": "merged dim"}),
    case(torch.index_select, T(5, 6, 4), 0, I(3), options=OPTIONS),
    case(torch.index_select, T(5, 6, 4), -2, I(8, high=6), options=OPTIONS),
    case(torch.Tensor.index_select, T(5, 6), 1, torch.tensor([0, 5])),
    case(torch.index_select, T(5, 6), 1, I(high=6)),
    case(torch.index_select, T(5, 6), 1, I(0)),
    case(
        torch.index_select,
        T(5, 6),
        0,
        I(3, low=-2, high=0),
        options=raises(IndexError, "index out of range in self", device_asserts=True),
    ),
    case(torch.index_select, T(5, 6), 0, I(2, 2), options=raises(IndexError, "Index is supposed to be a vector")),
    case(torch.gather, T(5, 6, 4), 0, I(3, 6, 2), options=OPTIONS),
    case(torch.gather, T(5, 6, 4), 1, I(4, 9, 4, high=6), options=OPTIONS),
    case(torch.Tensor.gather, T(5, 6), -1, I(5, 6, high=6), options=OPTIONS),
    case(torch.gather, T(5, 6), 0, I(0, 6), options=OPTIONS),
    case(
        torch.gather,
        T(5, 6),
        0,
        I(2, 6, high=7),
        options=OPTIONS | raises(RuntimeError, "is out of bounds for dimension", device_asserts=True),
    ),
    case(torch.gather, T(5, 6), 0, I(2, 7), options=OPTIONS | raises(RuntimeError, "to be no larger than self")),
    case(torch.gather, T(5), 0, I(8), options=OPTIONS),
    case(torch.gather, T(5), 0, I(), options=OPTIONS),
    case(torch.gather, T(), 0, I(2, high=1), options=OPTIONS),
    case(torch.gather, T(5, 6), 0, I(0), options=OPTIONS),
    # the method: torch_geometric replaces torch.index_select by a function that refuses a tensor of no dims
    case(torch.Tensor.index_select, T(), 0, I(1, high=1), options=OPTIONS),
    case(torch.take_along_dim, T(5, 6), I(5, 6), 0, options=OPTIONS),
    case(torch.take_along_dim, T(5, 1), I(1, 6, low=-5), 0, options=OPTIONS),
    case(torch.take_along_dim, T(5, 6), I(7, high=30), options=OPTIONS),
    case(torch.take, T(5, 6), I(3, 4, low=-30, high=30), options=OPTIONS),
    case(
        torch.take,
        T(5, 6),
        I(3, high=50),
        options=OPTIONS | raises(IndexError, "tried to access index", device_asserts=True),
    ),
    case(torch.take, T(5, 6), I(), options=OPTIONS),
    case(torch.take, T(), I(2, high=1), options=OPTIONS),
    case(torch.Tensor.take, T(5, 6), I(0), options=OPTIONS),
]
