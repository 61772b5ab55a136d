"""Truncated transforms and spectral convolutions with any dims sharded, against torch.fft on one device."""

import torch

from shardfield.ops.spectral import spectral_conv, truncated_fft, truncated_ifft
from shardfield.tensor import ShardTensor
from tests.harness import T, case, double_backward

C = torch.complex128
R = torch.float64
FEW = {"layouts": 16}


def plain_layer(x, weight, n_modes, output_shape=None, norm="forward", compat=False):
    """Compute the layer with torch.fft: transform, shift, slice, contract, write back, unshift, invert."""
    order = len(n_modes)
    dims = list(range(-order, 0))
    real = not x.is_complex()
    grid = list(x.shape[2:])
    counts = [*n_modes[:-1], n_modes[-1] // 2 + 1] if real else list(n_modes)
    spectrum = torch.fft.rfftn(x, dim=dims, norm=norm) if real else torch.fft.fftn(x, dim=dims, norm=norm)
    sizes = list(spectrum.shape[2:])
    shifted = dims[:-1] if real else dims
    if compat and order == 1:
        shifted = []
    if shifted:
        spectrum = torch.fft.fftshift(spectrum, dim=shifted)
    slices, chosen = [slice(None)] * 2, [slice(None)] * (weight.ndim - order)
    for i, (n, m) in enumerate(zip(sizes, counts, strict=True)):
        m = min(n, m)
        spare = weight.shape[weight.ndim - order + i] - m
        begins = (real or compat) and i == order - 1
        slices.append(slice(0, m) if begins else slice(n // 2 - m // 2, n // 2 - m // 2 + m))
        at = 0 if real and i == order - 1 else spare // 2
        chosen.append(slice(at, at + m))
    weight = weight[tuple(chosen)]
    kept = spectrum[tuple(slices)]
    mixed = kept * weight if weight.ndim == order + 1 else torch.einsum("bi...,io...->bo...", kept, weight)
    out = torch.zeros([x.shape[0], mixed.shape[1], *sizes], dtype=mixed.dtype, device=x.device)
    out[tuple(slices)] = mixed
    goal = list(output_shape or grid)
    if compat:
        if order > 1:
            out = torch.fft.fftshift(out, dim=dims[:-1])
    else:
        # still centered: a finer grid is padded with zeros, a coarser one is cropped
        for i, d in enumerate(shifted):
            n, g = grid[i], goal[i]
            lo = g // 2 - n // 2
            pad = [0, 0] * (-d - 1) + [lo, g - n - lo]
            out = torch.nn.functional.pad(out, pad)
        out = torch.fft.ifftshift(out, dim=shifted) if shifted else out
    inverse = torch.fft.irfftn if real else torch.fft.ifftn
    return inverse(out, s=goal, dim=dims, norm=norm)


def layer(x, weight, n_modes, **more):
    """Call spectral_conv on ShardTensors and `plain_layer` on plain tensors: the row compares the two."""
    ours = isinstance(x, ShardTensor) or isinstance(weight, ShardTensor)
    return spectral_conv(x, weight, n_modes, **more) if ours else plain_layer(x, weight, n_modes, **more)


def forward(x, dims, modes, norm=None):
    """Return the selected modes of the full spectrum."""
    if isinstance(x, ShardTensor):
        return truncated_fft(x, dims, modes, norm)
    spectrum = torch.fft.fftn(x, dim=dims, norm=norm)
    for d, kept in zip(dims, modes, strict=True):
        spectrum = spectrum.index_select(
            d, torch.tensor([k % x.shape[d] for k in kept], dtype=torch.int64, device=x.device)
        )
    return spectrum


def inverse(y, dims, modes, sizes, norm=None, real=False):
    """Invert the full spectrum with these modes and zeros elsewhere."""
    if isinstance(y, ShardTensor):
        return truncated_ifft(y, dims, modes, sizes, norm, real)
    for d, kept, n in zip(dims, modes, sizes, strict=True):
        length = n // 2 + 1 if real and d == dims[-1] else n
        shape = list(y.shape)
        shape[d] = length
        y = y.new_zeros(shape).index_add(d, torch.tensor([k % n for k in kept], device=y.device), y)
    return (torch.fft.irfftn if real else torch.fft.ifftn)(y, s=sizes, dim=dims, norm=norm)


CASES = [
    case(forward, T(2, 5, 6, dtype=kind), *more, options=FEW)
    for kind in (R, C)
    for more in [
        ((2,), ((0, 1, 2),)),
        ((1,), ((-2, -1, 0, 1),), "ortho"),
        ((1, 2), ((-1, 0, 1), (0, 1, 3)), "forward"),
        ((2, 1), ((4, 0, -3, 1), (2, 2)), "backward"),
        ((0, 1, 2), ((1,), (0, -1), (0, 1))),
    ]
]
CASES += [case(forward, T(2, 5, 6), (1,), ((),), options=FEW)]
CASES += [
    case(inverse, T(2, 3, 4, dtype=C), *more, options=FEW)
    for more in [
        ((2,), ((0, 1, 2, 3),), (6,), None, True),
        ((2,), ((0, 1, 2, 3),), (7,), "ortho", True),
        ((1, 2), ((-1, 0, 1), (0, 1, 2, 3)), (5, 6), "forward", True),
        ((1, 2), ((-1, 0, 1), (3, 2, 1, 0)), (2, 7), "backward", True),
        ((1, 2), ((-1, 0, 1), (-2, -1, 0, 1)), (4, 5), "ortho"),
        ((0, 1), ((0, 3), (2, -1, 0)), (4, 6)),
    ]
]
CASES += [
    case(layer, T(*x, dtype=kind), T(*w, dtype=C), modes, **more, options=FEW)
    for kind, x, w, modes, more in [
        (R, (2, 3, 7), (3, 2, 3), (4,), {}),
        (R, (1, 2, 6), (2, 3, 4), (6,), {"norm": "ortho"}),
        (R, (2, 3, 6, 8), (3, 2, 4, 3), (4, 4), {}),
        (R, (2, 2, 5, 7), (2, 2, 3, 3), (3, 4), {"norm": "backward"}),
        (R, (2, 2, 5, 7), (2, 2, 3, 3), (3, 4), {"compat": True}),
        (R, (1, 3, 6, 5), (3, 6, 6), (2, 3), {}),
        (R, (1, 2, 4, 6), (2, 2, 9, 9), (8, 12), {}),
        (R, (1, 2, 6, 6), (2, 2, 4, 3), (4, 4), {"output_shape": (9, 8)}),
        (R, (1, 2, 6, 6), (2, 2, 4, 4), (4, 6), {"output_shape": (3, 4)}),
        (R, (1, 2, 6, 6), (2, 2, 4, 4), (4, 6), {"output_shape": (9, 3), "compat": True}),
        (R, (1, 2, 4, 5, 6), (2, 2, 3, 2, 2), (3, 2, 2), {}),
        (C, (1, 2, 5, 6), (2, 3, 3, 4), (3, 4), {}),
        (C, (1, 2, 6, 6), (2, 3, 3, 4), (3, 4), {"compat": True}),
        (C, (1, 2, 6), (2, 3, 4), (4,), {"compat": True, "norm": "ortho"}),
        (C, (1, 2, 5, 6), (2, 3, 3), (3, 3), {"output_shape": (4, 7)}),
    ]
]
CASES += [
    case(
        double_backward(lambda x, w: layer(x, w, (2, 2))),
        T(1, 2, 4, 5),
        T(2, 1, 2, 2, dtype=C),
        options={"name": "a gradient of the layer", "layouts": 4},
    ),
]
