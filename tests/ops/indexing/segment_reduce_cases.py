"""segment_reduce: sums, means and extremes of consecutive rows, of segments that several ranks share."""

import torch

from shardfield import runtime
from shardfield.ops.indexing.segment_reduce import segment_csr
from tests.harness import T, case, raises

SOME, FEW = {"layouts": 8}, {"layouts": 4}


def bounds(*values):
    return T(len(values), fill=lambda shape, generator: torch.tensor(values))


def segments(data, reduce, offsets, **kwargs):
    return torch.segment_reduce(data, reduce, offsets=offsets, axis=0, **kwargs)


def by_lengths(data, reduce, lengths, **kwargs):
    return torch.segment_reduce(data, reduce, lengths=lengths, **kwargs)


# Operators with the names, arguments and results of torch_scatter's, which has no wheel here.
LIBRARY = torch.library.Library("shardfield_tests", "FRAGMENT")


def stand_in(reduce):
    def run(src, indptr, optional_out=None):
        return torch.segment_reduce(src, reduce, offsets=indptr, axis=0, initial=0.0)

    return run


for name in ("sum", "mean"):
    LIBRARY.define(f"segment_{name}_csr(Tensor src, Tensor indptr, Tensor? optional_out=None) -> Tensor")
    LIBRARY.impl(f"segment_{name}_csr", stand_in(name), "CompositeImplicitAutograd")
    runtime.active.registry.register_named(f"shardfield_tests.segment_{name}_csr.default", segment_csr)


def csr(src, indptr, reduce):
    return getattr(torch.ops.shardfield_tests, f"segment_{reduce}_csr")(src, indptr, None)


CASES = [
    case(csr, T(9, 3), bounds(0, 4, 4, 9), "sum", options=SOME),
    case(csr, T(9, 3), bounds(0, 4, 4, 9), "mean", options=SOME),
    case(csr, T(7, 2), bounds(0, 3), "sum", options=FEW | {"may_gather": True}),
    case(segments, T(9, 3), "sum", bounds(0, 4, 4, 9), options=SOME),
    case(segments, T(9, 3), "mean", bounds(0, 4, 4, 9), initial=0.0, options=SOME),
    case(segments, T(9, 2, 3), "mean", bounds(0, 1, 9), options=FEW),
    case(segments, T(9, 3, fill="distinct"), "max", bounds(0, 2, 7, 9), options=SOME),
    case(segments, T(9, 3, fill="distinct"), "min", bounds(0, 9), initial=-1.5, options=FEW),
    case(by_lengths, T(7), "sum", bounds(3, 0, 4), initial=2.0, options=SOME),
    case(by_lengths, T(7, 2), "mean", bounds(3, 4), initial=2.0, options=FEW),
    # products, and segments that leave rows out, have no rule
    case(by_lengths, T(7, 2), "prod", bounds(3, 4), options=FEW | {"may_gather": True}),
    case(segments, T(7, 2), "sum", bounds(0, 3), options=FEW | {"may_gather": True}),
    case(
        by_lengths,
        T(7, 2),
        "sum",
        bounds(3, 3),
        options=FEW | {"may_gather": True} | raises(RuntimeError, "Expected all rows of lengths"),
    ),
]
