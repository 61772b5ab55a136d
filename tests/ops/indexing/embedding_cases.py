"""Embedding tables and one-hot codes."""

import torch
import torch.nn.functional as F

from tests.harness import T, case

HOW = {"layouts": 8}


def I(*shape, high=7, low=0):  # noqa: E743
    """Index values in [low, high)."""
    return T(*shape, fill=lambda shape, generator: torch.randint(low, high, shape, generator=generator))


def renormed(indices, weight):
    """The table is changed too."""
    table = weight * 1
    return F.embedding(indices, table, max_norm=0.9), table


CASES = [
    case(F.embedding, I(4, 5), T(7, 6), how=HOW),
    case(F.embedding, I(8), T(7, 6), padding_idx=2, how=HOW),
    case(F.embedding, I(8), T(7, 6), padding_idx=-1, how=HOW),
    case(F.embedding, I(20), T(7, 6), scale_grad_by_freq=True, how=HOW),
    case(F.embedding, I(4, 5), T(7, 6, cut=()), how=HOW),
    case(F.embedding, I(0), T(7, 6), how=HOW),
    case(F.embedding, I(4, high=9), T(7, 6), how=HOW),
    case(F.embedding, I(4, low=-2), T(7, 6), how=HOW),
    case(F.embedding, I(4), T(7), how=HOW),
    case(torch.embedding, T(7, 6), I(3, 4), how=HOW),
    case(renormed, I(5), T(7, 6, grad=False), how=HOW | {"partial": False}),
    case(F.one_hot, I(4, 5), how=HOW),
    case(F.one_hot, I(4, 5), 9, how=HOW),
    case(F.one_hot, I(4), 3, how=HOW),
    case(F.one_hot, I(6, low=-1), 9, how=HOW),
    case(F.one_hot, I(0), 3, how=HOW),
    case(F.one_hot, I(0), how=HOW),
    case(F.one_hot, T(3), how=HOW),
]
