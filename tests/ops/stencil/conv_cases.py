"""Convolutions, plain and transposed."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 6}
SOME = {"layouts": 12}
FIELD = {"layouts": 16}


def spatial(*shape, **more):
    """Build a field that is sharded along its spatial dims only."""
    return T(*shape, shard_dims=tuple(range(2, len(shape))), **more)


def autocast(call):
    """Return the call under autocast."""

    def run(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(*tensors)

    return run


def coarsen_and_refine(x, w):
    """Go down three resolutions and up again, with a skip connection at each."""
    skips = []
    for _ in range(3):
        skips.append(x)
        x = F.conv2d(x, w, None, 2, 1)
    for skip in reversed(skips):
        x = F.conv_transpose2d(x, w, None, 2, 1, output_padding=[1 - n % 2 for n in skip.shape[2:]])
        x = F.conv2d(torch.cat([x, skip], 1), torch.cat([w, w], 1), None, 1, 1)
    return x


CASES = [
    # ---- any sharding of input, weight and bias
    case(F.conv2d, T(2, 3, 8, 7), T(4, 3, 3, 3), T(4), padding=1, options=FIELD),
    case(F.conv2d, T(2, 4, 6, 5), T(6, 2, 3, 3), T(6), padding=1, groups=2, options=FIELD),
    case(F.conv2d, T(2, 4, 6, 5), T(4, 1, 3, 3), None, padding=1, groups=4, options=SOME),
    case(F.conv1d, T(3, 2, 9), T(4, 2, 3), T(4), options=SOME),
    case(F.conv3d, T(1, 2, 5, 4, 6), T(3, 2, 3, 3, 3), T(3), padding=1, options=SOME),
    case(F.conv_transpose2d, T(2, 3, 5, 4), T(3, 4, 3, 3), T(4), 2, 1, 1, options=FIELD),
    case(F.conv_transpose2d, T(2, 4, 5, 4), T(4, 3, 2, 2), T(6), 2, 0, 0, 2, options=SOME),
    case(F.conv_transpose1d, T(2, 3, 7), T(3, 2, 4), T(2), stride=2, padding=1, options=SOME),
    case(F.conv_transpose3d, T(1, 2, 4, 3, 5), T(2, 2, 2, 3, 2), None, 2, options=FEW),
    # ---- a field sharded along its spatial dims: kernels, strides, dilations, paddings
    *(
        case(
            F.conv2d,
            spatial(1, 2, 11, 9),
            T(2, 2, *k, shard_dims=()),
            None,
            stride=s,
            padding=p,
            dilation=d,
            options=FEW,
        )
        for k, s, p, d in [
            ((3, 3), 2, 1, 1),
            ((3, 3), 1, 2, 2),
            ((1, 1), 1, 0, 1),
            ((1, 1), 1, 1, 1),
            ((1, 1), 2, 0, 1),
            ((2, 2), 2, 0, 1),
            ((2, 4), 1, (1, 2), 1),
            ((4, 4), 4, 0, 1),
            ((4, 4), 2, 1, 1),
            ((5, 7), 1, (2, 3), 1),
            ((7, 7), 2, 3, 1),
            ((3, 2), (3, 2), (0, 1), (2, 3)),
            ((2, 2), 5, 0, 1),
            ((3, 3), 1, 5, 1),
            ((9, 9), 1, 4, 1),
        ]
    ),
    *(
        case(F.conv2d, spatial(1, 2, 8, 9), T(2, 2, *k, shard_dims=()), None, 1, mode, d, options=FEW)
        for k, mode, d in [((3, 3), "same", 1), ((4, 2), "same", 1), ((2, 3), "same", 3), ((3, 2), "valid", 2)]
    ),
    *(
        case(
            F.conv_transpose2d,
            spatial(1, 2, 6, 5),
            T(2, 3, *k, shard_dims=()),
            T(3, shard_dims=()),
            s,
            p,
            o,
            1,
            d,
            options=FEW,
        )
        for k, s, p, o, d in [
            ((3, 3), 1, 1, 0, 1),
            ((3, 3), 2, 1, 1, 1),
            ((2, 2), 2, 0, 0, 1),
            ((4, 4), 2, 1, 0, 1),
            ((5, 5), 1, 0, 0, 1),
            ((5, 4), (3, 2), (2, 1), (1, 0), 1),
            ((2, 2), 4, 0, 2, 1),
            ((1, 1), 3, 0, 1, 1),
            ((3, 3), 2, 2, 1, 2),
            ((7, 7), 1, 4, 0, 1),
        ]
    ),
    # ---- a result shorter than the mesh, one row, unbatched
    case(F.conv2d, spatial(2, 2, 5, 5), T(3, 2, 5, 5), T(3), options=FEW),
    case(F.conv2d, T(3, 8, 7), T(4, 3, 3, 3), T(4), padding=1, stride=2, options=SOME),
    case(F.conv1d, T(2, 9), T(4, 2, 4), padding=2, options=FEW),
    case(F.conv_transpose2d, T(3, 5, 4), T(3, 2, 3, 3), T(2), 2, 1, options=FEW),
    # ---- other dtypes, other spellings
    case(
        F.conv2d, T(1, 2, 6, 5, dtype=torch.complex128), T(2, 2, 3, 3, dtype=torch.complex128), padding=1, options=FEW
    ),
    case(torch.convolution, T(1, 2, 6, 5), T(2, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, options=FEW),
    case(torch.convolution, T(1, 2, 6, 5), T(2, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 0], 1, options=FEW),
    case(F.conv2d, spatial(1, 2, 7, 6), T(2, 2, 3, 3), None, np.int64(2), [np.int64(1), 1], np.int64(1), options=FEW),
    case(
        lambda x, w: F.conv2d(x, w, None, torch.tensor(2), (torch.tensor(1), 0)),
        spatial(1, 2, 7, 6),
        T(2, 2, 3, 3),
        options=FEW | {"name": "conv2d, stride and padding computed"},
    ),
    # ---- autocast: half-precision fields with float32 parameters
    *(
        case(
            autocast(fn),
            spatial(1, 2, 7, 6, dtype=dtype),
            T(2, 2, 3, 3, dtype=torch.float32, shard_dims=()),
            T(2, dtype=torch.float32, shard_dims=()),
            # autocast leaves float64 as it is
            options=FEW
            | {"tolerance": 5e-2, "name": f"{name}, {dtype}"}
            | (raises(RuntimeError, text) if dtype is torch.float64 else {}),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        for name, text, fn in [
            ("conv2d, autocast", "Input type (double) and bias type", lambda x, w, b: F.conv2d(x, w, b, 2, 1)),
            (
                "conv_transpose2d, autocast",
                "expected scalar type Double",
                lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1),
            ),
        ]
    ),
    # ---- inference mode, where tensors have no version counter
    case(
        torch.inference_mode()(lambda x, w: F.conv2d(x, w, padding=1).sum().cos()),
        T(2, 2, 6, 5),
        T(2, 2, 3, 3),
        options=FEW | {"name": "conv, inference mode"},
    ),
    # ---- bad calls
    case(
        F.conv2d,
        T(2, 3, 8, 7),
        T(4, 3, 3, 3),
        padding=-1,
        options=FEW | raises(RuntimeError, "negative padding is not supported"),
    ),
    case(
        F.conv_transpose2d,
        T(2, 3, 4, 5),
        T(3, 4, 3, 3),
        padding=-1,
        options=FEW | raises(RuntimeError, "negative padding is not supported"),
    ),
    case(F.conv2d, T(2, 3, 8, 7), T(4, 2, 3, 3), options=FEW | raises(RuntimeError, "channels, but got")),
    case(F.conv2d, T(2, 3, 2, 7), T(4, 3, 3, 3), options=FEW | raises(RuntimeError, "Kernel size can't be greater")),
    case(
        F.conv2d,
        T(2, 3, 8, 7),
        T(4, 3, 3, 3, dtype=torch.float32),
        options=FEW | raises(RuntimeError, "expected scalar type Double but found Float"),
    ),
    case(
        lambda x, w: F.relu(F.conv_transpose2d(F.conv2d(x, w, padding=1, stride=2), w, padding=1), inplace=True),
        spatial(1, 2, 9, 8),
        T(2, 2, 4, 3),
        options=SOME | {"name": "conv, in-place relu"},
    ),
    # ---- double backward
    case(
        double_backward(lambda x, w, b: F.conv2d(x, w, b, 2, 1)),
        T(2, 2, 6, 5),
        T(2, 2, 3, 3),
        T(2),
        options=SOME | {"name": "conv, double backward"},
    ),
    case(
        double_backward(lambda x, w: F.conv_transpose2d(x, w, None, 2, 1)),
        T(1, 2, 4, 5),
        T(2, 2, 3, 3),
        options=FEW | {"name": "conv_transpose, double backward"},
    ),
    # ---- fields flattened by a view: a kernel of size 1 needs no halo, and nothing is sent
    case(
        lambda x, w, b: F.conv1d(x.flatten(2), w, b).unflatten(2, (4, 6)),
        spatial(2, 3, 4, 6),
        T(5, 3, 1, shard_dims=()),
        T(5, shard_dims=()),
        options=FIELD | {"name": "flattened, kernel of size 1", "no_messages": True, "try_partial": False},
    ),
    case(
        lambda x, w: F.conv1d(x.flatten(2), w),
        T(2, 3, 4, 6),
        T(5, 3, 1),
        options=SOME | {"name": "flattened, any sharding"},
    ),
    case(
        lambda x, w, b: F.conv1d(x.flatten(2), w, b, padding=1),
        T(2, 3, 4, 6),
        T(2, 3, 3),
        T(2),
        options=SOME | {"name": "flattened, with a halo"},
    ),
    case(
        lambda x, w: F.conv1d(x.flatten(1), w, groups=3),
        T(3, 4, 6),
        T(6, 1, 1),
        options=SOME | {"name": "no batch, groups"},
    ),
    case(
        double_backward(lambda x, w, b: F.conv1d(x.flatten(2), w, b)),
        T(1, 2, 4, 3),
        T(2, 2, 1),
        T(2),
        options=FEW | {"name": "flattened, double backward"},
    ),
    case(
        autocast(lambda x, w, b: F.conv1d(x.flatten(2), w, b)),
        T(1, 2, 4, 3, dtype=torch.float32),
        T(2, 2, 1, dtype=torch.float32),
        T(2, dtype=torch.float32),
        options=FEW | {"name": "flattened, autocast", "tolerance": 5e-2},
    ),
    # ---- shards in the proportions of the finest resolution, which the ranks that compute a resolution do not hold
    case(coarsen_and_refine, spatial(1, 2, 13, 10), T(2, 2, 3, 3, shard_dims=()), options=SOME),
    case(coarsen_and_refine, spatial(1, 2, 33, 3), T(2, 2, 3, 3, shard_dims=()), options=FEW),
    case(
        double_backward(lambda x, w: F.conv2d(F.avg_pool2d(x, 2), w, None, 2, 1)),
        spatial(1, 2, 13, 6),
        T(2, 2, 3, 3, shard_dims=()),
        options=FEW | {"name": "a pool and a stride, double backward"},
    ),
    case(
        double_backward(lambda x, w: F.conv2d(F.conv2d(x, w, None, 2, 1), w, None, 2, 1)),
        spatial(1, 2, 13, 6),
        T(2, 2, 3, 3, shard_dims=()),
        options={"layouts": 12, "name": "two strides that share a weight, double backward"},
    ),
    case(
        lambda x: F.interpolate(F.avg_pool2d(F.max_pool2d(x, 2), 2), scale_factor=4, mode="bilinear"),
        spatial(1, 2, 26, 12, fill="distinct"),
        options=SOME | {"name": "pools and interpolation"},
    ),
    case(
        lambda x: F.interpolate(F.adaptive_avg_pool2d(F.max_pool2d(x, 3, 2), (4, 3)), (19, 9), mode="nearest"),
        spatial(1, 2, 19, 9, fill="distinct"),
        options=SOME | {"name": "adaptive pool and nearest"},
    ),
    # ---- in bf16: blocks that are narrower than the kernel, for which torch's kernels of 16 channels are wrong
    case(
        F.conv3d,
        T(1, 16, 4, 3, 3, shard_dims=(2,)),
        T(16, 16, 3, 3, 3, shard_dims=()),
        padding=1,
        options=FEW | {"name": "low precision conv3d"},
    ),
    case(
        lambda x, w: F.conv3d(x.contiguous(memory_format=torch.channels_last_3d), w, padding=1),
        T(1, 16, 5, 3, 4, shard_dims=(2,)),
        T(8, 16, 3, 3, 3, shard_dims=()),
        options=FEW | {"name": "low precision conv3d, channels last", "try_partial": False},
    ),
    case(
        F.conv2d,
        T(1, 16, 4, 3, shard_dims=(3,)),
        T(32, 16, 1, 1, shard_dims=()),
        stride=(1, 2),
        padding=1,
        options=FEW | {"name": "low precision conv2d, a stride over a narrow shard"},
    ),
]
