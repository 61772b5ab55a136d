"""Differentiable collectives over uneven shards.

A tensor is sharded along `dim`, one shard per rank; `sizes` are the shard sizes, and every rank passes the same list.
Backward is the adjoint: the gradient of a rank's input is the sum of its contributions to the results of all ranks.
Every rank of the group must make the call and run backward. If the input of any rank requires grad, the result requires
grad on all ranks, so that all can run backward.
If ranks do not agree on the arguments, all raise the same `ShardingError`.

`group` is a process group, None for all ranks; `src` and `dst` are positions in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm import autograd_collectives, collectives
from ..comm.route import Region, Route, RowRequest, fetch_route
from ..layout import starts
from .vcollective_args import Sizes, validate_indices, validate_shards


def all_gather_v(
    tensor: Tensor, sizes: Sizes | None, dim: int = 0, use_fp32: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """Gather all shards, concatenated, on every rank. Backward: reduce-scatter of the gradient.

    Half precision is sent as it is and summed in fp32, or in its own dtype with `use_fp32=False`. With `sizes` None,
    ranks exchange their sizes.
    """
    args = validate_shards("all_gather_v", tensor, sizes, dim, group)
    if args.group is None:
        return args.tensor
    return autograd_collectives.gather_replicate_in(args.tensor, args.dim, args.sizes, args.group, use_fp32)


def gather_v(
    tensor: Tensor, sizes: Sizes | None, dim: int = 0, dst: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Gather all shards, concatenated, on the rank at `dst`; expanded zeros of that shape elsewhere.

    Backward: scatter the gradient from `dst`.
    """
    args = validate_shards("gather_v", tensor, sizes, dim, group, {"dst": dst}, root=dst)
    if args.group is None:
        return args.tensor
    total, parts = sum(args.sizes), range(len(args.sizes))
    wanted = [[RowRequest(0, total)] if c == dst else [] for c in parts]
    route = fetch_route(args.dim, args.sizes, args.coord, wanted, [total if c == dst else 0 for c in parts])
    out = autograd_collectives.exchange(args.tensor, route, args.group)
    if args.coord == dst:
        return out
    shape = list(out.shape)
    shape[args.dim] = total
    # The sum over an empty dim is zero, and keeps this rank's backward in the graph to send and receive.
    return out.sum(args.dim, keepdim=True, dtype=out.dtype).expand(shape)


def scatter_v(
    tensor: Tensor, sizes: Sizes | None, dim: int = 0, src: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Scatter the tensor of the rank at `src`. Backward: gather the gradients at `src`.

    The other ranks pass a tensor of the same dtype and shape except for `dim`, which may have any size; their gradient
    is zero. With `sizes` None, the sizes are those of `compute_split_shapes`.
    """
    args = validate_shards("scatter_v", tensor, sizes, dim, group, {"src": src}, root=src, input_kind="at root")
    if args.group is None:
        return args.tensor
    total, parts = sum(args.sizes), range(len(args.sizes))
    wanted = [[RowRequest(start, n)] for start, n in zip(starts(args.sizes), args.sizes, strict=True)]
    held = [total if c == src else 0 for c in parts]
    route = fetch_route(args.dim, held, args.coord, wanted, args.sizes)
    return autograd_collectives.exchange(args.tensor.narrow(args.dim, 0, held[args.coord]), route, args.group)


def indexed_all_to_all_v(
    tensor: Tensor,
    indices: Sequence[Tensor],
    sizes: Sequence[Sizes],
    use_fp32: bool = True,
    dim: int = 0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Send the slices `indices[r]` of this rank's shard to each rank r; return the received slices in rank order.

    `sizes[s][r]` is the number of slices that rank s sends to rank r. An index may be sent to several ranks, and
    several times to one; negative indices count from the end. Backward: gradients are sent back and added to their
    source slices, in fp32 for half precision (unless `use_fp32` is False).
    """
    args = validate_indices(tensor, indices, sizes, dim, group)
    tensor, dim = args.tensor, args.dim
    chosen = torch.cat([i.reshape(-1).to(tensor.device) for i in indices])
    chosen = torch.where(chosen < 0, chosen + tensor.shape[dim], chosen)
    wide = collectives.accumulate_dtype(tensor.dtype) if use_fp32 and tensor.requires_grad else tensor.dtype
    packed = tensor.to(wide).index_select(dim, chosen).to(tensor.dtype)
    if args.group is None:
        return packed
    sent = [int(n) for n in sizes[args.coord]]
    received = [int(row[args.coord]) for row in sizes]
    route = Route.from_lists(
        args.coord,
        send=tuple((Region(((dim, b, n),)),) for b, n in zip(starts(sent), sent, strict=True)),
        recv=tuple((Region(((dim, b, n),)),) for b, n in zip(starts(received), received, strict=True)),
        sizes_in=((dim, sum(sent)),),
        sizes_out=((dim, sum(received)),),
    )
    return autograd_collectives.exchange(packed, route, args.group)


class AllGatherVAutograd:
    """`all_gather_v` as PhysicsNeMo's autograd Function."""

    apply = staticmethod(all_gather_v)


class GatherVAutograd:
    """`gather_v` as PhysicsNeMo's autograd Function."""

    apply = staticmethod(gather_v)


class ScatterVAutograd:
    """`scatter_v` as PhysicsNeMo's autograd Function."""

    apply = staticmethod(scatter_v)


class IndexedAllToAllVAutograd:
    """`indexed_all_to_all_v` as PhysicsNeMo's autograd Function."""

    apply = staticmethod(indexed_all_to_all_v)
