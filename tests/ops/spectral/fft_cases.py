"""Fourier transforms with any dims sharded."""

import torch

from shardfield import ShardTensor
from tests.harness import T, case, raises

fft = torch.fft
C = torch.complex128
FEW = {"layouts": 5}

CASES = [
    case(fn, T(4, 5, 6, dtype=kind), *more, options=FEW)
    for fn, kind in [
        (fft.fft, C),
        (fft.fft, torch.float64),
        (fft.ifft, C),
        (fft.rfft, torch.float64),
        (fft.irfft, C),
        (fft.hfft, C),
        (fft.ihfft, torch.float64),
    ]
    for more in [(), (7, 0, "ortho"), (3, 1, "forward")]
]
CASES += [
    case(fn, T(4, 5, 6, dtype=kind), **more, options=FEW)
    for fn, kind in [
        (fft.fftn, C),
        (fft.ifftn, C),
        (fft.rfftn, torch.float64),
        (fft.irfftn, C),
        (fft.hfftn, C),
        (fft.ihfftn, torch.float64),
    ]
    for more in [{}, {"dim": (0, 1), "norm": "ortho"}, {"s": (4, 7), "dim": (2, 0), "norm": "forward"}, {"s": (3, 8)}]
]
CASES += [case(getattr(fft, n), T(4, 5, 6, dtype=C), options=FEW) for n in ("fft2", "ifft2", "irfft2", "hfft2")]
CASES += [case(getattr(fft, n), T(4, 5, 6), options=FEW) for n in ("rfft2", "ihfft2")]
CASES += [
    case(
        lambda x: fft.irfft2(fft.rfft2(x, norm="ortho") * 2, s=(5, 7), norm="ortho"),
        T(3, 5, 7),
        options={"name": "round trip"},
    ),
    # one sharded dim: there is no other dim to reshard to once the full spectrum is needed
    case(lambda x: fft.fft(x) + 0, T(8, dtype=C), options=FEW | {"may_gather": True, "name": "fft of one dim"}),
    case(lambda x: fft.fft(x)[2:4], T(8, dtype=C), options=FEW | {"name": "some of one dim"}),
    case(fft.fft, T(4, 5), 0, options=FEW | raises(RuntimeError, "Invalid number of data points")),
    case(
        fft.fftn,
        T(4, 5),
        dim=(0, 0),
        options=FEW | {"may_gather": True} | raises(RuntimeError, "FFT dims must be unique"),
    ),
    case(fft.fftshift, T(4, 5), options=FEW),
    case(fft.ifftshift, T(4, 5), dim=1, options=FEW),
]


def pairs(x):
    """Return the parts of the numbers of a spectrum that one device has as a conjugate, and no rank with a shard."""
    spectrum = fft.ihfft(x, dim=0)
    is_sharded = isinstance(spectrum, ShardTensor) and spectrum.device_mesh.size() > 1
    return torch.view_as_real(spectrum if is_sharded else spectrum.resolve_conj())


CASES.append(case(pairs, T(4, 5, 6), options=FEW))
