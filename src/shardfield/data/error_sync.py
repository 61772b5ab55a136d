"""All ranks of a mesh hear of a problem that one of them had, and raise together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..comm import collectives
from ..errors import ShardingError

T = TypeVar("T")


def run_with_error_sync(what: str, mesh: DeviceMesh | None, work: Callable[[], T]) -> T:
    """`work()`, a thing each rank does by itself; where it fails on one, every rank of the mesh raises.

    Costs one exchange of an integer along each mesh axis. The error lists every rank that failed and why.
    """
    failed: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failed = error
    if mesh is None or mesh.size() == 1:
        if failed is not None:
            raise ShardingError(f"{what}: {_error_text(failed)}") from failed
        return value
    _raise_on_all_ranks(what, mesh, failed)
    return value


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, (OSError, ShardingError)) else f"{type(error).__name__}: {error}"


def _raise_on_all_ranks(what: str, mesh: DeviceMesh, failed: Exception | None) -> None:
    """Raise on every rank of the mesh if one of them failed."""
    text = b"" if failed is None else _error_text(failed).encode()
    lengths = all_gather_ints([len(text)], mesh)
    longest = max(n for (n,) in lengths)
    if longest == 0:
        return
    said = all_gather_ints([len(text), *text, *[0] * (longest - len(text))], mesh)
    ranks = mesh.mesh.flatten().tolist()
    lines = {r: bytes(m[1 : 1 + m[0]]).decode() for r, m in zip(ranks, said, strict=True) if m[0]}
    if len(lines) == len(ranks) and len(set(lines.values())) == 1:
        raise ShardingError(f"{what}: {next(iter(lines.values()))}") from failed
    told = [f"{what}: cannot be done", *(f"rank {r}: {line}" for r, line in lines.items())]
    raise ShardingError("\n  ".join(told)) from failed


def check_same_on_all_ranks(what: str, mesh: DeviceMesh, claim: Mapping[str, int]) -> None:
    """Raise on every rank of the mesh, with what each has, unless all have the same."""
    rows = all_gather_ints([int(n) for n in claim.values()], mesh)
    if differ := [key for key, column in zip(claim, zip(*rows, strict=True), strict=True) if len(set(column)) > 1]:
        told = [", ".join(f"{k} {n}" for k, n in zip(claim, row, strict=True) if k in differ) for row in rows]
        ranks = mesh.mesh.flatten().tolist()
        lines = [f"rank {r}: {line}" for r, line in zip(ranks, told, strict=True)]
        raise ShardingError("\n  ".join([f"{what}: the ranks do not agree on {', '.join(differ)}", *lines]))


def all_gather_ints(values: Sequence[int], mesh: DeviceMesh) -> list[list[int]]:
    """Every rank's integers (as many on each), in row-major order of the mesh."""
    table = [list(values)]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        parts = collectives.gather_ints([n for row in table for n in row], group, _exchange_device(group, mesh))
        table = [part[i : i + len(values)] for part in parts for i in range(0, len(part), len(values))]
    return table


def can_exchange_on_host(mesh: DeviceMesh) -> bool:
    """Whether ranks can exchange integers without waiting for what an accelerator still has to do."""
    return all(_exchange_device(mesh.get_group(axis), mesh).type == "cpu" for axis in range(mesh.ndim))


def _exchange_device(group: ProcessGroup, mesh: DeviceMesh) -> torch.device:
    """The CPU where the group has a backend for it, whatever the mesh's tensors are on."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu") if "cpu" in kinds else collectives.device_of(mesh)
