"""Shards of a ShardTensor for `torch.distributed.checkpoint`: what each rank writes and reads.

`dcp.save` and `dcp.load` ask a tensor for its chunks by three methods, which DTensor has too. Each rank writes and
reads its own shard; replicas are written once. A checkpoint can be loaded into any other layout, also of a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .errors import ShardingError
from .layout import Layout


def chunks(layout: Layout) -> list[ChunkStorageMetadata]:
    """Return this rank's chunk, or none if it is empty and others are not."""
    if layout.partial or not layout.is_simple:
        raise ShardingError(
            f"torch.distributed.checkpoint: {layout} is a pending sum, or has a dim that merges several sharded ones; "
            "redistribute it to Shard and Replicate first"
        )
    if layout.mesh.get_coordinate() is None or (layout.numel and not layout.local_shape.numel()):
        return []
    return [ChunkStorageMetadata(torch.Size(layout.offsets()), layout.local_shape)]


def write_items(name: str, layout: Layout, local: Tensor) -> list[WriteItem]:
    """Return what this rank writes of the tensor of that name."""
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(local), layout.shape),
        )
        for chunk in chunks(layout)
    ]


def find_shard(layout: Layout, local: Tensor, index: Any) -> Tensor:
    """Return this rank's shard, which `index` names."""
    if index.offset is not None and tuple(index.offset) != tuple(layout.offsets()):
        raise ShardingError(f"torch.distributed.checkpoint: {index} is not this rank's shard of {layout}")
    return local
