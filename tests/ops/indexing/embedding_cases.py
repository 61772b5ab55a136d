"""Embedding tables and one-hot codes."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, raises

OPTIONS = {"layouts": 8}


def I(*shape, high=7, low=0):  # noqa: E743
    """Index values in [low, high)."""
    return T(*shape, fill=lambda shape, generator: torch.randint(low, high, shape, generator=generator))


def values(*index):
    """Build an index argument with these values."""
    return T(len(index), fill=lambda shape, generator: torch.tensor(index))


def renormed(indices, weight):
    """Call an embedding with max_norm, which writes into the table."""
    table = weight * 1
    return F.embedding(indices, table, max_norm=0.9), table


CASES = [
    case(F.embedding, I(4, 5), T(7, 6), options=OPTIONS),
    case(F.embedding, I(8), T(7, 6), padding_idx=2, options=OPTIONS),
    case(F.embedding, I(8), T(7, 6), padding_idx=-1, options=OPTIONS),
    case(F.embedding, I(20), T(7, 6), scale_grad_by_freq=True, options=OPTIONS),
    case(F.embedding, I(4, 5), T(7, 6, shard_dims=()), options=OPTIONS),
    case(F.embedding, I(0), T(7, 6), options=OPTIONS),
    case(
        F.embedding,
        values(6, 3, 9, 2),
        T(7, 6),
        options=OPTIONS | raises(IndexError, "index out of range", device_asserts=True),
    ),
    case(
        F.embedding,
        values(6, -2, 0, 2),
        T(7, 6),
        options=OPTIONS | raises(IndexError, "index out of range", device_asserts=True),
    ),
    case(F.embedding, I(4), T(7), options=OPTIONS | raises(RuntimeError, "'weight' must be 2-D")),
    case(torch.embedding, T(7, 6), I(3, 4), options=OPTIONS),
    case(renormed, I(5), T(7, 6, grad=False), options=OPTIONS | {"try_partial": False}),
    case(F.one_hot, I(4, 5), options=OPTIONS),
    case(F.one_hot, I(4, 5), 9, options=OPTIONS),
    case(F.one_hot, I(4), 3, options=OPTIONS | raises(RuntimeError, "Class values must be smaller than num_classes")),
    case(F.one_hot, values(0, 3, -1), 9, options=OPTIONS | raises(RuntimeError, "Class values must be non-negative")),
    case(F.one_hot, I(0), 3, options=OPTIONS),
    case(F.one_hot, I(0), options=OPTIONS | raises(RuntimeError, "Can not infer total number of classes")),
    case(F.one_hot, T(3), options=OPTIONS | raises(RuntimeError, "one_hot is only applicable to index tensor")),
]
