"""Lazy spectra: keeping some modes as models do, and every other use of a spectrum."""

import torch

from tests.harness import T, case, double_backward

fft = torch.fft
C = torch.complex128
FEW = {"layouts": 16}


def centre(x, weight, shift_back=fft.ifftshift, s=None, norm="forward"):
    """Keep a block around frequency zero, as neuraloperator does."""
    order, real = x.ndim - 2, not x.is_complex()
    dims = list(range(-order, 0))
    spectrum = (fft.rfftn if real else fft.fftn)(x, norm=norm, dim=dims)
    shifted = dims[:-1] if real else dims
    if shifted:
        spectrum = fft.fftshift(spectrum, dim=shifted)
    sizes = list(x.shape[2:])
    if real:
        sizes[-1] = sizes[-1] // 2 + 1
    kept = [slice(None), slice(None)]
    for n, m in zip(sizes, weight.shape[2:], strict=True):
        kept.append(slice(n // 2 - m // 2, n // 2 - m // 2 + m))
    if real:
        kept[-1] = slice(None, weight.shape[-1])
    out = torch.zeros([x.shape[0], weight.shape[1], *sizes], dtype=C, device=x.device)
    out[tuple(kept)] = torch.einsum("bi...,io...->bo...", spectrum[tuple(kept)], weight)
    if shifted:
        out = shift_back(out, dim=shifted)
    return (fft.irfftn if real else fft.ifftn)(out, s=s or x.shape[2:], dim=dims, norm=norm)


def corners(x, first, second):
    """Keep two blocks at the ends of the spectrum, as the first Fourier neural operators did."""
    m, n = first.shape[2:]
    spectrum = fft.rfft2(x)
    shape = x.shape[0], first.shape[1], x.shape[2], x.shape[3] // 2 + 1
    out = torch.zeros(shape, dtype=C, device=x.device)
    out[:, :, :m, :n] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :n], first)
    out[:, :, -m:, :n] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :n], second)
    return fft.irfft2(out, s=x.shape[2:])


def four_corners(x, weights):
    spectrum = fft.rfftn(x, dim=(2, 3, 4))
    out = torch.zeros(*x.shape[:4], x.shape[4] // 2 + 1, dtype=C, device=x.device)
    low, high = slice(None, 1), slice(-1, None)
    for i, (a, b) in enumerate([(low, low), (high, low), (low, high), (high, high)]):
        out[:, :, a, b, :2] = spectrum[:, :, a, b, :2] * weights[i]
    return fft.irfftn(out, s=x.shape[2:], dim=(2, 3, 4))


def filled(x, start, *blocks, s=None, dim=(-2, -1), undo=fft.irfft2):
    """Invert a spectrum filled with `start` and blocks of modes of another spectrum."""
    spectrum = fft.rfft2(x)
    out = torch.full(spectrum.shape, start, dtype=C, device=x.device)
    for a, b in blocks:
        out[..., a, b] = spectrum[..., a, b] * 2
    return undo(out, s=s, dim=dim)


def used(after):
    """Return a function that applies `after` to the spectrum of a field."""
    return lambda x: after(fft.fftshift(fft.rfft2(x), dim=-2))


def both(x):
    """Use a slice first, then the full spectrum."""
    spectrum = fft.rfft2(x)
    part = spectrum[..., :2, :1]
    return part, spectrum.abs(), spectrum[..., 0], spectrum[..., 1:2, 0:1]


def written(x):
    spectrum = fft.rfft2(x)
    spectrum[..., :2, :2] = 1 + 1j
    return fft.irfft2(spectrum)


def put_after_shift(x):
    spectrum = fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=C, device=x.device)
    out[..., :1, :1] = spectrum[..., :1, :1]
    out = fft.fftshift(out, dim=-2)
    out[..., :1, 1:2] = spectrum[..., 1:2, 1:2]
    return fft.irfft2(out)


def kept_twice(x):
    """Assemble one spectrum, invert it, and use it otherwise."""
    spectrum = fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=C, device=x.device)
    out[..., :2, :2] = spectrum[..., :2, :2]
    return fft.irfft2(out), out.abs(), fft.ifft2(out), fft.irfft2(out, s=(7, 9)), out[..., 1, :]


low, mid, end = slice(0, 2), slice(1, 3), slice(-1, None)
CASES = [
    case(centre, T(*x, dtype=kind), T(*w, dtype=C), options=FEW, **more)
    for kind, x, w, more in [
        (torch.float64, (2, 2, 16), (2, 3, 2), {}),
        (torch.float64, (1, 2, 8, 10), (2, 3, 2, 2), {}),
        (torch.float64, (1, 2, 9, 11), (2, 2, 3, 2), {"shift_back": fft.fftshift, "norm": "ortho"}),
        (torch.float64, (1, 2, 8, 8), (2, 2, 2, 2), {"s": (11, 6)}),
        (torch.float64, (1, 2, 8, 8), (2, 2, 2, 2), {"s": (3, 12), "norm": None}),
        (torch.float64, (1, 1, 4, 5, 6), (1, 2, 2, 2, 2), {}),
        (C, (1, 2, 8, 9), (2, 2, 2, 3), {}),
    ]
]
CASES += [
    case(corners, T(1, 2, 8, 8), T(2, 2, 2, 2, dtype=C), T(2, 2, 2, 2, dtype=C), options=FEW),
    case(four_corners, T(1, 2, 5, 6, 4), T(4, dtype=C, shard_dims=()), options=FEW),
    case(
        double_backward(lambda x, w: centre(x, w)),
        T(1, 2, 6, 8),
        T(2, 1, 2, 2, dtype=C),
        options=FEW | {"name": "double backward"},
    ),
]
CASES += [
    case(filled, T(2, 8, 8), *more, options=FEW, **named)
    for more, named in [
        ((0, (low, low)), {}),
        ((0, (low, low), (end, low)), {"s": (8, 7)}),
        ((0, (low, low), (mid, mid)), {}),  # overlapping blocks
        ((1, (low, low)), {}),  # no zeros
        ((0, (low, slice(None))), {}),
        ((0, (slice(0, 4, 2), low)), {"s": (2, 2)}),
        ((0, (slice(4, 6), slice(3, 5))), {"s": (3, 4)}),  # cropped away
        ((0, (low, low)), {"dim": (-1, -2)}),
        ((0, (low, low)), {"dim": (0, 2)}),
    ]
]
CASES += [case(filled, T(2, 8, 8), 0, (low, low), options=FEW, undo=fft.ifft2)]
CASES += [
    case(used(after), T(3, 6, 8), options=FEW | {"name": name})
    for name, after in {
        "times two": lambda s: s * 2,
        "real": lambda s: s.real,
        "one row": lambda s: s[:, 2],
        "a new dim": lambda s: s[None, :, :2, :2],
        "an index tensor": lambda s: s[:, torch.tensor([0, 2])],
        "some batches": lambda s: s[1:, 2:4, :2],
        "back at once": lambda s: fft.irfft2(fft.ifftshift(s, dim=-2)),
        "everything": lambda s: s[:],
        "nothing": lambda s: s[:, :0],
        "shifted twice": lambda s: fft.fftshift(s, dim=(1, 1))[:, 2:4, :2],
        "shifted all over": lambda s: fft.fftshift(s)[:, 2:4, :2],
    }.items()
]
CASES += [case(fn, T(2, 8, 8), options=FEW) for fn in (both, written, put_after_shift, kept_twice)]


# ---------------------------------------------------------------------- writes


def scaled_block(x, w):
    """Scale a block in place: read, multiply, write back."""
    spectrum = fft.rfft2(x)
    spectrum[..., :2, :2] *= w
    return fft.irfft2(spectrum, s=x.shape[-2:])


def part_written(x):
    """Write into a slice, or into a view of it, which must change the spectrum."""
    spectrum = fft.rfft2(x)
    part = spectrum[..., :2, :2]
    part.mul_(3)
    part.imag[..., 0].zero_()
    row = part[..., :1]
    row += 1
    return spectrum * 2, part, row


def part_written_after(x):
    """The same with a materialized spectrum."""
    spectrum = fft.rfft2(x)
    part = spectrum[..., 1:3, :2]
    before = spectrum * 2
    part *= 2
    return before, spectrum * 1, part * 1


def spectrum_written_after(x):
    """Write into the spectrum, all of it or a slice, which must change an earlier slice."""
    spectrum = fft.rfft2(x)
    part, other = spectrum[..., :2, :2], spectrum[..., 3:5, :2]
    spectrum[..., 1, :] = 0
    first = part * 1
    spectrum[..., :1, :].mul_(5)
    spectrum *= 2
    return first, part, other, spectrum


def same_part_twice(x):
    spectrum = fft.rfft2(x)
    one, two = spectrum[..., :2, :2], spectrum[..., :2, :2]
    one *= 2
    return two, fft.fftshift(spectrum, dim=-2)


def overlapping_parts(x):
    spectrum = fft.rfft2(x)
    one, two = spectrum[..., :2, :2], spectrum[..., 1:3, 1:3]
    one *= 2
    two += 1
    return one, two, spectrum


def first_column_real(x):
    """Write through a view of a view, as neuraloperator does to make a half spectrum that of a real field."""
    spectrum = fft.fftshift(fft.rfft2(x), dim=-2)
    spectrum[..., 0].imag.zero_()
    spectrum[..., -1].imag.zero_()
    return fft.irfft2(fft.ifftshift(spectrum, dim=-2), s=x.shape[-2:])


def field_written(x):
    """Write into the field of a lazy spectrum."""
    y = x * 1
    spectrum, shifted = fft.fft2(y), fft.fftshift(fft.fft2(y))
    y[..., :3, :] = 0
    part = spectrum[..., :2, :2]
    y += 1
    y.copy_(x * 2)
    return part, spectrum, y, shifted


def hermitian(x, w):
    """Invert in two steps, with the first and last column made real in between."""
    spectrum = fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=C, device=x.device)
    out[..., :2, :2] = spectrum[..., :2, :2] * w
    out[..., -2:, :2] = spectrum[..., -2:, :2] * w
    rows = fft.ifftn(out, s=[x.shape[-2]], dim=[-2])
    rows[..., 0].imag.zero_()
    rows[..., -1].imag.zero_()
    return fft.irfft(rows, n=x.shape[-1])


def step_by_step(x):
    """Invert in two steps."""
    spectrum = fft.fftshift(fft.rfft2(x), dim=-2)
    out = torch.zeros_like(spectrum)
    out[..., 3:5, :2] = spectrum[..., 3:5, :2]
    out[..., 5:6, 1:2] = spectrum[..., 5:6, 1:2] * 2
    out = fft.ifftshift(out, dim=-2)
    return fft.irfft(fft.ifft(out, dim=-2), n=7), out.abs()


def one_dim(x, w, dim, n=None, norm=None):
    """Keep modes along one dim, with 1-d transforms."""
    kept = [slice(None)] * x.ndim
    kept[dim] = slice(0, len(w))
    spectrum = (fft.fft if x.is_complex() else fft.rfft)(x, dim=dim, norm=norm)
    out = torch.zeros_like(spectrum)
    out[tuple(kept)] = spectrum[tuple(kept)] * w.view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    return (fft.ifft if x.is_complex() else fft.irfft)(out, n=n or x.shape[dim], dim=dim, norm=norm)


def padded(x, weight, s=None, norm=None):
    """Keep the first modes and let the inverse pad them with zeros, as low-pass filters do."""
    dims = list(range(-weight.ndim, 0))
    kept = (..., *(slice(0, n) for n in weight.shape))
    spectrum = (fft.fftn if x.is_complex() else fft.rfftn)(x, dim=dims, norm=norm)
    sizes = s or x.shape[-weight.ndim :]
    return (fft.ifftn if x.is_complex() else fft.irfftn)(spectrum[kept] * weight, s=sizes, dim=dims, norm=norm)


CASES += [
    case(padded, T(*x, dtype=kind), T(*w, dtype=C), *more, options=FEW)
    for kind, x, w, more in [
        (torch.float64, (2, 8, 9), (3, 3), ()),
        (torch.float64, (2, 9, 8), (3, 5), ((12, 11), "ortho")),
        (torch.float64, (2, 8, 8), (5, 4), ((4, 5), "forward")),  # the padded block is cropped
        (C, (2, 8, 7), (3, 2), ()),
    ]
]
# On 2x2 ranks a rank has one of the three samples, which cannot be sharded again for the inverse transform.
CASES += [case(padded, T(3, 9), T(4, dtype=C), options=FEW | {"may_gather": True})]
CASES += [
    case(fn, T(2, 8, 8), options=FEW)
    for fn in (
        part_written,
        part_written_after,
        spectrum_written_after,
        same_part_twice,
        overlapping_parts,
        first_column_real,
        step_by_step,
    )
]
CASES += [case(fn, T(2, 8, 8), T(dtype=C), options=FEW) for fn in (scaled_block, hermitian)]
CASES += [case(field_written, T(2, 8, 8, dtype=C), options=FEW)]
CASES += [
    case(one_dim, T(*x, dtype=kind), T(2, dtype=C), dim, *more, options=FEW)
    for kind, x, dim, more in [
        (torch.float64, (3, 9), 1, ()),
        (torch.float64, (9, 3), 0, (12, "ortho")),
        (torch.float64, (2, 8, 3), -2, (5, "forward")),
        (C, (2, 9, 3), 1, (4,)),
    ]
]
CASES += [
    case(
        lambda x, f=fn, n=norm: f(x, norm=n)[..., 1:3],
        T(3, 9, dtype=C),
        options=FEW | {"name": f"{fn.__name__} {norm}"},
    )
    for fn, norm in [(fft.fft, "forward"), (fft.ifft, None), (fft.ifft, "ortho"), (fft.ifft2, "forward")]
]
CASES += [
    case(
        lambda x: fft.fftshift(fft.ifftn(x, dim=(1, 2)))[:, 2:4, :2],
        T(2, 6, 8),
        options=FEW | {"name": "ifftn shifted"},
    ),
    case(
        lambda x: (fft.rfft2(x).new_zeros(2, 8, 5), fft.rfft2(x).new_tensor(1)),
        T(2, 8, 8),
        options=FEW | {"name": "new"},
    ),
]
