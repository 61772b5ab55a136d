"""Writes by index: x[...] = value, index_put, index_add, index_copy, index_fill, index_reduce."""

import torch

from tests.harness import T, case, raises

S = slice
OPTIONS = {"layouts": 6}


def I(*shape, high=5, low=0):  # noqa: E743
    """Index values in [low, high)."""
    return T(*shape, fill=lambda shape, generator: torch.randint(low, high, shape, generator=generator))


def P(n, high=5):
    """Build an index of distinct values: the result of duplicate writes is undefined."""
    return T(n, fill=lambda shape, generator: torch.randperm(high, generator=generator)[: shape[0]])


def set_(x, index, value):
    y = x.clone()
    y[index] = value
    return y


def set_and_read(x, index, value):
    """Write into a tensor of the graph and use it afterwards."""
    y = x * 2
    y[index] = value
    return y * y, y[1:].sum()


def at(*index, value, shape=(5, 6, 4), options=OPTIONS, fn=set_):
    return case(fn, T(*shape), index if len(index) != 1 else index[0], value, options=options)


M = dict(fill="bool", dtype=torch.bool)
five = T(5, fill=lambda s, g: torch.tensor([True, False, True, True, False]))

TIES = dict(fill=lambda s, g: torch.randint(-2, 3, s, generator=g).double())
CASES = [
    *(
        case(torch.index_reduce, T(5, 3, **TIES), 0, I(9), T(9, 3, **TIES), reduce, include_self=own, options=OPTIONS)
        for reduce in ("mean", "amax", "amin")
        for own in (True, False)
    ),
    at(S(1, 4), value=T(3, 6, 4)),
    at(S(1, 4), value=T(6, 1)),
    at(S(1, 4), value=T(1, 1, 3, 6, 4)),
    at(S(None), S(1, None, 2), value=T(5, 3, 4)),
    at(S(None), S(None, None, 3), S(1, 3), value=T(2)),
    at(Ellipsis, S(1, 3), value=T(5, 6, 2)),
    at(2, value=T(6, 4)),
    at(2, value=3.5),
    at(S(1, 3), value=2),
    at(S(1, 3), value=T()),
    at(-1, S(None), 2, value=T(6)),
    at(S(None), 3, value=T(5, 4)),
    at(1, 2, 3, value=T()),
    at(1, 2, 3, value=T(1)),
    at(None, S(1, 3), value=T(1, 2, 6, 4)),
    at(S(3, 3), value=T(1, 6, 4)),
    at(Ellipsis, value=T(5, 6, 4)),
    at(True, value=T(5, 6, 4)),
    at(False, value=1.0),
    at(
        S(1, 4), value=T(2, 6, 4), options=OPTIONS | raises(RuntimeError, "The expanded size of the tensor")
    ),  # wrong shape
    at(7, value=1.0, options=OPTIONS | raises(IndexError, "is out of bounds for dimension")),
    at(0, value=1j, options=OPTIONS | raises(RuntimeError, "value cannot be converted to type")),
    at(0, value=[1.0], options=OPTIONS | raises(TypeError, "can't assign a list", signature=True)),
    at(S(1, 4), value=T(3, 6, 4), fn=set_and_read),
    at(S(None), 2, value=T(5, 4), fn=set_and_read),
    at(S(1, 4), value=T(3, 6, 4, fill="ints")),
    case(set_, T(5, 6, dtype=torch.complex128), (S(None), S(1, 3)), T(5, 2), options=OPTIONS),
    # index tensors
    at(P(3), value=T(3, 6, 4)),
    at(P(3), value=T(4)),
    at(P(3), value=0.5),
    at(S(None), P(4, 6), value=T(5, 4, 4)),
    at(S(None), P(4, 6), value=T(4, 1)),
    at(S(None), S(None), P(2, 4), value=T(5, 6, 2)),
    at(P(3), P(3, 6), value=T(3, 4)),
    at(P(3), S(None), P(3, 4), value=T(3, 6)),
    at(S(None), P(3, 6), P(3, 4), value=T(5, 3)),
    at(P(3), P(3, 6), P(3, 4), value=T(3)),
    at(2, P(3, 6), value=T(3, 4)),
    at(P(2), 3, value=T(2, 4)),
    at(2, S(None), P(3, 4), value=T(6, 3)),
    at(S(1, 4), P(3, 6), S(None, None, 2), value=T(3, 3, 2)),
    at(S(1, 4), P(3, 6), 1, value=T(3, 3)),
    at([0, 2], value=T(2, 6, 4)),
    at([], value=T(1)),
    at(
        I(3, low=5, high=9),
        value=1.0,
        options=OPTIONS | raises(IndexError, "is out of bounds for dimension", device_asserts=True),
    ),
    at(P(3), value=T(2, 6, 4), options=OPTIONS | raises(RuntimeError, "cannot be broadcast to indexing result")),
    at(
        P(3),
        value=T(3, 6, 4, fill="ints"),
        options=OPTIONS | raises(RuntimeError, "Index put requires the source and destination dtypes match"),
    ),
    at(P(3), value=T(3, 6, 4), fn=set_and_read),
    # masks
    at(T(5, 6, 4, **M), value=0.0),
    at(T(5, 6, 4, **M), value=T()),
    at(T(5, 6, 4, **M), value=T(1)),
    at(T(5, **M), value=T(6, 4)),
    at(five, value=T(3, 6, 4)),
    at(five, value=T(3, 1, 4)),
    at(five, value=T(2, 6, 4), options=OPTIONS | raises(RuntimeError, "cannot be broadcast to indexing result")),
    at(S(None), T(6, fill=lambda s, g: torch.tensor([1, 0, 1, 1, 0, 1]) > 0), value=T(5, 4, 4)),
    at(S(None), T(6, fill=lambda s, g: torch.tensor([1, 0, 1, 1, 0, 1]) > 0), value=T(4, 1)),
    at(T(5, 6, fill=lambda s, g: torch.arange(30).reshape(5, 6) % 3 == 1), value=T(10, 4)),
    at(T(5, 6, 4, fill=lambda s, g: torch.arange(120).reshape(5, 6, 4) % 7 == 1), value=T(17)),
    at(S(1, 4), T(6, 4, fill=lambda s, g: torch.arange(24).reshape(6, 4) % 3 == 1), value=T(3, 8)),
    at(1, T(6, fill=lambda s, g: torch.tensor([1, 0, 1, 1, 0, 1]) > 0), value=T(4, 4)),
    at(five, S(None), P(3, 4), value=T(3, 6)),
    at(five, 1, value=T(3, 4)),
    at(T(5, 6, 4, **M), value=T(fill="ints")),
    at(five, value=T(3, 6, 4), fn=set_and_read),
    # A dim of size 1 is sharded, and most ranks hold nothing of it.
    case(set_, T(5, 1, shard_dims=(1,)), T(5, **M), 0.5, options=OPTIONS | {"name": "one column"}),
    case(set_, T(5, 1, shard_dims=(1,)), five, T(3, 1), options=OPTIONS | {"name": "rows of one column"}),
    case(lambda x: set_(x, x > 0, -1.0), T(5, 6), options=OPTIONS | {"name": "x[x > 0] = -1"}),
    case(
        lambda x, v: set_(x.reshape(4, 30), (S(None), S(5, 29, 3)), v),
        T(4, 5, 6),
        T(4, 8),
        options={"name": "slice across a merged dim", "try_partial": False},
    ),
    case(
        lambda x, i, v: set_(x.reshape(4, 30), (S(1, None), i), v),
        T(4, 5, 6),
        P(5, 30),
        T(3, 5),
        options={"name": "index of a merged dim", "try_partial": False},
    ),
    # named functions
    case(torch.index_put, T(5, 6), (P(3),), T(3, 6), options=OPTIONS),
    case(torch.index_put, T(5, 6), (P(3), I(3, high=6)), T(3), options=OPTIONS),
    case(torch.index_put, T(5, 6), (I(8), I(8, high=6)), T(8), True, options=OPTIONS),
    case(torch.Tensor.index_put, T(5, 6), (I(8),), T(6), accumulate=True, options=OPTIONS),
    case(torch.index_put, T(5, 6), (T(5, 6, **M),), T(), options=OPTIONS),
    case(torch.index_put, T(5, 6), (five,), T(3, 6), accumulate=True, options=OPTIONS),
    case(lambda x, i, v: x.clone().index_put_((i,), v, accumulate=True), T(5, 6), I(8), T(8, 6), options=OPTIONS),
    case(torch.index_add, T(5, 6, 4), 0, I(7), T(7, 6, 4), options=OPTIONS),
    case(torch.index_add, T(5, 6, 4), -2, I(7, high=6), T(5, 7, 4), alpha=2.5, options=OPTIONS),
    case(torch.index_add, T(5, 6), 0, I(0), T(0, 6), options=OPTIONS),
    case(torch.index_add, T(5, 6), 0, I(), T(1, 6), options=OPTIONS),
    case(torch.index_add, T(), 0, I(1, high=1), T(), options=OPTIONS),
    case(
        torch.index_add,
        T(5, 6),
        0,
        I(3, low=5, high=8),
        T(3, 6),
        options=OPTIONS | raises(RuntimeError, "is out of bounds for dimension", device_asserts=True),
    ),
    case(
        torch.index_add,
        T(5, 6),
        0,
        I(3),
        T(2, 6),
        options=OPTIONS | raises(RuntimeError, "should be equal to source.size(dim)"),
    ),
    case(
        torch.index_add,
        T(5, 6),
        0,
        I(3),
        T(3, 5),
        options=OPTIONS | raises(RuntimeError, "source tensor shape must match self tensor shape"),
    ),
    case(
        lambda x, i, v: x.clone().index_add_(0, i, v), T(5, 6), I(8), T(8, 6), options=OPTIONS | {"name": "index_add_"}
    ),
    case(torch.index_copy, T(5, 6, 4), 1, P(4, 6), T(5, 4, 4), options=OPTIONS),
    case(
        lambda x, i, v: x.clone().index_copy_(0, i, v),
        T(5, 6),
        P(3),
        T(3, 6),
        options=OPTIONS | {"name": "index_copy_"},
    ),
    case(torch.index_fill, T(5, 6, 4), 1, P(4, 6), 2.5, options=OPTIONS),
    case(torch.index_fill, T(5, 6, 4), 0, I(2), T(), options=OPTIONS),
    case(torch.index_fill, T(5, 6, 4, grad=False), 0, I(2, low=-5, high=0), 1.5, options=OPTIONS),
    case(lambda x, i: x.clone().index_fill_(0, i, 1.0), T(5, 6), P(3), options=OPTIONS | {"name": "index_fill_"}),
    *(
        case(torch.index_reduce, T(5, 6, fill="distinct"), 0, I(7), T(7, 6), reduce, include_self=own, options=OPTIONS)
        for reduce in ("prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    case(
        lambda x, i, v: x.clone().index_reduce_(1, i, v, "amax"),
        T(5, 6, fill="distinct"),
        I(7, high=6),
        T(5, 7),
        options=OPTIONS | {"name": "index_reduce_"},
    ),
    case(  # torch's kernel fails for rows of one element in half precision, which shards have
        torch.index_reduce,
        T(5, 2, dtype=torch.bfloat16, fill="ints", high=3, grad=False, shard_dims=(1,)),
        0,
        I(7),
        T(7, 2, dtype=torch.bfloat16, fill="ints", high=3, grad=False),
        "prod",
        options=OPTIONS | {"name": "index_reduce in half precision"},
    ),
]
