"""Adaptive pools."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises
from tests.ops.stencil.pool_cases import FEW, FIELD, SOME, rough, spatial, ties

CASES = [
    # ---- any sharding
    case(F.adaptive_avg_pool2d, T(2, 3, 8, 7), (4, 3), options=FIELD),
    case(F.adaptive_avg_pool2d, T(2, 3, 8, 7), 1, options=FIELD),
    case(F.adaptive_max_pool2d, T(2, 3, 8, 7), (4, 3), options=FIELD),
    case(F.adaptive_max_pool2d, T(2, 3, 8, 7), 1, options=FIELD),
    case(F.adaptive_avg_pool1d, T(2, 3, 9), 4, options=SOME),
    case(F.adaptive_max_pool1d, T(2, 3, 9), 4, options=SOME),
    case(F.adaptive_avg_pool3d, T(1, 2, 5, 4, 6), (2, 3, 4), options=SOME),
    # the result of an empty shard is no view of the leaf
    case(lambda x: F.adaptive_avg_pool3d(x, 2).mul_(2), T(2, 2, 1, 1, 3), options=FEW | {"name": "pool, then write"}),
    case(F.adaptive_max_pool3d, T(1, 2, 5, 4, 6), (2, 3, 4), options=SOME),
    # ---- sizes: unchanged, larger, smaller than the mesh, a divisor
    *(
        case(call, spatial(1, 2, 9, 8), size, options=FEW)
        for call in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d)
        for size in [(None, 2), (9, 8), (12, 11), (2, 1), (1, 5), (3, 4), (7, 7)]
    ),
    case(F.adaptive_avg_pool1d, spatial(2, 2, 5), 13, options=FEW),
    case(F.adaptive_avg_pool3d, spatial(1, 1, 5, 4, 3), 1, options=FEW),
    case(F.adaptive_max_pool3d, spatial(1, 1, 5, 4, 3), (None, 1, 5), options=FEW),
    case(F.adaptive_avg_pool2d, T(2, 3, 8, 7, grad=False), (0, 2), options=FEW),  # no gradient in torch
    # ---- indices, ties, NaN and infinity
    case(F.adaptive_max_pool1d, T(2, 3, 9, fill=ties), 4, return_indices=True, options=SOME),
    case(F.adaptive_max_pool2d, T(2, 3, 8, 7, fill=ties), (3, 5), return_indices=True, options=FIELD),
    case(F.adaptive_max_pool2d, T(2, 3, 8, 7, fill=ties), (1, 2), return_indices=True, options=FIELD),
    case(F.adaptive_max_pool3d, T(1, 2, 4, 5, 3, fill=ties), (2, 1, 2), return_indices=True, options=SOME),
    case(F.adaptive_max_pool2d, spatial(1, 2, 8, 7, fill=rough, grad=False), (5, 3), return_indices=True, options=SOME),
    case(F.adaptive_max_pool2d, spatial(1, 2, 8, 7, fill=rough, grad=False), (2, 1), return_indices=True, options=SOME),
    case(torch.adaptive_max_pool1d, T(2, 3, 9, fill=ties), 2, options=FEW),
    case(F.adaptive_max_pool2d_with_indices, T(2, 3, 6, 5, fill=ties), 2, options=FEW),
    # ---- unbatched, bad calls, double backward
    case(F.adaptive_avg_pool2d, T(3, 8, 7), (3, 2), options=SOME),
    case(F.adaptive_max_pool2d, T(3, 8, 7), (3, 1), return_indices=True, options=SOME),
    case(torch.nn.AdaptiveAvgPool2d((1, None)), T(2, 2, 6, 5), options=FEW | {"name": "AdaptiveAvgPool2d"}),
    case(F.adaptive_avg_pool2d, T(8, 7), 3, options=FEW | raises(RuntimeError, "Expected 3D or 4D tensor")),
    case(
        lambda x: F.adaptive_avg_pool2d(x[:, :, :0], 3),
        T(2, 4, 5, 6),
        options=SOME | {"name": "average of no rows"} | raises(RuntimeError, "non-zero size"),
    ),
    case(
        F.adaptive_avg_pool2d,
        T(2, 3, 8, 7),
        -1,
        options=FEW | raises(RuntimeError, "elements of output_size must be greater"),
    ),
    case(
        F.adaptive_avg_pool2d,
        T(2, 3, 8, 7, fill="ints"),
        2,
        options=FEW | raises(NotImplementedError, "not implemented for"),
    ),
    case(
        F.adaptive_max_pool2d,
        T(2, 3, 0, 7),
        2,
        options=FEW | raises(RuntimeError, "Expected input to have non-zero size"),
    ),
    case(
        double_backward(lambda x: F.adaptive_avg_pool2d(x, (3, 1))),
        T(2, 2, 5, 4),
        options=SOME | {"name": "adaptive_avg, double backward"},
    ),
    case(
        double_backward(lambda x: F.adaptive_max_pool2d(x, (3, 1))),
        T(2, 2, 5, 4),
        options=SOME | {"name": "adaptive_max, double backward"},
    ),
]
