"""Turn an error of one rank into an error of all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ..comm import consensus
from ..errors import ShardingError

T = TypeVar("T")


def run_with_error_sync(what: str, mesh: DeviceMesh | None, work: Callable[[], T]) -> T:
    """Run `work()`, which sends no messages; if it fails on one rank, raise on every rank of the mesh.

    Costs one gather of one integer along each mesh axis. The error lists every rank that failed and its reason.
    """
    failed: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failed = error
    problem = None if failed is None else _error_text(failed)
    if mesh is not None and mesh.size() > 1:
        consensus.raise_together(what, mesh, problem, failed)
    elif failed is not None:
        raise ShardingError(f"{what}: {problem}") from failed
    return value


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    plain = isinstance(error, (OSError, ShardingError)) and str(error)
    return plain or f"{type(error).__name__}: {error}"


def can_exchange_on_host(mesh: DeviceMesh) -> bool:
    """Return whether ranks can exchange integers without a wait for the accelerator's queue."""
    return all(consensus.group_device(mesh.get_group(axis)).type == "cpu" for axis in range(mesh.ndim))
