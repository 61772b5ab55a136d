"""Writes of elements by index and by mask: scatter, scatter_add, scatter_reduce, put, masked_scatter."""

import torch

from tests.harness import T, case, double_backward, raises

OPTIONS = {"layouts": 6}
M = dict(fill="bool", dtype=torch.bool)


def I(*shape, high=5, low=0):  # noqa: E743
    """Index values in [low, high)."""
    return T(*shape, fill=lambda shape, generator: torch.randint(low, high, shape, generator=generator))


def P(*shape, dim, high):
    """Build an index with distinct values along `dim`: the result of duplicate writes is undefined."""

    def fill(shape, generator):
        keys = torch.rand([high if d == dim else n for d, n in enumerate(shape)], generator=generator)
        return keys.argsort(dim).narrow(dim, 0, shape[dim]).contiguous()

    return T(*shape, fill=fill)


def on_copy(name):
    """Return an in-place method applied to a copy."""

    def call(x, *args, **kwargs):
        y = x * 1
        out = getattr(y, name)(*args, **kwargs)
        assert out is y
        return y

    call.__name__ = name
    return call


def on_transposed(name):
    """Return an in-place method applied to a transposed tensor."""

    def call(x, *args, **kwargs):
        y = (x * 1).transpose(0, 1)
        getattr(y, name)(*args, **kwargs)
        return y

    call.__name__ = name + " transposed"
    return call


def by_rows(fn, dim=0):
    """Return `fn` with an expanded 1-d index, which selects rows."""

    def call(x, index, *args, **kwargs):
        shape = [-1 if d == dim else n for d, n in enumerate(x.shape)]
        index = index.view([-1 if d == dim else 1 for d in range(x.ndim)]).expand(shape)
        return fn(x, dim, index, *args, **kwargs)

    call.__name__ = getattr(fn, "__name__", "rows") + " of rows"
    return call


def into_zeros(name, *args, **kwargs):
    """Return an in-place method applied to new zeros."""

    def call(index, src):
        index = index.view(-1, 1).expand_as(src)
        return src.new_zeros(5, src.shape[1]).__getattribute__(name)(0, index, src, *args, **kwargs)

    call.__name__ = name + " into zeros"
    return call


def one_hot(x, index):
    """Return the one-hot matrix of an index, as of codes of a codebook, and a plain tensor whose view is read later."""
    place = index.unsqueeze(1)
    held = torch.zeros(9, 5, dtype=x.dtype, device=x.device)
    view = held[2:]
    held.scatter_(1, place, 1)
    named = torch.zeros(9, 5, dtype=x.dtype, device=x.device).scatter_(dim=1, index=place, value=2.0)
    filled = torch.zeros(9, 5, dtype=x.dtype, device=x.device).index_fill_(1, index[:2], 3)
    return torch.zeros(9, 5, dtype=x.dtype).scatter_(1, place, 1).T @ x, held * 1, view * 1, named @ x[:5], filled * 1


def into_plain(index, src):
    """Write into a plain tensor in place and read it afterwards."""
    out = torch.zeros(5, 3, dtype=src.dtype, device=src.device)
    same = out.index_add_(0, index, src)
    assert same is out
    return out * 2


FIXED = torch.tensor([0, 4, 4, 1, 0, 4, 2])
SRC = T(5, 3, fill=lambda s, g: torch.randint(-2, 3, s, generator=g).double())
ROWS = T(9, 3, fill=lambda s, g: torch.randint(-2, 3, s, generator=g).double())
CASES = [
    case(by_rows(torch.scatter_add), T(5, 3), I(9), T(9, 3), options=OPTIONS),
    case(by_rows(torch.scatter_add, 1), T(2, 5, 3), I(7), T(2, 7, 3), options=OPTIONS),
    case(by_rows(torch.scatter), T(5, 3), P(4, dim=0, high=5), T(4, 3), options=OPTIONS),
    case(by_rows(torch.scatter), T(5, 3), P(4, dim=0, high=5), 2.5, options=OPTIONS),
    case(
        by_rows(torch.scatter_add),
        T(5, 3),
        I(9, low=3, high=9),
        T(9, 3),
        options=OPTIONS | raises(RuntimeError, "is out of bounds for dimension", device_asserts=True),
    ),
    *(
        case(by_rows(torch.scatter_reduce), SRC, I(9), ROWS, reduce, include_self=own, options=OPTIONS)
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    case(by_rows(torch.scatter_reduce, 1), T(2, 5, 3), I(7), T(2, 7, 3), "amax", options=OPTIONS),
    case(
        double_backward(lambda x, s: by_rows(torch.scatter_reduce)(x, FIXED, s, "amax")),
        T(5, 3),
        T(7, 3),
        options=OPTIONS,
    ),
    case(double_backward(lambda x, s: by_rows(torch.scatter_add)(x, FIXED, s)), T(5, 3), T(7, 3), options=OPTIONS),
    case(into_zeros("scatter_add_"), I(9), T(9, 3), options=OPTIONS),
    case(one_hot, T(9, 3), I(9), options=OPTIONS),
    case(into_zeros("scatter_reduce_", "amax", include_self=False), I(9), ROWS, options=OPTIONS),
    case(into_zeros("scatter_reduce_", "mean"), I(4), T(4, 3), options=OPTIONS),
    case(into_plain, I(9), T(9, 3), options=OPTIONS),
    case(torch.scatter, T(5, 6, 4), 0, P(3, 6, 4, dim=0, high=5), T(3, 6, 4), options=OPTIONS),
    case(torch.scatter, T(5, 6, 4), 1, P(4, 5, 3, dim=1, high=6), T(5, 6, 4, grad=False), options=OPTIONS),
    case(torch.Tensor.scatter, T(5, 6), -1, P(5, 6, dim=1, high=6), T(5, 6), options=OPTIONS),
    case(torch.scatter, T(5, 6), 0, I(3, 6), 2.5, options=OPTIONS),
    case(torch.scatter, T(5, 6), 0, I(3, 6), value=2.5, options=OPTIONS),
    case(torch.scatter, T(5, 6), 0, I(0, 6), T(0, 6), options=OPTIONS),
    case(
        torch.scatter,
        T(5, 6),
        0,
        I(3, 6, high=7),
        T(3, 6),
        options=OPTIONS | raises(RuntimeError, "is out of bounds for dimension", device_asserts=True),
    ),
    case(
        torch.scatter, T(5, 6), 0, I(3, 7), T(3, 7), options=OPTIONS | raises(RuntimeError, "to be no larger than self")
    ),
    case(
        torch.scatter, T(5, 6), 0, I(3, 6), T(2, 6), options=OPTIONS | raises(RuntimeError, "to be no larger than self")
    ),
    case(torch.scatter, T(5), 0, P(4, dim=0, high=5), T(4), options=OPTIONS),
    case(torch.scatter, T(5), 0, I(), T(), options=OPTIONS),
    case(torch.scatter_add, T(), 0, I(1, high=1), T(1), options=OPTIONS),
    case(torch.scatter_add, T(5, 6), 0, I(0), T(0), options=OPTIONS),
    case(torch.scatter, T(5, 6, grad=False), 0, I(3, 6), T(3, 6, grad=False), reduce="add", options=OPTIONS),
    case(on_copy("scatter_"), T(5, 6), 0, P(3, 5, dim=0, high=5), T(4, 6, grad=False), options=OPTIONS),
    case(on_copy("scatter_"), T(5, 6), 1, I(5, 2, high=6), 1.5, options=OPTIONS),
    case(on_copy("scatter_"), T(3, 2), 0, P(3, 2, dim=0, high=3), T(3, 2), options=OPTIONS),
    case(
        on_transposed("scatter_"), T(6, 5), 0, P(3, 6, dim=0, high=5), T(3, 6), options=OPTIONS | {"try_partial": False}
    ),
    case(torch.scatter_add, T(5, 6, 4), 0, I(7, 6, 4), T(7, 6, 4), options=OPTIONS),
    case(torch.scatter_add, T(5, 6, 4), 1, I(4, 8, 3, high=6), T(5, 9, 4, grad=False), options=OPTIONS),
    case(torch.scatter_add, T(5), 0, I(9), T(9), options=OPTIONS),
    case(torch.scatter_add, T(5, fill="ints"), 0, I(9), T(9, fill="ints"), options=OPTIONS),
    case(on_copy("scatter_add_"), T(5, 6), 0, I(3, 6), T(3, 6), options=OPTIONS),
    case(on_copy("scatter_add_"), T(3, 2), 0, I(9, 2, high=3), T(9, 2), options=OPTIONS),
    case(on_transposed("scatter_add_"), T(6, 5), 1, I(5, 7, high=6), T(5, 7), options=OPTIONS | {"try_partial": False}),
    *(
        case(
            torch.scatter_reduce,
            T(5, 6, fill="distinct"),
            0,
            I(7, 6),
            T(7, 6),
            reduce,
            include_self=own,
            options=OPTIONS,
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    case(torch.scatter_reduce, T(5, 6), 1, I(4, 8, high=6), T(5, 8, grad=False), "sum", options=OPTIONS),
    case(
        torch.scatter_reduce,
        T(5, 6),
        1,
        I(4, 8, high=6),
        T(5, 8),
        "median",
        options=OPTIONS | raises(RuntimeError, "reduce argument must be either"),
    ),
    case(on_copy("scatter_reduce_"), T(5, 6, fill="distinct"), 0, I(3, 6), T(3, 6), "amax", options=OPTIONS),
    case(torch.Tensor.put, T(5, 6), P(4, dim=0, high=30), T(4), options=OPTIONS),
    case(torch.Tensor.put, T(5, 6), I(2, 4, low=-30, high=30), T(8), accumulate=True, options=OPTIONS),
    case(
        torch.Tensor.put,
        T(5, 6),
        I(4),
        T(5),
        options=OPTIONS | raises(IndexError, "Expected source and index to have the same number"),
    ),
    case(on_copy("put_"), T(5, 6), P(4, dim=0, high=30), T(2, 2), options=OPTIONS),
    case(torch.masked_scatter, T(5, 6), T(5, 6, **M), T(40), options=OPTIONS),
    case(torch.masked_scatter, T(5, 6), T(6, **M), T(5, 6), options=OPTIONS),
    case(torch.masked_scatter, T(6), T(5, 6, **M), T(5, 6), options=OPTIONS),
    case(
        torch.Tensor.masked_scatter,
        T(5, 6),
        T(5, 6, **M),
        T(2),
        options=OPTIONS | raises(RuntimeError, "Number of elements of source < number of ones"),
    ),
    case(on_copy("masked_scatter_"), T(5, 6), T(5, 6, **M), T(40), options=OPTIONS),
    case(on_copy("masked_scatter_"), T(5, 6), T(5, 1, **M), T(40), options=OPTIONS),
]
