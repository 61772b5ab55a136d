"""Collectives over pieces of any sizes that gradients pass through.

A tensor is cut along `dim` into one piece a rank; `sizes` says how long each is, and every rank passes the same
list. Backward is the true adjoint: what a rank's input contributes to the results of all ranks comes back to it,
summed. Every rank of the group makes the call, and takes part in backward; a rank whose own input needs no
gradient does so by itself. Ranks that do not agree on the arguments all raise the same `ShardingError`.

`group` is a process group, None the whole world; `src` and `dst` are positions in it.
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
    """All pieces, joined, on every rank. Backward: each rank's piece of the gradient, summed over ranks.

    Sums of half precision are taken in fp32 whatever `use_fp32` says: the pieces travel as they are, so it costs
    nothing. With `sizes` None, they are found from the tensors.
    """
    given = validate_shards("all_gather_v", tensor, sizes, dim, group)
    if given.group is None:
        return given.tensor
    return autograd_collectives.gather_replicate_in(given.tensor, given.dim, given.sizes, given.group)


def gather_v(
    tensor: Tensor, sizes: Sizes | None, dim: int = 0, dst: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """All pieces, joined, on the rank at `dst`; zeros of that shape, which take no memory, elsewhere.

    Backward: the pieces of the gradient at `dst` go back to their ranks.
    """
    given = validate_shards("gather_v", tensor, sizes, dim, group, {"dst": dst}, root=dst)
    if given.group is None:
        return given.tensor
    total, parts = sum(given.sizes), range(len(given.sizes))
    wanted = [[RowRequest(0, total)] if c == dst else [] for c in parts]
    route = fetch_route(given.dim, given.sizes, given.coord, wanted, [total if c == dst else 0 for c in parts])
    out = autograd_collectives.exchange(given.tensor, route, given.group)
    if given.coord == dst:
        return out
    shape = list(out.shape)
    shape[given.dim] = total
    # The sum over nothing: zeros, and yet this rank's backward comes through here to send and receive.
    return out.sum(given.dim, keepdim=True, dtype=out.dtype).expand(shape)


def scatter_v(
    tensor: Tensor, sizes: Sizes | None, dim: int = 0, src: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """To each rank its piece of the tensor of the rank at `src`. Backward: the pieces' gradients, joined at `src`.

    The other ranks pass a tensor of the same dtype and shape but for `dim`, where any length will do; their
    gradient is zero. With `sizes` None, `compute_split_shapes` says how to cut.
    """
    given = validate_shards("scatter_v", tensor, sizes, dim, group, {"src": src}, root=src, input_kind="at root")
    if given.group is None:
        return given.tensor
    total, parts = sum(given.sizes), range(len(given.sizes))
    wanted = [[RowRequest(start, n)] for start, n in zip(starts(given.sizes), given.sizes, strict=True)]
    held = [total if c == src else 0 for c in parts]
    route = fetch_route(given.dim, held, given.coord, wanted, given.sizes)
    return autograd_collectives.exchange(given.tensor.narrow(given.dim, 0, held[given.coord]), route, given.group)


def indexed_all_to_all_v(
    tensor: Tensor,
    indices: Sequence[Tensor],
    sizes: Sequence[Sizes],
    use_fp32: bool = True,
    dim: int = 0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Send the slices `indices[r]` of this rank's piece to each rank r; get what they send here, joined in order.

    `sizes[s][r]` is how many slices rank s sends to rank r. An index may be sent to several ranks, and several
    times to one. Backward: gradients go back and are added where the slices came from, in fp32 for half precision
    (unless `use_fp32` is False and the sums on this rank may be taken as they are).
    """
    given = validate_indices(tensor, indices, sizes, dim, group)
    tensor, dim = given.tensor, given.dim
    chosen = torch.cat([i.reshape(-1).to(tensor.device) for i in indices])
    wide = collectives.accumulate_dtype(tensor.dtype) if use_fp32 and tensor.requires_grad else tensor.dtype
    packed = tensor.to(wide).index_select(dim, chosen).to(tensor.dtype)
    if given.group is None:
        return packed
    sent = [int(n) for n in sizes[given.coord]]
    received = [int(row[given.coord]) for row in sizes]
    route = Route(
        send=tuple((Region(((dim, b, n),)),) for b, n in zip(starts(sent), sent, strict=True)),
        recv=tuple((Region(((dim, b, n),)),) for b, n in zip(starts(received), received, strict=True)),
        sizes_in=((dim, sum(sent)),),
        sizes_out=((dim, sum(received)),),
    )
    return autograd_collectives.exchange(packed, route, given.group)
