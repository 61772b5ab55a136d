"""A tensor in several."""

import torch

from tests.harness import T, case

FREE = {"free": True, "layouts": 4}
FEW = {"layouts": 4}

CASES = [
    case(torch.chunk, T(3, 0, 2), 2, 1, how=FREE),
    case(torch.split, T(3, 0), [0, 0, 0], 1, how=FREE),
    case(torch.tensor_split, T(3, 0), 2, 1, how=FREE),
    case(torch.split, T(7, 4), 3, how=FREE),
    case(torch.split, T(7, 4), [2, 0, 5], how=FREE),
    case(torch.split, T(4, 7), 2, -1, how=FREE),
    case(torch.split, T(4, 7), [2, 4], 1, how=FEW),
    case(torch.Tensor.split, T(4, 6), 4, dim=1, how=FREE),
    case(torch.split_with_sizes, T(6, 2), [1, 2, 3], how=FREE),
    case(torch.split, T(0, 4), 2, how=FREE),
    case(torch.split, T(6, 0), 2, how=FREE),
    case(torch.chunk, T(7, 4), 3, how=FREE),
    case(torch.chunk, T(4, 7), 3, 1, how=FREE),
    case(torch.chunk, T(3, 4), 5, how=FREE),
    case(torch.chunk, T(3, 4), 0, how=FEW),
    case(torch.unsafe_chunk, T(7, 4), 3, how=FREE),
    case(torch.unsafe_split, T(7, 4), 3, how=FREE),
    case(torch.tensor_split, T(7, 4), 3, how=FREE),
    case(torch.tensor_split, T(7, 4), (2, 5), how=FREE),
    case(torch.tensor_split, T(4, 7), [5, 2, -1], 1, how=FREE),
    case(torch.tensor_split, T(7), T(2, cut=(), fill=lambda s, g: torch.tensor([2, 5])), how=FREE),
    case(torch.hsplit, T(4, 6), 3, how=FREE),
    case(torch.hsplit, T(6), [1, 4], how=FREE),
    case(torch.hsplit, T(4, 5), 3, how=FEW),
    case(torch.vsplit, T(6, 4), 2, how=FREE),
    case(torch.dsplit, T(2, 3, 4), 2, how=FREE),
    case(torch.unbind, T(3, 4), how=FREE),
    case(torch.unbind, T(2, 3, 4), 1, how=FREE),
    case(torch.unbind, T(2, 3, 4), -1, how=FREE),
    case(torch.unbind, T(5), how=FREE),
    case(torch.unbind, T(0, 3), how=FREE),
    case(torch.unbind, T(2, 3), 2, how=FEW),
    case(lambda x: list(x), T(3, 4), how=FREE | {"name": "iterate"}),
    case(lambda x: torch.sin(x.flatten(1)).chunk(3, 1), T(2, 4, 3), how=FEW | {"name": "split merged"}),
    case(
        lambda x: torch.sin(x.flatten(0, 1)).chunk(3, 1), T(2, 4, 3), how=FREE | {"name": "keep merged", "partial": 0}
    ),
    case(lambda x: [r * 2 for r in x.flatten(0, 1).unbind()], T(2, 3, 2), how=FEW | {"name": "unbind merged"}),
    case(lambda x: torch.stack([torch.sin(r) for r in x.unbind(1)], 1), T(2, 4, 3), how=FEW | {"name": "each row"}),
]
