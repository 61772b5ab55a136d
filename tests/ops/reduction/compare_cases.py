"""Comparisons of tensors, and statistics composed of other calls."""

import torch

from tests.harness import T, case

FEW = {"layouts": 5}


def filled(x):
    y = x * 1
    y.fill_(2.5)
    z = x * 3
    z[:2].zero_()
    return y, z, torch.fill(x, 1.5)


CASES = [
    case(torch.equal, T(4, 5), T(4, 5), options=FEW),
    case(lambda x: torch.equal(x, x + 0), T(4, 5), options=FEW | {"name": "equal to itself"}),
    case(torch.allclose, T(4, 5), T(4, 5), options=FEW),
    case(torch.Tensor.sum_to_size, T(3, 4, 5), (4, 1), options=FEW),
    case(torch.cov, T(3, 6), options=FEW),
    case(torch.cov, T(3, 6), fweights=T(6, fill="ints", grad=False), correction=0, options=FEW),
    case(torch.cov, T(3, 6), aweights=T(6, fill="positive", grad=False), options=FEW),
    case(torch.cov, T(6), options=FEW),
    case(torch.corrcoef, T(3, 6), options=FEW),
    case(torch.corrcoef, T(1, 6), options=FEW),
    case(filled, T(4, 5), options=FEW | {"try_partial": False}),  # a view of a Partial cannot be written: refused
]
