"""Rearrangements: flip, roll, repeat, tril, pixel_shuffle, diff, trapezoid."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 5}
NO_MESSAGES = {"no_messages": True, "layouts": 5}


def named(name, fn, *args, options=None):
    return case(fn, *args, options={"name": name} | (options or FEW))


def unshuffled_before_a_write(x):
    """Return a copy of what is then written: it must not be a view of it."""
    wide = F.pixel_shuffle(x * 1, 2)
    copy = F.pixel_unshuffle(wide, 2)
    wide.add_(1)
    return copy


def channels_shuffled_before_a_write(x):
    """Return a result in new memory, also for one group, before its source is written."""
    source = x * 1
    shuffled = F.channel_shuffle(source, 1)
    source.add_(1)
    return shuffled


CASES = [
    case(torch.flip, T(5, 6), (0,), options=FEW),
    case(torch.flip, T(5, 6), (0, -1), options=FEW),
    case(torch.flip, T(3, 4, 5), [1], options=FEW),
    case(torch.Tensor.flip, T(5, 6), 0, 1, options=FEW),
    case(torch.flip, T(5, 6), (), options=FEW),
    case(torch.flip, T(5, 6), dims=(1,), options=FEW),
    case(torch.flip, T(5, 6), (2,), options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.flip, T(0, 6), (0,), options=FEW),
    case(torch.fliplr, T(5, 6), options=FEW),
    case(torch.fliplr, T(5), options=FEW | raises(RuntimeError, "Input must be >= 2-d")),
    case(torch.flipud, T(5, 6), options=FEW),
    case(torch.rot90, T(4, 5), options=FEW),
    case(torch.rot90, T(2, 4, 5), 2, (1, 2), options=FEW),
    case(torch.rot90, T(4, 5), -1, [1, 0], options=FEW),
    case(torch.rot90, T(4, 5), 4, options=FEW),
    case(torch.rot90, T(4, 5), 1, (0, 0), options=FEW | raises(RuntimeError, "expected rotation dims to be different")),
    case(torch.roll, T(5, 6), 2, 0, options={"layouts": 16}),
    case(torch.roll, T(5, 6), (-1, 8), (0, 1), options=FEW),
    case(torch.roll, T(5, 6), (1, 3), (1, 1), options=FEW),
    case(torch.roll, T(5, 6), np.int64(2), np.int64(1), options=FEW),
    case(lambda x: x.roll(torch.tensor(2), 1), T(5, 6), options=FEW | {"name": "roll, shift computed"}),
    case(torch.roll, T(3, 4), 5, options=FEW),
    case(torch.roll, T(5, 6), (1, 2), 0, options=FEW | raises(RuntimeError, "shifts and dimensions must align")),
    case(torch.roll, T(0, 6), 1, 0, options=FEW),
    case(torch.Tensor.roll, T(7), shifts=3, dims=0, options=FEW),
    case(torch.Tensor.repeat, T(3, 4), 2, 3, options=NO_MESSAGES),
    case(torch.Tensor.repeat, T(4), (2, 1, 2), options=NO_MESSAGES),
    case(torch.Tensor.repeat, T(3, 4), 0, 2, options=NO_MESSAGES),
    case(torch.Tensor.repeat, T(3, 4), 2, options=FEW | raises(RuntimeError, "Number of dimensions of repeat dims")),
    named("repeat, then use", lambda x: torch.sin(x.repeat(2, 1)).cumsum(0), T(3, 4)),
    case(torch.tile, T(3, 4), (2,), options=NO_MESSAGES),
    case(torch.tile, T(3), dims=(2, 2), options=NO_MESSAGES),
    case(torch.repeat_interleave, T(3, 4), 2, dim=0, options=NO_MESSAGES),
    case(torch.repeat_interleave, T(3, 4), 3, options=NO_MESSAGES),
    case(torch.Tensor.repeat_interleave, T(3, 4), 2, -1, options=NO_MESSAGES),
    case(torch.repeat_interleave, T(3, 4), 0, dim=1, options=NO_MESSAGES),
    case(
        torch.repeat_interleave,
        T(4, 3),
        T(4, shard_dims=(), fill=lambda s, g: torch.tensor([2, 0, 1, 3])),
        dim=0,
        options=FEW,
    ),
    case(
        torch.repeat_interleave,
        T(4, 3),
        T(4, shard_dims=(), fill=lambda s, g: torch.tensor([2, 0, 1, 3])),
        options=FEW | raises(RuntimeError, "repeats must have the same size"),
    ),
    case(torch.repeat_interleave, T(5, 3), T(5, dtype=torch.int64, fill="ints"), dim=0, options={"layouts": 16}),
    case(torch.repeat_interleave, T(5), T(5, dtype=torch.int64, fill="ints"), options={"layouts": 16}),
    case(
        torch.repeat_interleave,
        T(4),
        T(4, fill=lambda s, g: torch.tensor([2, 0, -1, 3])),
        options=FEW | raises(RuntimeError, "repeats can not be negative"),
    ),
    case(torch.tril, T(5, 6), options=NO_MESSAGES),
    case(torch.tril, T(2, 5, 4), 1, options=NO_MESSAGES),
    case(torch.triu, T(5, 6), -2, options=NO_MESSAGES),
    case(torch.triu, T(2, 5, 4), diagonal=2, options=NO_MESSAGES),
    case(torch.triu, T(5), options=FEW | raises(RuntimeError, "triu: input tensor must have at least 2 dimensions")),
    named("tril of a merged dim", lambda x: torch.sin(x.flatten(1)).tril(), T(4, 2, 3)),
    named("tril_", lambda x: x.clone().tril_(), T(5, 6)),
    named("triu_", lambda x: x.clone().triu_(1), T(5, 6)),
    case(F.pixel_shuffle, T(2, 8, 3, 4), 2, options=FEW),
    case(
        F.pixel_shuffle,
        T(2, 6, 3, 4),
        2,
        options=FEW | raises(RuntimeError, "pixel_shuffle expects its input's 'channel' dimension"),
    ),
    case(F.pixel_unshuffle, T(2, 3, 4, 6), 2, options=FEW),
    case(unshuffled_before_a_write, T(2, 4, 3, 5), options=FEW),
    case(F.channel_shuffle, T(2, 6, 3), 3, options=FEW),
    case(channels_shuffled_before_a_write, T(2, 6, 3), options=FEW),
    # ---- differences of neighbors
    case(torch.diff, T(5, 6), options=FEW),
    case(torch.diff, T(5, 6), dim=0, options=FEW),
    case(torch.diff, T(5, 6), 2, 0, options=FEW),
    case(torch.diff, T(3, 2), 5, 0, options=FEW),
    case(torch.diff, T(5), n=0, options=FEW),
    case(torch.diff, T(4, 3), dim=0, prepend=T(2, 3), append=T(1, 3), options=FEW),
    case(torch.diff, T(5, fill="bool"), options=FEW),
    case(torch.diff, T(5), 1, 1, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.trapezoid, T(4, 5), options=FEW),
    case(torch.trapezoid, T(4, 5), dx=0.5, dim=0, options=FEW),
    case(torch.trapezoid, T(4, 5), T(4, 5), options=FEW),
    case(torch.trapezoid, T(4, 5), T(4), dim=0, options=FEW),
    case(torch.trapz, T(1, 5), dim=0, options=FEW),
    case(torch.trapezoid, T(5, fill="ints"), options=FEW),
    case(
        double_backward(lambda x: x.roll(2, 0).flip(1)),
        T(5, 4),
        options=FEW | {"name": "roll and flip, double backward"},
    ),
    case(
        double_backward(lambda x: x.diff(dim=0).repeat(2, 1).tril()),
        T(5, 4),
        options=FEW | {"name": "diff and repeat, double backward"},
    ),
]
