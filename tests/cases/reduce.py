"""Reductions."""

import torch

from harness import T, case

CASES = [
    case(torch.sum, T(5, 6, 7)),
    case(torch.sum, T(5, 6, 7), dim=1),
    case(torch.sum, T(5, 6, 7), dim=(0, -1), keepdim=True),
    case(torch.mean, T(5, 6, 7)),
    case(torch.mean, T(5, 6, 7), dim=(0, 2)),
    case(torch.mean, T(5, 6), -1, True),
    case(torch.Tensor.sum, T(4)),
]
