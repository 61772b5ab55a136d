"""Scans: cumsum, cumprod, cummax, logcumsumexp."""

import torch

from tests.harness import T, case, raises

INF, NAN = float("inf"), float("nan")
FEW = {"layouts": 6}


def zeros_in(shape, generator):
    """Draw values with some zeros, so that gradients depend on products of the others."""
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, 0.0, x)


def ties(shape, generator):
    return torch.randint(3, shape, generator=generator).double()


def nans(shape, generator):
    x = ties(shape, generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, NAN, x)


def hollow(shape, generator):
    """Draw values with some -inf, but not first, where torch's own gradient is NaN."""
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.5, -INF, x)
    x[0] = 0.5
    return x


def second_order(fn):
    """Return a function of the squared gradient of `fn`."""

    def call(x):
        x = x * 1.0
        y = fn(x, 0)
        y = y[0] if isinstance(y, tuple) else y
        (grad,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        return (grad * grad).sum()

    call.__name__ = f"second order {fn.__name__}"
    return call


def in_place(name, **kwargs):
    def call(x, dim):
        y = x * 2
        assert getattr(y, name)(dim, **kwargs) is y
        return y

    call.__name__ = name
    return call


def into(fn):
    def call(x, dim):
        with torch.no_grad():
            made = fn(x, dim)
            out = tuple(m * 0 for m in made) if isinstance(made, tuple) else made * 0
            fn(x, dim, out=out)
        return out

    call.__name__ = f"{fn.__name__} out"
    return call


CASES = [
    case(torch.cumsum, T(7), 0),
    case(torch.cumsum, T(3, 6), 1),
    case(torch.cumsum, T(5, 2, 3), -3),
    case(torch.Tensor.cumsum, T(4, 5, dtype=torch.float32), 0, dtype=torch.float64, options={"tolerance": 1e-6} | FEW),
    case(torch.cumsum, T(3, 6, fill="ints", dtype=torch.int32), 1, options=FEW),
    case(torch.cumsum, T(3, 6, fill="bool"), dim=1, options=FEW),
    case(torch.cumsum, T(6, dtype=torch.complex128), 0, options=FEW),
    case(torch.cumsum, T(4, 6, dtype=torch.float16), 1, options={"tolerance": 2e-3} | FEW),
    # sums and products accumulate in fp32 as in torch, whose gradient of cumprod rounds more often than ours
    case(torch.cumsum, T(24, dtype=torch.bfloat16), 0, options={"tolerance": 2**-8, "try_partial": False} | FEW),
    case(
        torch.cumprod,
        T(6, dtype=torch.bfloat16, fill="unit"),
        0,
        options={"tolerance": 2**-5, "try_partial": False} | FEW,
    ),
    case(torch.cumsum, T(), 0, options={"no_messages": True, "layouts": 2, "try_partial": False}),
    case(torch.cumsum, T(0, 3), 0, options=FEW),
    case(torch.cumsum, T(3), 1, options={"layouts": 2} | raises(IndexError, "Dimension out of range")),
    case(torch.cumsum, T(3, 4, shard_dims=(0,)), 1, options={"no_messages": True}),
    case(torch.cumprod, T(7), 0),
    case(torch.cumprod, T(3, 6, fill=zeros_in), 1),
    case(torch.cumprod, T(6, 2, fill=zeros_in), 0),
    case(torch.Tensor.cumprod, T(4, 5, fill="ints"), -2, dtype=torch.float64, options=FEW),
    case(torch.cumprod, T(4, 5, fill="bool"), 0, options=FEW),
    case(torch.cumprod, T(5, dtype=torch.complex128), 0, options=FEW),
    case(torch.logcumsumexp, T(8), 0),
    case(torch.logcumsumexp, T(3, 6), 1),
    case(torch.logcumsumexp, T(6, 3, fill=hollow), 0),
    case(
        lambda x: torch.logcumsumexp(x * 1000, 0), T(6, 2), options={"name": "logcumsumexp of large", "tolerance": 1e-9}
    ),
    case(torch.logcumsumexp, T(9, dtype=torch.complex128), -1),
    case(
        lambda x: torch.logcumsumexp(x * 3, 0),  # the logarithm crosses a branch cut
        T(9, 2, dtype=torch.complex128),
        options={"name": "logcumsumexp winding", "tolerance": 1e-9},
    ),
    case(
        torch.Tensor.logcumsumexp,
        T(5, fill="ints"),
        0,
        options={"layouts": 2} | raises(NotImplementedError, "not implemented for"),
    ),
    case(torch.cummax, T(8), 0),
    case(torch.cummax, T(3, 6), 1),
    case(torch.cummax, T(7, 2, fill=ties), 0),
    case(torch.cummin, T(2, 7, fill=ties), -1),
    case(torch.cummin, T(7, 2, fill=nans), 0),
    case(torch.Tensor.cummax, T(8, fill=nans), 0),
    case(torch.cummax, T(6, 2, fill="ints"), 0, options=FEW),
    case(torch.cummax, T(6, fill="bool"), 0, options=FEW),
    case(torch.cummin, T(0, 2), 0, options=FEW),
    case(torch.cummax, T(), -1, options={"layouts": 2, "try_partial": False}),
    case(torch.cumulative_trapezoid, T(7)),
    case(torch.cumulative_trapezoid, T(3, 6), dx=0.3, dim=0),
    case(torch.cumulative_trapezoid, T(3, 6), T(6), options=FEW),
    case(torch.cumulative_trapezoid, T(5, 4), T(5), dim=0, options=FEW),
    case(torch.cumulative_trapezoid, T(2, 3, 4), T(3, 4), dim=1, options=FEW),
    case(torch.cumulative_trapezoid, T(3, 1), options={"layouts": 3}),
    case(torch.cumulative_trapezoid, *[T(6, fill="ints", high=99, dtype=torch.uint8)] * 2, options=FEW),
    case(in_place("cumsum_"), T(3, 6), 1, options=FEW),
    case(in_place("cumprod_"), T(3, 6), 1, options=FEW),
    case(in_place("cumprod_"), T(5, 4), 0),
    case(in_place("cumprod_"), T(6, 2), 0, options=FEW | {"grad": False}),
    case(into(torch.cumsum), T(3, 6), 1, options=FEW),
    case(into(torch.cummax), T(6), 0, options=FEW),
    case(lambda x: x.reshape(-1).cumsum(0), T(3, 4), options={"name": "cumsum of merged"}),
    case(lambda x: x.reshape(-1, 2).cumsum(1), T(3, 4, 2), options={"name": "cumsum next to a merged dim"} | FEW),
    *(
        case(second_order(fn), T(5, 2), options=FEW | {"try_partial": False, "tolerance": 1e-8})
        for fn in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax)
    ),
]
