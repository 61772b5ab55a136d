"""Collectives on plain tensors without gradients, and other names that PhysicsNeMo scripts import from here.

The `*_wrapper`s are the functions of `shardfield.distributed.autograd` without autograd: the same arguments, the
same checks, the same errors on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm import autograd_collectives, collectives
from ..comm.consensus import check_arguments
from . import autograd
from .coalesced import fused_all_reduce as fused_all_reduce
from .manager import DistributedManager
from .shared_params import mark_module_as_shared as mark_module_as_shared
from .shared_params import unmark_module_as_shared as unmark_module_as_shared
from .splits import compute_split_shapes as compute_split_shapes
from .splits import get_memory_format as get_memory_format
from .splits import pad_helper as pad_helper
from .splits import split_tensor_along_dim as split_tensor_along_dim
from .splits import truncate_helper as truncate_helper
from .vcollective_args import Sizes, resolve_group, validate_shards


@torch.no_grad()
def all_gather_v_wrapper(
    tensor: Tensor, sizes: Sizes | None = None, dim: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Gather all shards along `dim`, concatenated, on every rank; with `sizes` None, ranks exchange their sizes."""
    return autograd.all_gather_v(tensor.detach(), sizes, dim, group=group)


@torch.no_grad()
def all_gather_v_bwd_wrapper(
    tensor: Tensor, sizes: Sizes, dim: int = 0, use_fp32: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """Adjoint of `all_gather_v_wrapper`: return this rank's shard of the sum over ranks of full tensors.

    Half precision is summed in fp32, or in its own dtype with `use_fp32=False`.
    """
    args = validate_shards("all_gather_v_bwd", tensor.detach(), sizes, dim, group, input_kind="full")
    if args.group is None:
        return args.tensor
    return autograd_collectives.reduce_scatter(args.tensor, args.dim, args.sizes, args.group, use_fp32)


@torch.no_grad()
def gather_v_wrapper(
    tensor: Tensor, sizes: Sizes | None = None, dim: int = 0, dst: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Gather all shards, concatenated, at position `dst` of the group; zeros of that shape elsewhere."""
    return autograd.gather_v(tensor.detach(), sizes, dim, dst, group)


@torch.no_grad()
def scatter_v_wrapper(
    tensor: Tensor, sizes: Sizes | None = None, dim: int = 0, src: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Scatter the tensor at position `src`; the others pass a tensor that differs only in `dim`."""
    return autograd.scatter_v(tensor.detach(), sizes, dim, src, group)


@torch.no_grad()
def indexed_all_to_all_v_wrapper(
    tensor: Tensor,
    indices: Sequence[Tensor],
    sizes: Sequence[Sizes],
    dim: int = 0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Send the slices `indices[r]` to each rank r; `sizes[s][r]` is the number that rank s sends to rank r."""
    return autograd.indexed_all_to_all_v(tensor.detach(), indices, sizes, dim=dim, group=group)


def indexed_all_to_all_v_wrapper_bwd(
    tensor: Tensor,
    indices: Sequence[Tensor],
    sizes: Sequence[Sizes],
    tensor_size_along_dim: int,
    use_fp32: bool = True,
    dim: int = 0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Adjoint of `indexed_all_to_all_v_wrapper`: send slices back and add them to their source slices."""
    group, count, coord = resolve_group(group)
    shape = list(tensor.shape)
    problem = None
    if -tensor.dim() <= dim < tensor.dim() and [len(row) for row in sizes] == [count] * count:
        received = sum(row[coord] for row in sizes)
        if shape[dim] != received:
            problem = f"its tensor has {shape[dim]} along dim {dim}, sizes says that it received {received}"
        shape[dim] = tensor_size_along_dim
    check_arguments(
        "indexed_all_to_all_v_bwd", group, {"sizes": sizes, "dim": dim}, {"shape": tuple(tensor.shape)}, problem
    )
    with torch.enable_grad():
        source = tensor.new_zeros(shape).requires_grad_()
        sent = autograd.indexed_all_to_all_v(source, indices, sizes, use_fp32, dim, group)
    return torch.autograd.grad(sent, source, tensor.detach())[0]


def distributed_transpose(
    tensor: Tensor, dim0: int, dim1: int, group: ProcessGroup | None = None, async_op: bool = False
) -> tuple[list[Tensor], Any]:
    """Reshard a tensor from `dim1` to `dim0`: `torch.cat(blocks, dim1)` of the result is the new local tensor.

    Returns one block from each rank, and None or, with `async_op`, a handle: the blocks are valid once `wait()` has
    returned. `dim0` gets the sizes of `compute_split_shapes`; `dim1` may have any shard sizes.
    """
    args = validate_shards("distributed_transpose", tensor.detach(), None, dim1, group, {"dim0": dim0})
    if not -tensor.dim() <= dim0 < tensor.dim() or dim0 % tensor.dim() == args.dim:  # the same on all ranks by now
        raise ValueError(f"distributed_transpose: dims {dim0} and {dim1} of a tensor of {tensor.dim()} dims")
    if args.group is None:
        return [args.tensor], _CompletedWork() if async_op else None
    blocks = [p.contiguous() for p in split_tensor_along_dim(args.tensor, dim0, len(args.sizes))]
    blocks[args.coord] = blocks[args.coord].clone()
    shape = list(blocks[args.coord].shape)
    shapes = [[*shape[: args.dim], n, *shape[args.dim + 1 :]] for n in args.sizes]
    pending = collectives.start_exchange(blocks, shapes, args.group)
    if not async_op:
        return pending.wait(), None
    assert pending.recv_buffers is not None
    return pending.recv_buffers, pending


class _CompletedWork:
    def wait(self) -> None:
        """Return at once: no message is in flight."""


def reduce_loss(loss: float | Tensor, dst_rank: int = 0, mean: bool = True) -> float | None:
    """Return the mean (or sum) of every rank's loss as a float on `dst_rank`, None elsewhere: for logging."""
    manager = DistributedManager()
    if not 0 <= dst_rank < manager.world_size:
        raise ValueError(f"reduce_loss: there is no rank {dst_rank} among {manager.world_size}")
    group, size, rank = resolve_group(None)
    if group is None or size == 1:
        return float(loss)
    value = torch.tensor([float(loss)], dtype=torch.float64, device=manager.device)
    total = collectives.all_reduce(value, group, "avg" if mean else "sum")
    return float(total) if rank == dst_rank else None
