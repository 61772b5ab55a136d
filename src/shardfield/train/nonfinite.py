"""Report NaN or inf in a loss: find the first rank that has one, and save its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.consensus import gather_ints
from ..errors import ShardfieldError
from ..tensor import ShardTensor


class NonFinite(ShardfieldError):
    """A loss or gradient is not finite; the message has the step, the rank and the folder of the saved state."""


def save_report(folder: Path, mesh: DeviceMesh, step: int, what: str, batch: Any, output: Any) -> NonFinite:
    """Save the local tensors of batch and output, and find the first rank with a value that is not finite."""
    tensors = {**dict(_local_tensors("batch", batch)), **dict(_local_tensors("output", output))}
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    arrays: dict[str, Any] = {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"shards-rank-{dist.get_rank()}.npz", **arrays)
    names = list(tensors)
    found = gather_ints([names.index(bad[0]) if bad else -1], mesh)
    first = next((i for i, (name,) in enumerate(found) if name >= 0), None)
    if first is None:
        where = "the batch and the output are finite on all ranks"
    else:
        rank = mesh.mesh.flatten()[first].item()
        where = f"first seen on rank {rank}, in its shard of {names[found[first][0]]!r}"
    return NonFinite(f"step {step}: {what}; {where}. The state before the step and the shards are in {folder}")


def _local_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the local floating-point tensors of a batch with their names."""
    if isinstance(value, Tensor):
        local = value._local_tensor if isinstance(value, ShardTensor) else value
        if local.is_floating_point():
            yield name, local.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _local_tensors(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _local_tensors(f"{name}.{i}", item)
