"""unfold, fold, pixel_shuffle, max_unpool and fractional_max_pool."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises
from tests.ops.stencil.pool_cases import FEW, FIELD, SOME, spatial


def places(high):
    """Return a fill of distinct flat indices for each sample and channel."""

    def fill(shape, generator):
        lead, cells = shape[:2], torch.Size(shape[2:]).numel()
        rows = [torch.randperm(high, generator=generator)[:cells] for _ in range(torch.Size(lead).numel())]
        return torch.stack(rows).view(shape)

    return fill


def pool_and_unpool(x):
    """Apply a max pool with overlapping windows and its inverse."""
    made, at = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    return F.max_unpool2d(made * 2, at, 3, 2, 1, output_size=x.shape)


def drawn(x):
    """Compare maxima of random windows with the elements at their indices."""
    made, at = F.fractional_max_pool2d(x, 2, output_size=(4, 3), return_indices=True)
    return made - torch.gather(x.flatten(2), 2, at.flatten(2)).reshape(made.shape)


samples = T(2, 3, 2, fill="unit", grad=False)
CASES = [
    # ---- unfold
    case(F.unfold, T(2, 3, 6, 5), 2, options=FIELD),
    case(F.unfold, T(2, 3, 6, 5), 3, padding=1, options=FIELD),
    *(
        case(F.unfold, spatial(1, 2, 7, 6), k, d, p, s, options=FEW)
        for k, d, p, s in [
            (2, 1, 0, 2),
            ((3, 2), (2, 1), (1, 0), (1, 2)),
            (3, 1, 2, 3),
            (5, 1, 2, 1),
            ((7, 6), 1, 0, 1),
            (1, 1, 1, 2),
        ]
    ),
    case(F.unfold, T(3, 6, 5), 2, 1, 1, options=FEW),
    case(F.unfold, T(1, 2, 6, 5, dtype=torch.complex128), 2, padding=1, options=FEW),
    case(
        F.unfold,
        T(2, 3, 6, 5),
        7,
        options=FEW | raises(RuntimeError, "calculated shape of the array of sliding blocks"),
    ),
    case(F.unfold, T(2, 3, 6, 5, fill="ints"), 2, options=FEW | raises(NotImplementedError, "not implemented for")),
    case(torch.nn.Unfold(2, stride=2), T(2, 3, 6, 4), options=FEW | {"name": "Unfold"}),
    # ---- fold
    case(F.fold, T(2, 12, 20), (6, 5), 2, options=FIELD),
    case(F.fold, T(2, 18, 30), (6, 5), 3, padding=1, options=FIELD),
    *(
        case(F.fold, T(1, 2 * k[0] * k[1], n, shard_dims=(2,)), (7, 6), k, d, p, s, options=FEW)
        for k, d, p, s, n in [
            ((2, 2), 1, 0, 2, 9),
            ((3, 2), (2, 1), (1, 0), (1, 2), 15),
            ((3, 3), 1, 2, 3, 9),
            ((5, 5), 1, 2, 1, 42),
            ((1, 1), 1, 1, 2, 20),
        ]
    ),
    case(F.fold, T(12, 20), (6, 5), 2, options=FEW),
    case(
        F.fold,
        T(2, 12, 21),
        (6, 5),
        2,
        options=FEW | raises(RuntimeError, "to match the calculated number of sliding blocks"),
    ),
    case(
        lambda x: F.fold(F.unfold(x, 3, padding=1).sin(), x.shape[2:], 3, padding=1),
        spatial(1, 2, 6, 5),
        options=SOME | {"name": "unfold and fold"},
    ),
    # Two axes shard the rows: the inner one must not move to the cells of a patch.
    case(
        lambda x: F.fold(F.unfold(x, 2).sin(), x.shape[1:], 2),
        T(6, 5, 2, shard_dims=(1,)),
        options=FEW | {"name": "fold rows of two axes"},
    ),
    # ---- pixels and channels
    case(F.pixel_shuffle, T(2, 2, 8, 3, 4), 2, options=FEW),
    case(F.pixel_shuffle, T(9, 3, 4), 3, options=FEW),
    case(F.pixel_unshuffle, T(2, 2, 6, 4), 2, options=FEW),
    case(
        F.pixel_unshuffle,
        T(2, 5, 4),
        2,
        options=FEW | raises(RuntimeError, "pixel_unshuffle expects height to be divisible"),
    ),
    case(torch.native_channel_shuffle, T(2, 6, 3, 2, grad=False), 2, options=FEW),
    case(
        F.channel_shuffle,
        T(2, 6, 3),
        4,
        options=FEW | raises(RuntimeError, "Number of channels must be divisible by groups"),
    ),
    # ---- max_unpool
    case(F.max_unpool2d, T(2, 3, 4, 3), T(2, 3, 4, 3, fill=places(48)), 2, options=FIELD),
    case(F.max_unpool1d, T(2, 3, 5), T(2, 3, 5, fill=places(10)), 2, options=SOME),
    case(F.max_unpool3d, T(2, 2, 2, 3, 2), T(2, 2, 2, 3, 2, fill=places(96)), 2, options=FEW),
    case(
        F.max_unpool2d,
        T(3, 4, 3),
        T(3, 4, 3, fill=lambda s, g: places(63)((3, 1, 4, 3), g)[:, 0]),
        2,
        output_size=(9, 7),
        options=FEW,
    ),
    case(
        F.max_unpool2d,
        T(2, 3, 4, 3),
        T(2, 3, 4, 3, fill=places(99)),
        2,
        options=FEW | raises(RuntimeError, "Found an invalid max index", device_asserts=True),
    ),
    case(
        F.max_unpool2d,
        T(2, 3, 4, 3),
        T(2, 3, 3, 3, fill=places(20)),
        2,
        options=FEW | raises(RuntimeError, "Expected shape of indices to be same"),
    ),
    case(pool_and_unpool, T(2, 2, 7, 6), options=SOME),
    # ---- fractional_max_pool
    case(F.fractional_max_pool2d, T(2, 3, 7, 8), 2, (4, 3), _random_samples=samples, options=SOME),
    case(
        F.fractional_max_pool2d,
        T(2, 3, 7, 8),
        2,
        output_ratio=(0.5, 0.6),
        return_indices=True,
        _random_samples=samples,
        options=FEW,
    ),
    case(F.fractional_max_pool2d, T(3, 7, 8), 2, 3, _random_samples=T(1, 3, 2, fill="unit", grad=False), options=FEW),
    case(
        F.fractional_max_pool3d,
        T(2, 3, 4, 5, 4),
        2,
        2,
        _random_samples=T(2, 3, 3, fill="unit", grad=False),
        options=FEW,
    ),
    case(drawn, T(2, 2, 7, 6), options=FEW),
    case(
        F.fractional_max_pool2d,
        T(2, 3, 7, 8),
        2,
        options=FEW | raises(ValueError, "requires specifying either an output_size"),
    ),
    # ---- double backward
    case(
        double_backward(lambda x: F.unfold(x, 3, padding=1)),
        T(1, 2, 5, 4),
        options=FEW | {"name": "unfold, double backward"},
    ),
    case(double_backward(lambda x: F.fold(x, (5, 4), 2)), T(1, 8, 12), options=FEW | {"name": "fold, double backward"}),
    case(
        double_backward(lambda x: pool_and_unpool(x)),
        T(1, 2, 5, 4),
        options=FEW | {"name": "max_unpool, double backward"},
    ),
]
