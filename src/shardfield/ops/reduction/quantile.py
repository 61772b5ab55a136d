"""Quantiles: find order statistics by counting, then interpolate between them as torch does."""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import Layout
from .._common.autocast import under_autocast
from .._common.blockwise import Blocks, as_rows, move_shard_off, simplify_dim
from .._common.probe import probe
from ..sorting.order_statistics import count_nans, counting_cost_bytes, kth_index, select_columns
from .common import reduced_layout


@rule("quantile", "nanquantile", merged=True, around=under_autocast(lambda x: torch.quantile(x, 0.5), 1))
def quantile(input: Operand, q, dim=None, keepdim=False, *, interpolation="linear", fn):
    """Plan a result with a new first dim if `q` is 1-D, replicated over the axes that shard `dim`."""
    probe(fn, input, q, dim, keepdim, interpolation=interpolation)
    many = isinstance(q, Operand) and q.ndim == 1
    wanted = q.numel() if isinstance(q, Operand) else 1
    operands = {"q": Layout.replicate(input.layout.mesh, q.shape)} if isinstance(q, Operand) else {}
    layout, sharded = input.layout, not input.layout.is_replicated
    if dim is not None:
        layout, dim, sharded = simplify_dim(layout, dim)

    def reduced(layout: Layout) -> Layout:
        dims = range(layout.ndim) if dim is None else (dim,) if layout.ndim else ()
        result = reduced_layout(layout, tuple(dims), keepdim, None)
        return result.insert(0, wanted) if many else result

    target: Layout | None = None if sharded else layout
    if sharded and dim is not None:
        target = move_shard_off(layout, dim)
        if target is not None:
            held = layout.shape[dim] * input.dtype.itemsize / len(layout.shard_sizes(dim))
            target = target if held <= counting_cost_bytes(input.dtype, 2 * wanted) else None
    if target is not None:
        result = reduced(target)

        def unsharded(input, q):
            if input.numel():
                return fn(input, q, dim, keepdim, interpolation=interpolation)
            _validate_q(fn, input, q)
            # An empty result, with the inputs in its graph: all ranks must send the messages of backward.
            zero = input.sum() + (q.sum() if isinstance(q, Tensor) and interpolation == "linear" else 0)
            return input.new_zeros(result.local_shape) + zero

        return Plan(local=unsharded, operands={"input": target, **operands}, layout=result)

    result = reduced(layout)
    blocks = Blocks.over_all_shards(layout) if dim is None else Blocks.along(layout, dim)
    # `q` is combined with values that are replicated over the blocks' axes: only the other axes shard the work.
    over = process_groups(layout, result.shard_axes)

    def counted(input, q):
        _validate_q(fn, input, q)
        if isinstance(q, Tensor):
            (q,) = autograd_collectives.replicate_in([q], over)
        rows = input.reshape(1, -1) if dim is None else as_rows(input, dim)
        out = _interpolate_ranks(rows, q, blocks, interpolation, fn.__name__ == "nanquantile")
        return (out.t() if many else out).reshape(result.local_shape)

    return Plan(local=counted, operands={"input": layout, **operands}, layout=result, complete_grads=("q",))


def _validate_q(fn, input: Tensor, q) -> None:
    """Raise torch's error if a value of `q`, which is the same on all ranks, is out of range."""
    fn(input.detach().new_zeros(1), q.detach() if isinstance(q, Tensor) else q)


def _interpolate_ranks(rows: Tensor, q: Tensor | float, blocks: Blocks, interpolation: str, skip: bool) -> Tensor:
    """Return a (rows, quantiles) tensor, with the arithmetic of torch's kernel."""
    n = sum(blocks.shard_sizes)
    at = q.reshape(1, -1) if isinstance(q, Tensor) else rows.new_full((1, 1), q)
    nans = count_nans(rows, blocks)
    rank = at * (n - nans - 1) if skip else torch.where(nans > 0, n - 1.0, at * (n - 1))
    rank = rank.masked_fill(rank < 0, 0)
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](rank)
        return select_columns(rows, kth_index(rows, rank.long(), blocks), blocks)
    ranks = torch.cat([rank.detach().long(), rank.detach().ceil().long()], 1)
    below, above = select_columns(rows, kth_index(rows, ranks, blocks), blocks).chunk(2, 1)
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - rank.detach().long()
    return torch.lerp(below, above, weight)
