"""Split sizes and tensors into one shard per rank, pad and truncate them. No communication."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat.autocast import concatenate


def compute_split_shapes(size: int, num_chunks: int) -> list[int]:
    """Return the sizes of `num_chunks` shards of `size`.

    All but the last are equal: rounded up if the last one is then not empty, else rounded down.

    >>> compute_split_shapes(10, 4), compute_split_shapes(9, 4), compute_split_shapes(2, 3)
    ([3, 3, 3, 1], [2, 2, 2, 3], [0, 0, 2])
    """
    if size < 0 or num_chunks < 1:
        raise ValueError(f"compute_split_shapes: cannot split {size} into {num_chunks} chunks")
    length = -(-size // num_chunks)
    if size - length * (num_chunks - 1) <= 0:
        length = size // num_chunks
    return [length] * (num_chunks - 1) + [size - length * (num_chunks - 1)]


def split_tensor_along_dim(tensor: Tensor, dim: int, num_chunks: int) -> tuple[Tensor, ...]:
    """Split a tensor into views with the sizes of `compute_split_shapes`; they may be empty.

    >>> [len(part) for part in split_tensor_along_dim(torch.zeros(2), 0, 3)]
    [0, 0, 2]
    """
    return tensor.split(compute_split_shapes(tensor.shape[_normalize_dim(tensor, dim)], num_chunks), dim)


def get_memory_format(tensor: Tensor) -> torch.memory_format:
    """Return channels_last (or its 3-D form) if it describes the memory, even if others do too; else contiguous_format.

    >>> get_memory_format(torch.zeros(2, 1, 4, 4))  # one channel: both describe it
    torch.channels_last
    """
    for ndim, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == ndim and tensor.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


def pad_helper(tensor: Tensor, dim: int, new_size: int, mode: str = "zero") -> Tensor:
    """Pad `dim` to `new_size` at its end, with zeros or, for mode "conj", by Hermitian symmetry. Crop a longer dim.

    With "conj" the dim has the first part of a spectrum of `new_size`, and the rest is its reversed conjugate, which
    `torch.fft.rfft` omits.

    >>> full = torch.fft.fft(torch.tensor([1.0, 2.0, 3.0, 5.0, 8.0]))
    >>> torch.allclose(pad_helper(full[:3], 0, 5, mode="conj"), full)
    True
    """
    if mode not in ("zero", "conj"):
        raise ValueError(f"pad_helper: mode {mode!r} is neither 'zero' nor 'conj'")
    dim = _normalize_dim(tensor, dim)
    size = tensor.shape[dim]
    added = new_size - size
    if new_size < 0:
        raise ValueError(f"pad_helper: a size of {new_size}")
    if added < 0 or mode == "zero":
        return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, added])
    if added > max(0, size - 1):
        raise ValueError(f"pad_helper: {size} frequencies do not determine {new_size} by symmetry")
    return concatenate([tensor, tensor.narrow(dim, 1, added).flip(dim).conj()], dim)


def truncate_helper(tensor: Tensor, dim: int, new_size: int) -> Tensor:
    """Truncate `dim` to `new_size` at its end; a shorter dim keeps its size.

    The result is contiguous in the input's memory format.
    """
    dim = _normalize_dim(tensor, dim)
    if new_size < 0:
        raise ValueError(f"truncate_helper: a size of {new_size}")
    return tensor.narrow(dim, 0, min(new_size, tensor.shape[dim])).contiguous(memory_format=get_memory_format(tensor))


def _normalize_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dim {dim}")
    return dim % tensor.dim()
