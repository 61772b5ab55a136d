"""Validate the arguments of a collective over uneven shards: equal on all ranks, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.consensus import check_arguments, checks_enabled
from ..errors import ShardingError
from .splits import compute_split_shapes

Sizes = Sequence[int]


class CollectiveArgs(NamedTuple):
    """The validated arguments, equal on all ranks. `group` is None for a single rank, which needs no message."""

    tensor: Tensor
    dim: int
    sizes: tuple[int, ...]
    coord: int
    group: ProcessGroup | None


def resolve_group(group: ProcessGroup | None) -> tuple[ProcessGroup | None, int, int]:
    """Return the group (None for a single process), its number of ranks, and this rank's position in it."""
    if group is None:
        if not dist.is_initialized():
            return None, 1, 0
        group = dist.group.WORLD
    coord = dist.get_rank(group)
    if coord < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group it passed")
    return group, dist.get_world_size(group), coord


def validate_shards(
    op_name: str,
    tensor: Tensor,
    sizes: Any,
    dim: int,
    group: ProcessGroup | None,
    extra: Mapping[str, Any] | None = None,
    root: int = 0,
    input_kind: Literal["shard", "at root", "full"] = "shard",
) -> CollectiveArgs:
    """Check the arguments of a collective over shards.

    `input_kind` is the tensor that a rank passes: its shard, the full tensor, or the full tensor on `root` alone.
    """
    group, count, coord = resolve_group(group)
    at = dim + tensor.dim() if dim < 0 else dim
    lengths, problem = _shard_sizes(tensor, sizes, at)
    if not 0 <= at < tensor.dim():
        problem = f"a tensor of {tensor.dim()} dims has no dim {dim}"
    elif not 0 <= root < count:
        problem = f"the group has {count} ranks and none at position {root}"
    elif lengths is not None and not problem:
        here = tensor.shape[at]
        if len(lengths) != count:
            problem = f"{len(lengths)} sizes for {count} ranks"
        elif (input_kind == "full" or input_kind == "at root" and coord == root) and here != sum(lengths):
            problem = f"its tensor has {here} along dim {at}, sizes add up to {sum(lengths)}"
        elif input_kind == "shard" and here != lengths[coord]:
            problem = f"its tensor has {here} along dim {at}, sizes says {lengths[coord]}"
    length = tensor.shape[at] if 0 <= at < tensor.dim() else 0
    claim = {"sizes": sizes if lengths is None else list(lengths), "dim": at, **(extra or {})} | _tensor_claim(
        tensor, at
    )
    flags = [int(_needs_grad(tensor)), int(torch.is_grad_enabled()), length]
    facts = {"shape": tuple(tensor.shape)}
    replies = check_arguments(op_name, group, claim, facts, problem, flags, always=sizes is None)
    tensor = _require_grad_on_all(op_name, tensor, replies)
    if lengths is None:
        assert replies is not None
        lengths = (
            tuple(compute_split_shapes(replies[root][2], count))
            if input_kind == "at root"
            else tuple(h[2] for h in replies)
        )
    return CollectiveArgs(tensor, at, lengths, coord, group if count > 1 else None)


def validate_indices(
    tensor: Tensor, indices: Sequence[Tensor], sizes: Sequence[Sizes], dim: int, group: ProcessGroup | None
) -> CollectiveArgs:
    """Check the arguments of `indexed_all_to_all_v`."""
    group, count, coord = resolve_group(group)
    at = dim + tensor.dim() if dim < 0 else dim
    table, problem = None, None
    try:
        table = [[int(n) for n in row] for row in sizes]
    except (TypeError, ValueError):
        problem = "sizes is not a list of integers for each rank"
    if not 0 <= at < tensor.dim():
        problem = f"a tensor of {tensor.dim()} dims has no dim {dim}"
    elif table is not None:
        if len(table) != count or any(len(row) != count or min(row) < 0 for row in table):
            problem = f"sizes is not {count} x {count} for {count} ranks"
        elif len(indices) != count:
            problem = f"{len(indices)} lists of indices for {count} ranks"
        elif [i.numel() for i in indices] != table[coord]:
            problem = f"it sends {[i.numel() for i in indices]} slices to the ranks, sizes says {table[coord]}"
        elif checks_enabled():  # synchronizes with the device
            problem = _check_indices(indices, tensor.shape[at])
    claim = {"sizes": table or sizes, "dim": at} | _tensor_claim(tensor, at)
    flags = [int(_needs_grad(tensor)), int(torch.is_grad_enabled())]
    replies = check_arguments("indexed_all_to_all_v", group, claim, {"shape": tuple(tensor.shape)}, problem, flags)
    tensor = _require_grad_on_all("indexed_all_to_all_v", tensor, replies)
    return CollectiveArgs(tensor, at, (), coord, group if count > 1 else None)


def _shard_sizes(tensor: Tensor, sizes: Any, dim: int) -> tuple[tuple[int, ...] | None, str | None]:
    """Return `sizes` as shard sizes along `dim` and an error, if any; `sizes` may also be the shapes of all shards."""
    if sizes is None:
        return None, None
    try:
        lengths = tuple(int(n[dim]) if isinstance(n, Sequence) else int(n) for n in sizes)
    except (TypeError, ValueError, IndexError):
        return None, f"sizes {sizes!r} is not a list of lengths"
    return lengths, f"sizes {list(lengths)} has a negative length" if min(lengths, default=0) < 0 else None


def _check_indices(indices: Sequence[Tensor], size: int) -> str | None:
    for peer, index in enumerate(indices):
        if index.dtype not in (torch.int64, torch.int32):
            return f"the indices for position {peer} are {index.dtype}, not integers"
        if index.numel() and not (-size <= int(index.min()) and int(index.max()) < size):
            return f"the indices for position {peer} go from {int(index.min())} to {int(index.max())}, of {size} slices"
    return None


def _tensor_claim(tensor: Tensor, dim: int) -> dict[str, Any]:
    others = [n for d, n in enumerate(tensor.shape) if d != dim]
    return {"other dims": others, "dtype": tensor.dtype, "device": tensor.device.type}


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _require_grad_on_all(what: str, tensor: Tensor, replies: list[list[int]] | None) -> Tensor:
    """Make the tensor require grad if that of any rank does: backward is a collective, so all ranks must run it."""
    if replies is None or not any(wants for wants, *_ in replies):
        return tensor
    if not all(enabled for _, enabled, *_ in replies):
        off = [c for c, (_, enabled, *_) in enumerate(replies) if not enabled]
        raise ShardingError(f"{what}: gradients are off at positions {off} of the group, and required at others")
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
