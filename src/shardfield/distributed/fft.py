"""Two-dimensional FFTs of fields that are cut over the ranks of the group named "spatial_parallel".

The input is cut along `dim[1]`, in any way; the output is cut along `dim[0]`, as `compute_split_shapes` cuts it. Both
equal the transform of the whole field (`torch.fft.rfft2`, `torch.fft.irfft2`), forward and backward; one all-to-all
each way, of the columns that the result depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import autograd_collectives
from ..comm.route import swap_route
from ..layout import starts
from .manager import DistributedManager
from .splits import compute_split_shapes
from .vcollective_args import CollectiveArgs, validate_shards

GROUP_NAME = "spatial_parallel"


class DistributedRFFT2:
    """`torch.fft.rfft2` of a real field that is cut along `dim[1]`; the spectrum is cut along `dim[0]`."""

    @staticmethod
    def apply(x: Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str | None = "ortho") -> Tensor:
        """This rank's rows of the spectrum. `s` is the size of the whole field, which is cropped or zero-padded to it.

        `norm` is torch's: "ortho", "backward" or "forward".
        """
        given, first, height, width = _validate_args("DistributedRFFT2", x, s, dim, norm, width_of=lambda n: n)
        x = _crop_columns(given, width)
        x = _transform_dim(torch.fft.fft, x, height, first, norm)
        x = _transpose_shards(x, given, first, height, width)
        # Complex by now, so all of its frequencies are computed and the half that rfft2 leaves out is dropped.
        return _transform_dim(torch.fft.fft, x, width, given.dim, norm).narrow(given.dim, 0, width // 2 + 1)


class DistributedIRFFT2:
    """`torch.fft.irfft2` of a half spectrum that is cut along `dim[1]`; the field is cut along `dim[0]`."""

    @staticmethod
    def apply(x: Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str | None = "ortho") -> Tensor:
        """This rank's rows of the field. `s` is the size of the whole field; without it, `dim[1]` is taken as even."""
        given, first, height, width = _validate_args(
            "DistributedIRFFT2", x, s, dim, norm, width_of=lambda n: 2 * (n - 1)
        )
        read = width // 2 + 1
        x = _crop_columns(given, read)
        x = _transform_dim(torch.fft.ifft, x, height, first, norm)
        x = _transpose_shards(x, given, first, height, read)
        return _transform_dim(torch.fft.irfft, x, width, given.dim, norm)


def _validate_args(
    what: str,
    x: Tensor,
    s: Sequence[int] | None,
    dim: Sequence[int],
    norm: str | None,
    width_of: Callable[[int], int],
) -> tuple[CollectiveArgs, int, int, int]:
    """What all ranks agree on: the pieces along dim[1], dim[0], and the size of the field."""
    first, second = (d + x.dim() if d < 0 else d for d in dim)
    claim = {"s": None if s is None else list(s), "dim[0]": first, "norm": norm}
    given = validate_shards(what, x, None, second, DistributedManager().group(GROUP_NAME), claim)
    # From here on every rank has the same arguments, so what is refused is refused by all.
    if first == second or not 0 <= first < x.dim():
        raise ValueError(f"{what}: dim {tuple(dim)} is not two dims of a tensor of {x.dim()}")
    height, width = s if s is not None else (x.shape[first], width_of(sum(given.sizes)))
    if height < 1 or width < 1:
        raise ValueError(f"{what}: a field of {height} x {width} has no transform")
    return given, first, int(height), int(width)


def _kept_sizes(sizes: Sequence[int], columns: int) -> list[int]:
    """How many of each rank's columns are among the first `columns`."""
    return [max(0, min(n, columns - start)) for start, n in zip(starts(sizes), sizes, strict=True)]


def _crop_columns(given: CollectiveArgs, columns: int) -> Tensor:
    return given.tensor.narrow(given.dim, 0, _kept_sizes(given.sizes, columns)[given.coord])


def _transpose_shards(x: Tensor, given: CollectiveArgs, first: int, height: int, columns: int) -> Tensor:
    """Cut along dim[1] -> cut along dim[0]."""
    if given.group is None:
        return x
    lengths = compute_split_shapes(height, len(given.sizes))
    route = swap_route(given.dim, _kept_sizes(given.sizes, columns), first, lengths, given.coord)
    return autograd_collectives.exchange(x, route, given.group)


def _transform_dim(transform: Callable[..., Tensor], x: Tensor, size: int, dim: int, norm: str | None) -> Tensor:
    """A transform along one dim. MKL refuses a tensor without elements, so it is lent some."""
    empty = [d for d, n in enumerate(x.shape) if n == 0 and d != dim]
    if empty:
        x = F.pad(x, [p for d in reversed(range(x.dim())) for p in (0, int(d in empty))])
    out = transform(x, size, dim, norm)
    for d in empty:
        out = out.narrow(d, 0, 0)
    return out
