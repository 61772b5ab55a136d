"""Views."""

import torch

from harness import T, case

FREE = {"free": True}
CASES = [
    case(torch.reshape, T(2, 3, 4, 6), (2, 3, 24), how=FREE),
    case(torch.Tensor.view, T(2, 6, 4), 12, 4, how=FREE),
    case(torch.reshape, T(24, 5), (4, 6, 5)),
    case(torch.reshape, T(4, 6, 5), (-1,), how=FREE),
    case(torch.permute, T(3, 4, 5), (2, 0, 1), how=FREE),
    case(
        lambda x: torch.relu(x.reshape(2, 3, 24) * 2).reshape(2, 3, 4, 6),
        T(2, 3, 4, 6),
        how=FREE | {"name": "round trip", "partial": False},
    ),
]
