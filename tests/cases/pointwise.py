"""Pointwise functions."""

import torch

from harness import T, case

CASES = [
    case(torch.relu, T(5, 6)),
    case(torch.add, T(5, 6), T(5, 6)),
    case(torch.mul, T(5, 1, 6), T(4, 1)),
    case(torch.sub, T(5, 6), 2.5),
    case(torch.where, T(5, 6, fill="bool"), T(5, 6), T(6)),
    case(torch.div, T(5, 6), T(5, 6, fill="positive")),
]
