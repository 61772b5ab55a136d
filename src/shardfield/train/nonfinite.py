"""NaN or inf in a loss: which rank saw it first, and what is kept to look at it."""

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
    """A loss or gradient that is not finite: at which step, on which rank, and where the state was saved."""


def save_report(folder: Path, mesh: DeviceMesh, step: int, what: str, batch: Any, output: Any) -> NonFinite:
    """Save this rank's pieces of the batch and the output, and find the first rank that holds something not finite."""
    pieces = {**dict(_local_tensors("batch", batch)), **dict(_local_tensors("output", output))}
    bad = [name for name, piece in pieces.items() if not torch.isfinite(piece).all()]
    arrays: dict[str, Any] = {name: piece.float().cpu().numpy() for name, piece in pieces.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"pieces-rank-{dist.get_rank()}.npz", **arrays)
    names = list(pieces)
    found = gather_ints([names.index(bad[0]) if bad else -1], mesh)
    first = next((i for i, (name,) in enumerate(found) if name >= 0), None)
    if first is None:
        where = "all ranks' pieces of the batch and of the output are finite"
    else:
        rank = mesh.mesh.flatten()[first].item()
        where = f"first seen on rank {rank}, in its piece of {names[found[first][0]]!r}"
    return NonFinite(f"step {step}: {what}; {where}. The state before the step and the pieces are in {folder}")


def _local_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in a batch, this rank's parts of them, by name."""
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
