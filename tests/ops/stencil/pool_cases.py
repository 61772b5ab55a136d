"""Max, average and norm pools."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 6}
SOME = {"layouts": 12}
FIELD = {"layouts": 16}


def spatial(*shape, **more):
    """Build a field that is sharded along its spatial dims only."""
    return T(*shape, shard_dims=tuple(range(2, len(shape))), **more)


def ties(shape, generator):
    """Draw few different values, so that windows have several maxima."""
    return torch.randint(3, shape, generator=generator).double()


def rough(shape, generator):
    """Draw -inf with a few finite values and NaNs."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = torch.where(x > 0.8, x, -torch.inf)
    return torch.where(x > 1.6, torch.nan, x)


def autocast(call):
    """Return the call under autocast."""

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    return run


CASES = [
    # ---- any sharding
    case(F.max_pool2d, T(2, 3, 8, 7), 2, options=FIELD),
    case(F.max_pool2d, T(2, 3, 8, 7), 3, 2, 1, options=FIELD),
    case(F.avg_pool2d, T(2, 3, 8, 7), 2, options=FIELD),
    case(F.avg_pool2d, T(2, 3, 8, 7), 3, 2, 1, options=FIELD),
    case(F.max_pool1d, T(2, 3, 9), 3, options=SOME),
    case(F.max_pool1d, T(2, 3, 9), 3, 1, 1, options=SOME),
    case(F.avg_pool1d, T(2, 3, 9), 3, 2, 1, options=SOME),
    case(F.max_pool3d, T(2, 2, 5, 4, 6), 2, 1, 1, options=SOME),
    case(F.avg_pool3d, T(2, 2, 5, 4, 6), 3, 2, 1, options=SOME),
    # ---- a field sharded along its spatial dims: kernels, strides, paddings, dilations, ceil_mode
    *(
        case(F.max_pool2d, spatial(1, 2, 11, 9), k, s, p, d, ceil, options=FEW)
        for k, s, p, d, ceil in [
            (3, 1, 1, 1, False),
            (2, 3, 1, 1, True),
            ((3, 2), (2, 3), (1, 0), 1, True),
            (3, 2, 1, 2, False),
            (3, 3, 1, 2, True),
            ((1, 5), 1, (0, 2), 1, False),
            (7, 1, 3, 1, False),
            (9, 4, 4, 1, True),
            (2, 5, 0, 1, False),
            (2, 1, 1, 3, True),
        ]
    ),
    *(
        case(F.avg_pool2d, spatial(1, 2, 11, 9), k, s, p, ceil, pad, divisor, options=FEW)
        for k, s, p, ceil, pad, divisor in [
            (3, 1, 1, False, False, None),
            (3, 2, 1, True, True, None),
            (3, 2, 1, True, False, None),
            (2, 3, 1, True, False, None),
            ((3, 4), (2, 3), (1, 2), True, False, None),
            ((3, 4), (2, 3), (1, 2), True, True, None),
            (3, 2, 1, True, False, 7),
            (7, 1, 3, False, False, None),
            (2, 5, 0, False, True, None),
        ]
    ),
    case(F.avg_pool1d, T(2, 9), 4, 3, 2, True, False, options=SOME),
    case(F.avg_pool3d, spatial(1, 1, 5, 6, 4), 3, 2, 1, True, False, options=FEW),
    case(F.avg_pool3d, spatial(1, 1, 5, 6, 4), 3, 2, 1, True, True, -3, options=FEW),
    # ---- indices, ties, NaN and infinity
    case(F.max_pool1d, T(2, 3, 9, fill=ties), 3, 2, 1, return_indices=True, options=SOME),
    case(F.max_pool2d, T(2, 3, 8, 7, fill=ties), 3, 2, 1, return_indices=True, options=FIELD),
    case(F.max_pool2d, spatial(1, 2, 8, 7, fill=ties), 2, 1, return_indices=True, options=SOME),
    case(F.max_pool2d, spatial(1, 2, 8, 7, fill=ties), 3, 3, 1, 2, True, return_indices=True, options=SOME),
    case(F.max_pool3d, spatial(1, 2, 4, 5, 4, fill=ties), 3, 2, 1, return_indices=True, options=FEW),
    case(F.max_pool2d, spatial(1, 2, 8, 7, fill=rough, grad=False), 3, 2, 1, return_indices=True, options=SOME),
    case(F.max_pool2d, spatial(1, 2, 8, 7, fill=rough, grad=False), 2, 1, 1, 3, return_indices=True, options=SOME),
    case(F.max_pool2d_with_indices, T(2, 3, 6, 7, fill=ties), 2, 2, 1, options=FEW),
    case(F.max_pool1d_with_indices, T(2, 3, 6, fill=ties), 2, 2, 1, options=FEW),
    case(F.max_pool3d_with_indices, T(1, 2, 6, 3, 4, fill=ties), 2, options=FEW),
    # ---- unbatched, shorter than the mesh, one window, other dtypes and spellings
    case(F.max_pool2d, T(3, 8, 7), 3, 2, 1, return_indices=True, options=SOME),
    case(F.avg_pool3d, T(2, 4, 5, 3), 2, 1, 1, options=FEW),
    case(F.max_pool2d, spatial(2, 2, 5, 5), 5, options=FEW),
    case(F.avg_pool2d, spatial(2, 2, 5, 5), (2, 5), options=FEW),
    case(F.max_pool2d, T(2, 2, 6, 5, fill="ints", dtype=torch.int32, high=9), 3, 2, 1, options=SOME),
    case(F.max_pool2d, T(2, 2, 6, 5, fill="ints", dtype=torch.uint8, high=2), 3, 2, 1, options=FEW),
    case(F.avg_pool2d, T(2, 2, 6, 5, fill="ints", high=99), 3, 2, 1, True, False, options=FEW),
    case(F.avg_pool1d, T(2, 2, 9, fill="ints", high=99), 3, 2, 1, options=FEW),
    case(torch.max_pool2d, T(2, 2, 6, 5), [2, 2], [], options=FEW),
    case(torch.nn.MaxPool2d(3, 2, 1), T(2, 2, 6, 5), options=FEW | {"name": "MaxPool2d"}),
    case(torch.nn.AvgPool2d(3, 2, 1), T(2, 2, 6, 5), options=FEW | {"name": "AvgPool2d"}),
    # ---- norms
    case(F.lp_pool1d, T(2, 3, 9, fill="positive"), 3, 3, 2, True, options=FEW),
    case(F.lp_pool2d, T(2, 2, 8, 7, fill="positive"), 2.0, 2, options=SOME),
    case(F.lp_pool2d, T(2, 2, 8, 7, fill="positive"), 3, (3, 2), 2, True, options=FEW),
    case(F.lp_pool3d, T(1, 2, 4, 5, 4, fill="positive"), 2, 2, options=FEW),
    # ---- bad calls
    case(F.max_pool2d, T(2, 3, 8, 7), 3, 2, 2, options=FEW | raises(RuntimeError, "pad should be at most half")),
    case(F.max_pool2d, T(2, 3, 2, 7), 3, options=FEW | raises(RuntimeError, "Output size is too small")),
    case(F.avg_pool2d, T(2, 3, 8, 7), 3, 0, options=FEW | raises(RuntimeError, "stride should not be zero")),
    case(
        F.avg_pool2d,
        T(2, 3, 8, 7),
        3,
        divisor_override=0,
        options=FEW | raises(RuntimeError, "divisor must be not zero"),
    ),
    case(F.avg_pool2d, T(8, 7), 3, options=FEW | raises(IndexError, "Dimension out of range")),
    case(
        F.avg_pool1d,
        T(2, 3, 8),
        3,
        divisor_override=2,
        options=FEW | raises(TypeError, "unexpected keyword argument 'divisor_override'", signature=True),
    ),
    case(F.avg_pool2d, T(2, 2, 8, 7, fill="bool"), 3, options=FEW | raises(NotImplementedError, "not implemented for")),
    case(F.max_pool1d, T(2, 2, 8, fill="ints"), 3, options=FEW | raises(NotImplementedError, "not implemented for")),
    # ---- autocast, which runs some pools in float32: also on empty shards
    *(
        case(autocast(call), T(2, 2, 5, 4, 3, dtype=torch.bfloat16), options=FEW | {"name": name, "tolerance": 1e-2})
        for name, call in {
            "avg_pool3d, autocast": lambda x: F.avg_pool3d(x, 3, 2, 1),
            "adaptive_avg_pool3d, autocast": lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)),
        }.items()
    ),
    # ---- double backward
    case(
        double_backward(lambda x: F.max_pool2d(x, 3, 2, 1)),
        T(2, 2, 6, 5),
        options=SOME | {"name": "max_pool, double backward"},
    ),
    case(
        double_backward(lambda x: F.avg_pool2d(x, 3, 2, 1, True, False)),
        T(2, 2, 6, 5),
        options=SOME | {"name": "avg_pool, double backward"},
    ),
]
