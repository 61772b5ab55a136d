"""The disk format of checkpoints, for torch.distributed.checkpoint: raw arrays and one JSON index, no pickles.

    step-000120/
        rank-0.bin, rank-1.bin, ...   the bytes of each rank's chunks, concatenated
        index.json                    dtype, shape, chunks and checksums of each tensor, and the scalars

A folder is written under a temporary name and renamed when every rank is done, so a folder with its final name is
complete.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import ShardfieldError

FORMAT = "shardfield checkpoint 1"
INDEX = "index.json"


class CheckpointError(ShardfieldError):
    """A checkpoint cannot be read or written; the message has its path and the reason."""


class CheckpointWriter(StorageWriter):
    """Writes to `<folder>.part` and renames it to `folder` at the end."""

    def __init__(self, folder: Path, scalars: dict[str, Any]):
        super().__init__()
        self.folder, self.scalars = folder, scalars
        self.temp_folder = folder.with_name(folder.name + ".part")
        self.file = ""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:  # the other ranks write after a collective with this rank
            shutil.rmtree(self.temp_folder, ignore_errors=True)
            self.temp_folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        # The file of a rank is named by the index of its plan.
        for rank, plan in enumerate(plans):
            plans[rank] = type(plan)(**{**vars(plan), "storage_data": f"rank-{rank}.bin"})
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results, at = [], 0
        path = self.temp_folder / plan.storage_data
        with open(path, "wb") as file:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    raise TypeError(f"{item.index.fqn}: only tensors are stored here, other values are scalars")
                raw = tensor_bytes(planner.resolve_data(item).detach().cpu())
                file.write(raw)
                info = {"file": path.name, "at": at, "bytes": len(raw), "crc32": zlib.crc32(raw)}
                results.append(WriteResult(index=item.index, size_in_bytes=len(raw), storage_data=info))
                at += len(raw)
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for each in results for r in each}
        tensors = {}
        for name, held in metadata.state_dict_metadata.items():
            assert isinstance(held, TensorStorageMetadata), name
            chunks = [
                {"offsets": list(c.offsets), "sizes": list(c.sizes), **where[name, tuple(c.offsets)]}
                for c in held.chunks
                if (name, tuple(c.offsets)) in where
            ]
            dtype = str(held.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(held.size), "chunks": chunks}
        index = {"format": FORMAT, "scalars": self.scalars, "tensors": tensors}
        with open(self.temp_folder / INDEX, "w") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self.folder, ignore_errors=True)
        self.temp_folder.rename(self.folder)
        fsync_folder(self.folder.parent)


class CheckpointReader(StorageReader):
    """Reads only the chunks, and the parts of chunks, that a rank needs."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.index = folder, read_index(folder)
        self.chunks = {
            (name, tuple(c["offsets"])): c for name, held in self.index["tensors"].items() for c in held["chunks"]
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
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
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
        chunk = self.chunks[index.fqn, tuple(index.offset or ())]
        dtype = getattr(torch, self.index["tensors"][index.fqn]["dtype"])
        with open(self.folder / chunk["file"], "rb") as file:
            file.seek(chunk["at"])
            raw = bytearray(file.read(chunk["bytes"]))
        if len(raw) != chunk["bytes"] or zlib.crc32(raw) != chunk["crc32"]:
            raise CheckpointError(f"{self.folder / chunk['file']}: {index.fqn} is not as it was saved")
        if not raw:
            return torch.empty(chunk["sizes"], dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).view(chunk["sizes"])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in order."""
    flat = tensor.contiguous().reshape(-1)
    array: np.ndarray = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return memoryview(array)  # type: ignore[arg-type]


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a checkpoint, and raise if a file is missing or truncated."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a shardfield checkpoint: it has no {INDEX}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not in the format {FORMAT!r}")
    ends: dict[str, int] = {}
    try:
        for held in index["tensors"].values():
            for chunk in held["chunks"]:
                ends[chunk["file"]] = max(ends.get(chunk["file"], 0), chunk["at"] + chunk["bytes"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: incomplete: {error!r}") from None
    for name, end in ends.items():
        if Path(name).name != name:
            raise CheckpointError(f"{path}: names a file outside the checkpoint: {name!r}")
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size < end:
            state = "is missing" if size < 0 else f"has {size} of {end} bytes"
            raise CheckpointError(f"{folder / name}: {state}; the checkpoint is truncated")
    return index


def fsync_folder(folder: Path) -> None:
    """Make a rename durable if the machine crashes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
