"""Lazy pads: boundary conditions by F.pad, followed by a stencil op."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import T, case, double_backward

FEW = {"layouts": 6}
SOME = {"layouts": 12}
FIELD = {"layouts": 16}


def spatial(*shape, **more):
    """Build a field that is sharded along its spatial dims only."""
    return T(*shape, shard_dims=tuple(range(2, len(shape))), **more)


def sphere(x):
    """Pad circularly along the last dim and by reflection along the one before it."""
    return F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="reflect")


def causal(x, weight, mode):
    """Pad frames before a video and a cell on each side, and convolve, as the autoencoders of videos do."""
    return F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0), mode=mode), weight)


def module(x, weight, bias, mode, padding):
    """Call a convolution module with its own padding mode and these parameters."""
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], padding=padding, padding_mode=mode)
    return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x,))


def written(x, weight):
    """Write into the field between the pad and the convolution; then into the padded field, and a slice of it."""
    x = x * 2
    padded = F.pad(x, (2, 1), mode="circular")
    x.mul_(3)
    found = F.conv1d(padded, weight) + x[..., :1]
    x += found.sum()
    padded = F.pad(x, (2, 1), mode="circular")
    x[..., 0] = 7
    found = found + F.conv1d(padded, weight)
    view = x.view(x.shape)
    padded = F.pad(x, (2, 1), mode="circular")
    view += 1
    found = found + F.conv1d(padded, weight)
    padded = F.pad(x, (2, 1), mode="replicate")
    padded[..., :2] *= 2
    return found + F.conv1d(padded, weight)


def read_again(x, weight):
    """Use the padded field itself, before and after a convolution has read it."""
    padded = F.pad(x, (1, 1, 2, 0), mode="circular")
    first = F.conv2d(padded, weight)
    total = padded.sin().sum() + (padded[..., 1:-1, 1:-1] * first).sum()
    other = F.pad(x, (1, 1, 0, 0), mode="reflect")
    return total, F.conv2d(F.pad(other, (0, 0, 2, 1)), weight), other.cos(), other.shape[-1] * first


def without_grad(x, weight):
    """Pad under no_grad and convolve outside of it, and in the other order."""
    with torch.no_grad():
        padded = F.pad(x, (1, 2), mode="circular")
    first = F.conv1d(padded, weight)
    padded = F.pad(x, (1, 2), mode="circular")
    with torch.no_grad():
        second = F.conv1d(padded, weight)
    return first * second


CASES = [
    *(
        case(causal, T(1, 2, 4, 5, 6), T(3, 2, 3, 3, 3, shard_dims=()), mode, options=FEW)
        for mode in ("replicate", "reflect", "circular")
    ),
    # ---- a boundary condition along each dim
    case(
        lambda x, w, b: F.conv2d(sphere(x), w, b),
        T(2, 3, 6, 7),
        T(4, 3, 3, 3),
        T(4),
        options=FIELD | {"name": "sphere"},
    ),
    case(
        lambda x, w, b: F.conv2d(F.pad(F.pad(x, (2, 2, 0, 0), mode="circular"), (0, 0, 2, 1)), w, b),
        spatial(1, 2, 6, 7),
        T(2, 2, 4, 5),
        T(2),
        options=FIELD | {"name": "circular and zeros"},
    ),
    case(
        lambda x, w: F.conv2d(F.pad(x, (2, 1, 0, 0), mode="circular"), w, padding=(1, 1), stride=2),
        spatial(1, 2, 7, 6),
        T(2, 2, 3, 3),
        options=SOME | {"name": "circular, and zeros of the convolution"},
    ),
    *(
        case(
            module,
            T(2, 3, 5, 6),
            T(4, 3, *kernel),
            T(4),
            mode,
            padding,
            options=SOME,
        )
        for mode, kernel, padding in [
            ("circular", (3, 3), 1),
            ("reflect", (5, 3), (2, 1)),
            ("replicate", (3, 5), "same"),
            ("circular", (2, 4), "same"),
        ]
    ),
    # ---- thin shards, pads wider than the kernel, strides and dilations that skip cells
    *(
        case(
            lambda x, w, pad, mode, s, d: F.conv1d(F.pad(x, pad, mode), w, stride=s, dilation=d),
            spatial(1, 2, 6),
            T(2, 2, k),
            pad,
            mode,
            s,
            d,
            options=SOME | {"name": "thin"},
        )
        for pad, mode, k, s, d in [
            ((5, 4), "circular", 3, 1, 1),
            ((6, 6), "circular", 1, 4, 1),
            ((5, 0), "reflect", 2, 3, 2),
            ((0, 5), "reflect", 3, 1, 3),
            ((3, 3), "replicate", 1, 5, 1),
            ((4, 5), "replicate", 4, 2, 2),
            ((1, 0), "circular", 7, 1, 1),
        ]
    ),
    case(
        lambda x, w: F.conv3d(F.pad(x, (1, 1, 1, 1, 1, 1), mode="circular"), w, groups=2),
        T(1, 2, 3, 4, 4),
        T(2, 1, 3, 3, 3),
        options=FEW | {"name": "three dims, groups"},
    ),
    case(
        lambda x, w: F.conv2d(sphere(x), w), T(3, 5, 6), T(2, 3, 3, 3), options=FEW | {"name": "sphere without a batch"}
    ),
    case(
        lambda x, w: F.conv2d(sphere(x), w),
        T(1, 2, 4, 5, dtype=torch.complex128),
        T(2, 2, 3, 3, dtype=torch.complex128),
        options=FEW | {"name": "sphere of complex numbers"},
    ),
    case(
        double_backward(lambda x, w, b: F.conv2d(sphere(x), w, b)),
        spatial(1, 2, 4, 5),
        T(2, 2, 3, 3),
        T(2),
        options=SOME | {"name": "sphere, double backward"},
    ),
    # ---- pools and unfold
    *(
        case(lambda x, fn=fn: fn(sphere(x)), T(2, 2, 6, 7), options=SOME | {"name": f"sphere, {name}"})
        for name, fn in {
            "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
            "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            "avg_pool and zeros": lambda x: F.avg_pool2d(F.pad(x, (0, 0)), 2, ceil_mode=True),
            "unfold": lambda x: F.unfold(x, 3, padding=1, stride=2),
        }.items()
    ),
    *(
        case(
            lambda x, fn=fn: fn(F.pad(F.pad(x, (3, 2, 0, 0), mode="circular"), (0, 0, 1, 0))),
            spatial(1, 2, 5, 6),
            options=SOME | {"name": f"circular and zeros, {name}"},
        )
        for name, fn in {
            "max_pool": lambda x: F.max_pool2d(x, 3, 1, 1),
            "avg_pool": lambda x: F.avg_pool2d(x, 3, 2),
            "unfold": lambda x: F.unfold(x, (2, 3), dilation=(1, 2)),
        }.items()
    ),
    # ---- other uses of the padded field
    case(written, T(2, 2, 7), T(2, 2, 4), options=SOME),
    case(read_again, spatial(1, 2, 5, 6), T(2, 2, 3, 3), options=SOME),
    case(without_grad, spatial(1, 2, 6), T(2, 2, 4), options=FEW),
    case(
        lambda x: torch.roll(F.pad(x, (1, 1), mode="circular"), 1, -1)[..., 1:].flatten(1),
        spatial(1, 2, 6),
        options=FEW | {"name": "circular, rolled"},
    ),
    case(
        lambda x: torch.fft.fftshift(torch.fft.rfft(F.pad(x, (1, 1), mode="circular")), -1).abs(),
        spatial(3, 4, 6),
        options=FEW | {"name": "circular, transformed"},
    ),
    case(
        lambda x: torch.fft.fftshift(F.pad(x, (1, 1), mode="circular")),
        spatial(1, 2, 6),
        options=FEW | {"name": "circular, shifted"},
    ),
]
