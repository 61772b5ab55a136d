"""ShardTensors in torch.distributed.checkpoint (DCP): the position of this rank's shard in the global tensor.

DCP asks a tensor for the chunks that a rank writes and reads, by three methods (`__create_write_items__`,
`__create_chunk_list__`, `__get_tensor_shard__`), which DTensor has too. It moves chunks between any two layouts. An
empty shard has no chunk. A dim that merges several sharded ones has one chunk for each contiguous range.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .errors import ShardfieldError, ShardingError
from .layout import DimSharding, Layout

Range = tuple[int, int, int]  # first global index, number of indices, first local index


def local_ranges(factors: tuple[DimSharding, ...], layout: Layout) -> list[Range]:
    """Return the contiguous ranges of a dim that this rank has.

    A rank with both indices of a factor of size 2 and indices 2 to 4 of one of size 6 has 2 to 4 and 8 to 10 of the
    merged dim of 12.
    """
    ranges: list[Range] = [(0, 1, 0)]
    for f in factors:
        at = layout.index(f.axes)
        start, size = (sum(f.shard_sizes[:at]), f.shard_sizes[at]) if f.axes else (0, f.size)
        if size == f.size:
            ranges = [(g * f.size, n * f.size, i * f.size) for g, n, i in ranges]
        else:
            ranges = [((g + j) * f.size + start, size, (i + j) * size) for g, n, i in ranges for j in range(n)]
    return [r for r in ranges if r[1]]


def local_chunks(layout: Layout) -> list[tuple[torch.Size, torch.Size, tuple[slice, ...]]]:
    """Return offset, size and local slices of each block of the global tensor that this rank has."""
    if layout.partial:
        raise ShardfieldError(  # no ValueError: torch would replace its text by another
            f"torch.distributed.checkpoint: {layout} is a pending sum; redistribute() it to Shard or Replicate first"
        )
    if layout.mesh.get_coordinate() is None:  # this rank is not on the mesh
        return []
    if not layout.numel:  # no rank has an element, and the tensor has to be in the checkpoint
        return [(torch.Size([0] * layout.ndim), layout.shape, ())]
    blocks = product(*(local_ranges(dim, layout) for dim in layout.dims))
    return [
        (
            torch.Size(g for g, _, _ in block),
            torch.Size(n for _, n, _ in block),
            tuple(slice(i, i + n) for _, n, i in block),
        )
        for block in blocks
    ]


def write_items(name: str, local: Tensor, layout: Layout) -> list[WriteItem]:
    """Return what this rank writes, as DCP's items. Ranks with equal chunks all name them; DCP takes one."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, offset),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(offset, size), properties, layout.shape),
        )
        for offset, size, _ in local_chunks(layout)
    ]


def chunk_list(layout: Layout) -> list[ChunkStorageMetadata]:
    """Return the chunks that this rank has, as DCP describes them."""
    return [ChunkStorageMetadata(offset, size) for offset, size, _ in local_chunks(layout)]


def chunk_at(offset: torch.Size, local: Tensor, layout: Layout) -> Tensor:
    """Return the part of the local tensor that is the chunk at `offset`, as a view."""
    for found, size, place in local_chunks(layout):
        if found == offset:
            return local[place] if layout.numel else local.new_empty(size)
    raise ShardingError(f"no chunk of {layout} on this rank begins at {tuple(offset)}")
