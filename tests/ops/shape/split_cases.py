"""Splits: chunk, split, tensor_split, unbind."""

import torch

from tests.harness import T, case, raises

NO_MESSAGES = {"no_messages": True, "layouts": 4}
FEW = {"layouts": 4}

CASES = [
    case(torch.chunk, T(3, 0, 2), 2, 1, options=NO_MESSAGES),
    case(torch.split, T(3, 0), [0, 0, 0], 1, options=NO_MESSAGES),
    case(torch.tensor_split, T(3, 0), 2, 1, options=NO_MESSAGES),
    case(torch.split, T(7, 4), 3, options=NO_MESSAGES),
    case(torch.split, T(7, 4), [2, 0, 5], options=NO_MESSAGES),
    case(torch.split, T(4, 7), 2, -1, options=NO_MESSAGES),
    case(torch.split, T(4, 7), [2, 4], 1, options=FEW | raises(RuntimeError, "expects split_sizes to sum exactly")),
    case(torch.Tensor.split, T(4, 6), 4, dim=1, options=NO_MESSAGES),
    case(torch.split_with_sizes, T(6, 2), [1, 2, 3], options=NO_MESSAGES),
    case(torch.split, T(0, 4), 2, options=NO_MESSAGES),
    case(torch.split, T(6, 0), 2, options=NO_MESSAGES),
    case(torch.chunk, T(7, 4), 3, options=NO_MESSAGES),
    case(torch.chunk, T(4, 7), 3, 1, options=NO_MESSAGES),
    case(torch.chunk, T(3, 4), 5, options=NO_MESSAGES),
    case(torch.chunk, T(3, 4), 0, options=FEW | raises(RuntimeError, "chunk expects `chunks` to be greater than")),
    case(torch.unsafe_chunk, T(7, 4), 3, options=NO_MESSAGES),
    case(torch.unsafe_split, T(7, 4), 3, options=NO_MESSAGES),
    case(torch.tensor_split, T(7, 4), 3, options=NO_MESSAGES),
    case(torch.tensor_split, T(7, 4), (2, 5), options=NO_MESSAGES),
    case(torch.tensor_split, T(4, 7), [5, 2, -1], 1, options=NO_MESSAGES),
    case(torch.tensor_split, T(7), T(2, shard_dims=(), fill=lambda s, g: torch.tensor([2, 5])), options=NO_MESSAGES),
    case(torch.hsplit, T(4, 6), 3, options=NO_MESSAGES),
    case(torch.hsplit, T(6), [1, 4], options=NO_MESSAGES),
    case(torch.hsplit, T(4, 5), 3, options=FEW | raises(RuntimeError, "hsplit attempted to split along dimension")),
    case(torch.vsplit, T(6, 4), 2, options=NO_MESSAGES),
    case(torch.dsplit, T(2, 3, 4), 2, options=NO_MESSAGES),
    case(torch.unbind, T(3, 4), options=NO_MESSAGES),
    case(torch.unbind, T(2, 3, 4), 1, options=NO_MESSAGES),
    case(torch.unbind, T(2, 3, 4), -1, options=NO_MESSAGES),
    case(torch.unbind, T(5), options=NO_MESSAGES),
    case(torch.unbind, T(0, 3), options=NO_MESSAGES),
    case(torch.unbind, T(2, 3), 2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(lambda x: list(x), T(3, 4), options=NO_MESSAGES | {"name": "iterate"}),
    case(lambda x: torch.sin(x.flatten(1)).chunk(3, 1), T(2, 4, 3), options=FEW | {"name": "split merged"}),
    case(
        lambda x: torch.sin(x.flatten(0, 1)).chunk(3, 1),
        T(2, 4, 3),
        options=NO_MESSAGES | {"name": "keep merged", "try_partial": False},
    ),
    case(lambda x: [r * 2 for r in x.flatten(0, 1).unbind()], T(2, 3, 2), options=FEW | {"name": "unbind merged"}),
    case(lambda x: torch.stack([torch.sin(r) for r in x.unbind(1)], 1), T(2, 4, 3), options=FEW | {"name": "each row"}),
]
