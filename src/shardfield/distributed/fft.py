"""Two-dimensional FFTs of fields that are sharded over the group named "spatial_parallel".

The input is sharded along `dim[1]`, with any sizes; the output is sharded along `dim[0]`, with the sizes of
`compute_split_shapes`. Both equal the transform of the global field (`torch.fft.rfft2`, `torch.fft.irfft2`), forward
and backward. One all-to-all forward and one backward, of the columns that the result depends on.
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
    """`torch.fft.rfft2` of a real field that is sharded along `dim[1]`; the spectrum is sharded along `dim[0]`."""

    @staticmethod
    def apply(x: Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str | None = "ortho") -> Tensor:
        """Return this rank's rows of the spectrum. The global field is cropped or zero-padded to the size `s`.

        `norm` is torch's: "ortho", "backward" or "forward".
        """
        args, first, height, width = _validate_args("DistributedRFFT2", x, s, dim, norm, width_of=lambda n: n)
        x = _crop_columns(args, width)
        x = _transform_dim(torch.fft.fft, x, height, first, norm)
        x = _transpose_shards(x, args, first, height, width)
        # The data is complex now, so all frequencies are computed, and the half that rfft2 omits is dropped.
        return _transform_dim(torch.fft.fft, x, width, args.dim, norm).narrow(args.dim, 0, width // 2 + 1)


class DistributedIRFFT2:
    """`torch.fft.irfft2` of a half spectrum that is sharded along `dim[1]`; the field is sharded along `dim[0]`."""

    @staticmethod
    def apply(x: Tensor, s: Sequence[int] | None, dim: Sequence[int], norm: str | None = "ortho") -> Tensor:
        """Return this rank's rows of the field. `s` is its global size; without it, that of `dim[1]` is even."""
        args, first, height, width = _validate_args(
            "DistributedIRFFT2", x, s, dim, norm, width_of=lambda n: 2 * (n - 1)
        )
        read = width // 2 + 1
        x = _crop_columns(args, read)
        x = _transform_dim(torch.fft.ifft, x, height, first, norm)
        x = _transpose_shards(x, args, first, height, read)
        return _transform_dim(torch.fft.irfft, x, width, args.dim, norm)


def _validate_args(
    what: str,
    x: Tensor,
    s: Sequence[int] | None,
    dim: Sequence[int],
    norm: str | None,
    width_of: Callable[[int], int],
) -> tuple[CollectiveArgs, int, int, int]:
    """Return the arguments, equal on all ranks: the shards along dim[1], dim[0], and the size of the field."""
    first, second = (d + x.dim() if d < 0 else d for d in dim)
    claim = {"s": None if s is None else list(s), "dim[0]": first, "norm": norm}
    args = validate_shards(what, x, None, second, DistributedManager().group(GROUP_NAME), claim)
    # From here on every rank has the same arguments, so all ranks raise the same errors.
    if first == second or not 0 <= first < x.dim():
        raise ValueError(f"{what}: dim {tuple(dim)} is not two dims of a tensor of {x.dim()}")
    height, width = s if s is not None else (x.shape[first], width_of(sum(args.sizes)))
    if height < 1 or width < 1:
        raise ValueError(f"{what}: a field of {height} x {width} has no transform")
    return args, first, int(height), int(width)


def _kept_sizes(sizes: Sequence[int], columns: int) -> list[int]:
    """Return how many of each rank's columns are among the first `columns`."""
    return [max(0, min(n, columns - start)) for start, n in zip(starts(sizes), sizes, strict=True)]


def _crop_columns(args: CollectiveArgs, columns: int) -> Tensor:
    return args.tensor.narrow(args.dim, 0, _kept_sizes(args.sizes, columns)[args.coord])


def _transpose_shards(x: Tensor, args: CollectiveArgs, first: int, height: int, columns: int) -> Tensor:
    """Reshard from dim[1] to dim[0]: one all-to-all."""
    if args.group is None:
        return x
    lengths = compute_split_shapes(height, len(args.sizes))
    route = swap_route(args.dim, _kept_sizes(args.sizes, columns), first, lengths, args.coord)
    return autograd_collectives.exchange(x, route, args.group)


def _transform_dim(transform: Callable[..., Tensor], x: Tensor, size: int, dim: int, norm: str | None) -> Tensor:
    """Transform along one dim. MKL refuses empty tensors, so they are padded by one element."""
    empty = [d for d, n in enumerate(x.shape) if n == 0 and d != dim]
    if empty:
        x = F.pad(x, [p for d in reversed(range(x.dim())) for p in (0, int(d in empty))])
    out = transform(x, size, dim, norm)
    for d in empty:
        out = out.narrow(d, 0, 0)
    return out
