"""The storage of checkpoints, for torch.distributed.checkpoint: raw arrays and one JSON index, no pickles.

    step-000120/
        rank-0.bin, rank-1.bin, ...   the bytes of each rank's chunks, concatenated
        index.json                    dtype, shape, chunks and checksums of each tensor, and the scalars

A folder is written under a temporary name of its own, and renamed when every rank is done. A folder is removed under a
temporary name too. So a folder with its final name is complete.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, StorageReader, StorageWriter, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from .. import dcp
from ..tensor import ShardTensor
from .checkpoint_index import CheckpointError, chunk_checksum, dtype_of, read_index, run_of, write_index


class CheckpointWriter(StorageWriter):
    """Writes to a temporary folder next to `folder`, and renames it to `folder` at the end."""

    def __init__(self, folder: Path, run_id: str, scalars: dict[str, Any]):
        super().__init__()
        self.folder, self.run_id, self.scalars = folder, run_id, scalars
        # The name is the coordinator's: a rank that survived a killed run must not write into this run's files.
        self.temp_folder = temporary_name(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:  # the other ranks write after a collective with this rank
            self.temp_folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        # The file of a rank is named by the index of its plan.
        names = [f"{self.temp_folder.name}/rank-{rank}.bin" for rank in range(len(plans))]
        return [type(p)(**{**vars(p), "storage_data": name}) for p, name in zip(plans, names, strict=True)]

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results, at = [], 0
        path = self.folder.parent / plan.storage_data
        with open(path, "wb") as file:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    raise TypeError(f"{item.index.fqn}: only tensors are stored here, other values are scalars")
                raw = tensor_bytes(planner.resolve_data(item).detach().cpu())
                held, chunk = item.tensor_data, item.tensor_data.chunk
                info: dict[str, Any] = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                info |= {"file": path.name, "at": at, "bytes": len(raw)}
                info["crc32"] = chunk_checksum(item.index.fqn, _describe(held.properties, held.size), info, raw)
                file.write(raw)
                results.append(WriteResult(index=item.index, size_in_bytes=len(raw), storage_data=info))
                at += len(raw)
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Any]] = {}
        for result in (r for each in results for r in each):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {}
        for name, held in metadata.state_dict_metadata.items():
            assert isinstance(held, TensorStorageMetadata), name
            tensors[name] = _describe(held.properties, held.size) | {"chunks": chunks.get(name, [])}
        write_index(self.temp_folder, self.run_id, self.scalars, tensors)
        fsync_folder(self.temp_folder)
        if self.folder.exists():
            if run_of(self.folder) != self.run_id:
                raise CheckpointError(f"{self.folder}: is a checkpoint of another run")
            remove_checkpoint(self.folder)
        self.temp_folder.rename(self.folder)
        fsync_folder(self.folder.parent)


def _describe(properties: TensorProperties, shape: torch.Size) -> dict[str, Any]:
    return {"dtype": str(properties.dtype).removeprefix("torch."), "shape": list(shape)}


class Snapshot:
    """A copy of what this rank holds of a tensor, and its place in the global tensor, for torch.distributed.checkpoint.

    torch's own staging copies DTensors by a deep copy, which blocks training several times as long.
    """

    def __init__(self, tensor: Tensor):
        """Copy the local tensor of a DTensor, a ShardTensor or a plain tensor to the host."""
        local = tensor.to_local() if isinstance(tensor, (DTensor, ShardTensor)) else tensor
        self.source = tensor  # for its shape and layout; its data may change
        self.held = local.detach().to("cpu", copy=True)

    def place(self) -> Any:
        """Return what the write items depend on, apart from the name."""
        source, dtype = self.source, self.held.dtype
        if isinstance(source, ShardTensor):
            return dtype, source._layout
        return (dtype, source.shape, *((source.device_mesh, source.placements) if isinstance(source, DTensor) else ()))

    def write_items(self, name: str) -> list[WriteItem]:
        """Return what this rank writes."""
        source = self.source
        if isinstance(source, DTensor) and source.device_mesh.get_coordinate() is None:
            return []
        if isinstance(source, (DTensor, ShardTensor)):
            return source.__create_write_items__(name, source)
        chunk = ChunkStorageMetadata(torch.Size([0] * source.ndim), source.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.held), source.shape)
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)]

    def chunk(self, index: MetadataIndex) -> Tensor:
        """Return the chunk that begins at `index.offset`."""
        if isinstance(self.source, ShardTensor):
            assert index.offset is not None
            return dcp.chunk_at(index.offset, self.held, self.source._layout)
        return self.held


@torch.no_grad()
def take_snapshots(tensors: Mapping[str, Tensor]) -> dict[str, Snapshot]:
    """Return a snapshot of each tensor."""
    return {name: Snapshot(tensor) for name, tensor in tensors.items()}


WriteItems = dict[str, tuple[Any, list[WriteItem]]]  # by name: the place that they are of, and the items


class SnapshotPlanner(DefaultSavePlanner):
    """Plans what each rank writes of its snapshots, with the write items of the last save where nothing has moved.

    torch's planner examines every tensor anew, and `dcp.save` logs two messages for each entry of a state dict: half of
    the time of the writing thread, which it takes from training.
    """

    def __init__(self, snapshots: dict[str, Snapshot], known: WriteItems):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.snapshots, self.known = snapshots, known

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, snapshot in self.snapshots.items():
            place = snapshot.place()
            if name not in self.known or self.known[name][0] != place:
                self.known[name] = place, snapshot.write_items(name)
            items += self.known[name][1]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.snapshots[index.fqn].chunk(index)


def save_snapshots(
    snapshots: dict[str, Snapshot],
    writer: CheckpointWriter,
    group: ProcessGroup | None = None,
    known: WriteItems | None = None,
) -> None:
    """Write snapshots; without a group, those of this process alone. `known`: the write items of earlier saves."""
    planner = SnapshotPlanner(snapshots, {} if known is None else known)
    save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


class CheckpointReader(StorageReader):
    """Reads only the chunks that a rank needs, with the `index` of a checkpoint as `read_index` returns it."""

    def __init__(self, folder: Path, index: dict[str, Any]):
        super().__init__()
        self.folder, self.index = folder, index
        # An empty chunk may begin where another one does.
        self.chunks = {
            (name, tuple(c["offsets"])): c
            for name, held in self.index["tensors"].items()
            for c in sorted(held["chunks"], key=lambda c: c["bytes"])
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        held: dict[str, Any] = {}
        for name, tensor in self.index["tensors"].items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in tensor["chunks"]]
            properties = TensorProperties(dtype=dtype_of(tensor["dtype"]))
            held[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return Metadata(state_dict_metadata=held)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR
            chunk = self.read_chunk(item.storage_index)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_chunk(self, index: MetadataIndex) -> Tensor:
        """Read a chunk of the tensor `index.fqn`, and raise if its bytes are not as they were saved."""
        tensor, chunk = self.index["tensors"][index.fqn], self.chunks[index.fqn, tuple(index.offset or ())]
        with open(self.folder / chunk["file"], "rb") as file:
            file.seek(chunk["at"])
            raw = bytearray(file.read(chunk["bytes"]))
        crc = chunk_checksum(index.fqn, tensor, chunk, raw, self.index["signed"])
        if len(raw) != chunk["bytes"] or crc != chunk["crc32"]:
            raise CheckpointError(f"{self.folder / chunk['file']}: {index.fqn} is not as it was saved")
        dtype = dtype_of(tensor["dtype"])
        if not raw:
            return torch.empty(chunk["sizes"], dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(chunk["sizes"])


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint in one process: its scalars, and its tensors in full."""
    index = read_index(folder)
    reader, tensors = CheckpointReader(folder, index), {}
    for name, held in index["tensors"].items():
        tensors[name] = torch.empty(held["shape"], dtype=dtype_of(held["dtype"]))
        for chunk in held["chunks"]:
            place = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            tensors[name][place] = reader.read_chunk(MetadataIndex(name, torch.Size(chunk["offsets"])))
    return index["scalars"], tensors


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in order."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    array: np.ndarray = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return memoryview(array)  # type: ignore[arg-type]


def temporary_name(folder: Path) -> Path:
    """Return a name next to `folder` that no other process uses; what is left under it may be removed."""
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; if killed meanwhile, what is left of it has a temporary name."""
    gone = temporary_name(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make a rename durable if the machine crashes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
