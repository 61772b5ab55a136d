"""Two-dimensional FFTs of fields that are sharded over the group named "spatial_parallel".

`DistributedRFFT2` takes a field sharded along `dim[1]` and returns its spectrum sharded along `dim[0]`;
`DistributedIRFFT2` goes the other way, so that one undoes the other. Inputs have any shard sizes, outputs those of
`compute_split_shapes`. Both equal the transform of the global field (`torch.fft.rfft2`, `torch.fft.irfft2`), forward
and backward. One all-to-all forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

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
Size: TypeAlias = "Sequence[int | None] | None"


class DistributedRFFT2:
    """`torch.fft.rfft2` of a real field that is sharded along `dim[1]`; the spectrum is sharded along `dim[0]`."""

    @staticmethod
    def apply(x: Tensor, s: Size, dim: Sequence[int], norm: str | None = "ortho") -> Tensor:
        """Return this rank's rows of the spectrum. The global field is cropped or zero-padded to the size `s`.

        Without `s`, or where it has None, the field keeps its size. `norm` is torch's: "ortho", "backward" or
        "forward".
        """
        args, rows, columns = _validate_args("DistributedRFFT2", x, s, dim, norm, sharded=1)
        height = rows.size or x.shape[rows.dim]
        width = columns.size or sum(args.sizes)
        x = _crop_shard(args, width)
        x = _transform_dim(torch.fft.fft, x, height, rows.dim, norm)
        x = _transpose_shards(x, args, width, rows.dim, height)
        # The data is complex now, so all frequencies are computed, and the half that rfft2 omits is dropped.
        return _transform_dim(torch.fft.fft, x, width, columns.dim, norm).narrow(columns.dim, 0, width // 2 + 1)


class DistributedIRFFT2:
    """`torch.fft.irfft2` of a half spectrum that is sharded along `dim[0]`; the field is sharded along `dim[1]`."""

    @staticmethod
    def apply(x: Tensor, s: Size, dim: Sequence[int], norm: str | None = "ortho") -> Tensor:
        """Return this rank's columns of the field, whose global size is `s`.

        Without `s`, or where it has None, the field has the rows of the spectrum and an even number of columns.
        """
        args, rows, columns = _validate_args("DistributedIRFFT2", x, s, dim, norm, sharded=0)
        height = rows.size or sum(args.sizes)
        width = columns.size or 2 * (x.shape[columns.dim] - 1)
        if width < 1:
            raise ValueError(f"DistributedIRFFT2: a spectrum of one column has no size of its own: pass s, not {s}")
        x = _crop_shard(args, height)
        x = x.narrow(columns.dim, 0, min(width // 2 + 1, x.shape[columns.dim]))
        # irfft2 adds to each column of the half spectrum its mirror image and so doubles it, except for the first
        # column and, for an even width, the last. Real parts commute with the transform along the rows and are taken at
        # the end.
        x = _transform_dim(torch.fft.ifft, x * _mirror_weights(x, columns.dim, width), width, columns.dim, norm)
        x = _transpose_shards(x, args, height, columns.dim, width)
        return _transform_dim(torch.fft.ifft, x, height, rows.dim, norm).real.contiguous()


class _FieldDim(NamedTuple):
    """A transformed dim, and the requested size."""

    dim: int
    size: int | None


def _validate_args(
    what: str, x: Tensor, s: Size, dim: Sequence[int], norm: str | None, sharded: int
) -> tuple[CollectiveArgs, _FieldDim, _FieldDim]:
    """Return the arguments, equal on all ranks: the shards along `dim[sharded]`, and both dims."""
    dims = [d + x.dim() if d < 0 else d for d in dim]
    sizes = [None, None] if s is None else list(s)
    claim = {"s": sizes, "other dim": dims[1 - sharded], "norm": norm}
    args = validate_shards(what, x, None, dims[sharded], DistributedManager().group(GROUP_NAME), claim)
    # From here on every rank has the same arguments, so all ranks raise the same errors.
    if dims[0] == dims[1] or not all(0 <= d < x.dim() for d in dims):
        raise ValueError(f"{what}: dim {tuple(dim)} is not two dims of a tensor of {x.dim()}")
    if len(sizes) != 2 or any(n is not None and n < 1 for n in sizes):
        raise ValueError(f"{what}: s must have two sizes of at least 1 (or None), not {s}")
    if not sum(args.sizes) or not x.shape[dims[1 - sharded]]:
        raise ValueError(f"{what}: an empty field has no transform")
    return args, _FieldDim(dims[0], sizes[0]), _FieldDim(dims[1], sizes[1])


def _mirror_weights(x: Tensor, dim: int, width: int) -> Tensor:
    """Return how often each column of a half spectrum of `width` columns counts in the real field."""
    columns = torch.arange(x.shape[dim], device=x.device)
    once = (columns == 0) | (2 * columns == width)
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    return torch.where(once, 1.0, 2.0).to(x.real.dtype).view(shape)


def _kept_sizes(sizes: Sequence[int], total: int) -> list[int]:
    """Return how many of each rank's indices are among the first `total`."""
    return [max(0, min(n, total - start)) for start, n in zip(starts(sizes), sizes, strict=True)]


def _crop_shard(args: CollectiveArgs, total: int) -> Tensor:
    return args.tensor.narrow(args.dim, 0, _kept_sizes(args.sizes, total)[args.coord])


def _transpose_shards(x: Tensor, args: CollectiveArgs, total: int, target: int, size: int) -> Tensor:
    """Reshard from the sharded dim, cropped to `total`, to dim `target` of `size`: one all-to-all."""
    if args.group is None:
        return x
    lengths = compute_split_shapes(size, len(args.sizes))
    route = swap_route(args.dim, _kept_sizes(args.sizes, total), target, lengths, args.coord)
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
