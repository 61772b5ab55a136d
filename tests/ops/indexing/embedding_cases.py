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


def bags(mode, padding_idx=None, weighted=False):
    """Return a call of embedding_bag whose indices come with offsets, and perhaps with weights."""

    def run(indices, table, offsets, weights=None):
        return F.embedding_bag(indices, table, offsets, mode=mode, per_sample_weights=weights, padding_idx=padding_idx)

    return run


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
    # ---- bags of one length
    *(case(F.embedding_bag, I(5, 3), T(7, 6), mode=mode, options=OPTIONS) for mode in ("sum", "mean", "max")),
    *(case(F.embedding_bag, I(5, 3), T(7, 6), mode=m, padding_idx=2, options=OPTIONS) for m in ("sum", "mean", "max")),
    case(F.embedding_bag, I(5, 3), T(7, 6), mode="sum", per_sample_weights=T(5, 3), options=OPTIONS),
    case(
        F.embedding_bag, I(5, 3), T(7, 6), mode="sum", scale_grad_by_freq=True, options=OPTIONS | {"may_gather": True}
    ),
    case(F.embedding_bag, I(5, 0), T(7, 6), options=OPTIONS | raises(RuntimeError, "step must be nonzero")),
    # ---- bags of other lengths, some of them empty
    *(case(bags(m), I(9), T(7, 6), values(0, 3, 3, 8), options=OPTIONS | {"name": m}) for m in ("sum", "mean", "max")),
    *(case(bags(m, 1), I(9), T(7, 6), values(0, 4), options=OPTIONS | {"name": f"pad {m}"}) for m in ("mean", "max")),
    case(bags("sum"), I(9), T(7, 6), values(0, 4), T(9), options=OPTIONS | {"name": "weighted"}),
    case(F.embedding_bag, I(9), T(7, 6), values(0, 4, 9), include_last_offset=True, options=OPTIONS),
    # ---- bad calls
    case(
        F.embedding_bag,
        I(9),
        T(7, 6),
        values(1, 4),
        options=OPTIONS | raises(RuntimeError, "offsets[0] has to be 0", device_asserts=True),
    ),
    case(F.embedding_bag, I(9), T(7, 6), options=OPTIONS | raises(ValueError, "offsets has to be a 1D Tensor")),
    case(
        F.embedding_bag, I(5, 3), T(7, 6), mode="median", options=OPTIONS | raises(ValueError, "mode has to be one of")
    ),
    case(
        F.embedding_bag,
        values(2, 0, 7, 1),
        T(7, 6),
        values(0, 2),
        options=OPTIONS | raises(RuntimeError, "Expected idx >= 0", device_asserts=True),
    ),
]
