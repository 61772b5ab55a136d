"""Sorting and order statistics: sort, topk, kthvalue, median, quantile, mode."""

import torch

from shardfield import ShardTensor
from tests.harness import T, case, raises

NAN = float("nan")
FEW = {"layouts": 6}
TWO = {"layouts": 2}


def ties(shape, generator):
    return torch.randint(3, shape, generator=generator).double()


def nans(shape, generator):
    """Draw ties, NaNs and both zeros."""
    x = torch.randint(-1, 2, shape, generator=generator).double()
    x = torch.where(torch.rand(shape, generator=generator) < 0.2, NAN, x)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, -0.0, x)


def some_nans(shape, generator):
    """Draw distinct values, with NaN in some rows."""
    n = torch.Size(shape).numel()
    x = (torch.randperm(n, generator=generator).double() / 3 - 2).view(shape)
    x.view(-1)[:: max(n // 3, 2)] = NAN
    return x


def D(*shape, **more):
    return T(*shape, fill="distinct", **more)


def values_and_where(fn):
    """Return the values of `fn`, and the elements at its indices, which may differ among ties."""

    def call(x, *args, **kwargs):
        values, indices = fn(x, *args, **kwargs)
        dim = kwargs.get("dim", -1)
        full_value = x.full_tensor() if hasattr(x, "full_tensor") else x
        at = indices.full_tensor() if hasattr(indices, "full_tensor") else indices
        return values, full_value.detach().take_along_dim(at, dim)

    call.__name__ = f"{fn.__name__} among equals"
    return call


def named(fn, **fields):
    """Return `fn` and check that its result has torch's type and fields."""

    def call(x, *args, **kwargs):
        out = fn(x, *args, **kwargs)
        assert type(out) is getattr(torch.return_types, fn.__name__), type(out)
        return out.values, out.indices

    call.__name__ = f"{fn.__name__} named"
    return call


def into(fn):
    def call(x, *args, **kwargs):
        with torch.no_grad():
            out = tuple(m * 0 for m in fn(x, *args, **kwargs))
            fn(x, *args, **kwargs, out=out)
        return out

    call.__name__ = f"{fn.__name__} out"
    return call


def second_order(fn):
    def call(x):
        x = x * 1.0
        y = fn(x)
        y = y[0] if isinstance(y, tuple) else y
        (grad,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        return (grad * grad).sum()

    return call


SECOND = {
    "sort": lambda x: torch.sort(x, 0),
    "topk": lambda x: torch.topk(x, 3, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 2, 0),
    "median": lambda x: torch.median(x),
    "quantile": lambda x: torch.quantile(x, 0.3, 0),
}


def written_after(fn, *args):
    """Return a function that calls `fn` and then writes into its input: torch's backward needs the indices alone."""

    def call(x):
        y = x * 1
        found = fn(y, *args)
        y.mul_(2)
        return found[0], y

    call.__name__ = f"{fn.__name__}, then write"
    return call


def expanded_median(x):
    """Return the median along an expanded dim; one device gets a dense copy, since its kernel is wrong there."""
    y = x.expand(-1, 2, -1)
    return torch.median(y if isinstance(x, ShardTensor) else y.contiguous(), 1)[0]


CASES = [
    *(
        case(written_after(*call), T(5, 6, fill="distinct"))
        for call in ((torch.topk, 3, 0), (torch.sort, 1), (torch.median, 0))
    ),
    case(torch.sort, D(9)),
    case(torch.sort, D(3, 7)),
    case(torch.sort, D(7, 3), 0, True),
    case(torch.sort, D(2, 3, 5), dim=-2, descending=True),
    case(torch.sort, T(9, fill=ties), stable=True),
    case(torch.sort, T(9, fill=ties), stable=True, descending=True),
    case(torch.sort, T(2, 8, fill=nans), stable=True, dim=1),
    case(torch.sort, T(8, 2, fill=nans), stable=True, dim=0, descending=True),
    case(torch.sort, T(5, 6, fill=ties), stable=True, dim=0),
    case(torch.sort, T(8, fill="ints", high=100), stable=True, options=FEW),
    case(torch.sort, T(8, fill="ints", dtype=torch.uint8), stable=True, options=FEW),
    case(torch.sort, T(8, fill="bool"), stable=True, options=FEW),
    case(torch.sort, D(8, dtype=torch.float16), options={"tolerance": 1e-3} | FEW),
    case(torch.sort, T(0, 3), 0, options=FEW),
    case(torch.sort, T(0, 3), 1, options=FEW),
    case(torch.sort, T(), 0, options=TWO | {"try_partial": False}),
    case(
        torch.sort,
        T(3, dtype=torch.complex128),
        options=TWO | raises(RuntimeError, "Sort does not support complex dtypes on CPU", since_2_15=TypeError),
    ),
    case(torch.sort, D(3), 1, options=TWO | raises(IndexError, "Dimension out of range")),
    case(torch.sort, D(4, 3, shard_dims=(1,)), 0, options={"no_messages": True, "try_partial": False}),
    case(torch.sort, T(300, fill=ties), stable=True, options={"layouts": 4}),
    case(torch.Tensor.sort, D(5, 6), options=FEW),
    case(torch.argsort, D(9)),
    case(torch.Tensor.argsort, D(3, 7), 1, True, options=FEW),
    case(torch.argsort, T(9, fill=ties), stable=True, options=FEW),
    case(torch.msort, D(7), options=FEW),
    case(torch.Tensor.msort, D(7, 3), options=FEW),
    case(lambda x: x.reshape(-1).sort(), D(3, 4), options={"name": "sort of merged"}),
    case(lambda x: x.reshape(-1, 3).sort(1), D(2, 4, 3), options={"name": "sort next to a merged dim"} | FEW),
    case(torch.topk, D(9), 2),
    case(torch.topk, D(9), 7),
    case(torch.topk, D(3, 8), 3, largest=False),
    case(torch.topk, D(8, 3), 6, 0),
    case(torch.Tensor.topk, D(6, 5), 1, dim=0, options=FEW),
    case(torch.topk, D(6), 0, options=FEW),
    case(torch.topk, D(6), 6, options=FEW),
    case(torch.topk, D(6), 7, options=TWO | raises(RuntimeError, "selected index k out of range")),
    case(torch.topk, D(6), -1, options=TWO | raises(RuntimeError, "selected index k out of range")),
    case(torch.topk, T(), 1, options=TWO | {"try_partial": False}),
    case(
        torch.topk,
        T(5, fill="bool"),
        1,
        options=TWO | raises(RuntimeError, "topk does not support bool dtypes on CPU", since_2_15=NotImplementedError),
    ),
    case(values_and_where(torch.topk), T(2, 9, fill=nans, grad=False), 2, options=FEW | {"try_partial": False}),
    case(
        values_and_where(torch.topk),
        T(9, fill=nans, grad=False),
        6,
        largest=False,
        options=FEW | {"try_partial": False},
    ),
    case(torch.kthvalue, D(9), 4),
    case(torch.kthvalue, D(3, 7), 2, 1, True),
    case(torch.kthvalue, D(7, 5), 7, dim=0),
    case(torch.Tensor.kthvalue, T(9, fill="ints", high=1000), 5, options=FEW),
    case(torch.kthvalue, D(5), 6, options=TWO | raises(RuntimeError, "selected number k out of range")),
    case(torch.kthvalue, D(5), 0, options=TWO | raises(RuntimeError, "selected number k out of range")),
    case(torch.kthvalue, T(3, 0), 1, 1, options=TWO | raises(IndexError, "to have non-zero size")),
    case(torch.kthvalue, T(), 1, options=TWO | {"try_partial": False}),
    case(torch.kthvalue, D(2, 1000), 321, options={"layouts": 4}),
    case(
        values_and_where(torch.kthvalue),
        T(9, fill=nans, grad=False),
        4,
        keepdim=True,
        options=FEW | {"try_partial": False},
    ),
    case(torch.median, D(8)),
    case(torch.median, T(3, 7, fill=ties)),
    case(torch.median, T(3, 4, fill=nans), options=FEW),
    case(torch.nanmedian, T(3, 5, fill=nans), options=FEW),
    case(torch.nanmedian, D(4, 3), options=FEW),
    case(torch.median, T(9, fill="ints", dtype=torch.int32), options=FEW),
    case(expanded_median, T(2, 1, 3), options=FEW),
    case(torch.median, T(0), options=TWO),
    case(torch.median, D(4, 6), 1),
    case(torch.median, D(7, 2), 0, True),
    case(torch.Tensor.median, D(2, 3, 4), dim=-2, options=FEW),
    case(torch.median, T(5, 4, fill=some_nans), 1, options=FEW),
    case(torch.nanmedian, T(5, 4, fill=some_nans), 1),
    case(torch.nanmedian, T(9, fill=some_nans), 0, keepdim=True),
    case(
        torch.nanmedian,
        T(2, fill=lambda s, g: torch.full(s, NAN, dtype=torch.float64)),
        0,
        options=FEW | {"grad": False},
    ),
    case(torch.median, T(3, 0), 1, options=TWO | raises(IndexError, "to have non-zero size")),
    case(torch.median, T(0, 3), 1, options=TWO),
    case(torch.quantile, D(8), 0.3),
    case(torch.quantile, D(3, 7), 0.6, dim=1),
    case(torch.quantile, D(4, 5), T(3, fill="unit"), dim=0, keepdim=True),
    case(torch.quantile, D(7, 2), T(2, fill="unit"), 0, interpolation="midpoint"),
    case(torch.quantile, D(9), T(2, fill="unit"), interpolation="lower", options=FEW),
    case(torch.quantile, D(9), 0.4, interpolation="higher", options=FEW),
    case(torch.quantile, D(2, 5), 0.5, 1, interpolation="nearest", options=FEW),
    case(torch.Tensor.quantile, D(2, 3, 4), T(fill="unit"), keepdim=True, options=FEW),
    case(torch.quantile, T(9, fill=ties), T(2, fill="unit"), options=FEW | {"grad": False}),
    case(torch.quantile, T(5, 4, fill=some_nans), 0.3, dim=0, options=FEW),
    case(torch.nanquantile, T(5, 4, fill=some_nans), 0.3, dim=0),
    case(torch.nanquantile, T(11, fill=some_nans), T(3, fill="unit"), dim=0),
    case(torch.nanquantile, T(2, 8, fill=some_nans), 0.7, options=FEW),
    case(torch.quantile, D(5), 1.5, options=TWO | raises(RuntimeError, "quantile() q must be in the range")),
    case(
        torch.quantile,
        D(6, 2),
        T(2, fill=lambda s, g: torch.tensor([0.5, 1.5]).double()),
        0,
        options=FEW | raises(RuntimeError, "quantile() q values must be in the range", device_asserts=True),
    ),
    case(torch.quantile, T(0, 3), 0.5, options=TWO | raises(RuntimeError, "quantile() input tensor must be non-empty")),
    case(
        torch.quantile,
        T(5, fill="ints"),
        0.5,
        options=TWO | raises(RuntimeError, "must be either float or double dtype"),
    ),
    case(torch.quantile, D(2, 900), 0.123, 1, options={"layouts": 4}),
    case(torch.mode, T(9, fill="ints", high=4)),
    case(torch.mode, T(3, 8, fill=ties), 1),
    case(torch.mode, T(8, 5, fill=ties), 0, True),
    case(torch.Tensor.mode, T(2, 3, 4, fill="ints", high=3), dim=1, options=FEW),
    case(torch.mode, T(7, fill="bool"), options=FEW),
    case(torch.mode, T(2, 9, fill=nans), 1),
    case(torch.mode, T(7, fill=nans), options=FEW),
    case(torch.mode, T(3, 0), 1, options=TWO | raises(IndexError, "to have non-zero size")),
    case(named(torch.sort), D(5), options=FEW),
    case(named(torch.topk), D(5, 6), 2, options=FEW),
    case(named(torch.kthvalue), D(5, 2), 2, 0, options=FEW),
    case(named(torch.median), D(5, 2), 0, options=FEW),
    case(named(torch.mode), T(5, 2, fill="ints"), 0, options=FEW),
    case(into(torch.sort), D(6), options=FEW),
    case(into(torch.topk), D(6, 2), 2, 0, options=FEW),
    *(
        case(
            second_order(fn),
            D(6),
            options=FEW | {"try_partial": False, "tolerance": 1e-8, "name": f"second order {name}"},
        )
        for name, fn in SECOND.items()
    ),
]
