"""Max and average pooling of an input sharded along any dim. Returned indices are global.

Each rank computes the outputs whose windows are centered in its shard (`window.py`), from the block of cells that they
read (`padded_block.py`). Average pooling is linear, so a Partial input gives a Partial result. `lp_pool` needs no rule:
torch composes it of these ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.empty_shards import connected
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import Layout
from ...redistribute import without_partial
from .._common.probe import probe, stand_in
from ..reduction.minmax import reduction_identity
from ..shape.flip_roll import shard_by_one_axis
from .conv import to_ntuple
from .lazy_pad import accept_lazy_pad
from .pad import dim_paddings_of, padded_operand
from .padded_block import PaddedBlockPlan, empty_result
from .window import Window

MAX_POOL: dict[int, Callable] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL: dict[int, Callable] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class PoolArgs:
    """Arguments of a pool, one number per dim, and the windows along the pooled dims."""

    def __init__(self, input: Operand, out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any):
        self.nd = nd = len(out)
        self.dims = tuple(range(input.ndim - nd, input.ndim))
        self.kernel = to_ntuple(kernel, nd)
        self.stride = self.kernel if stride is None or stride in ((), []) else to_ntuple(stride, nd)
        self.padding, self.dilation = to_ntuple(padding, nd), to_ntuple(dilation, nd)
        sizes: Any = zip(input.shape[-nd:], out, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        self.windows = dict(zip(self.dims, (Window(*s) for s in sizes), strict=True))

    def local_padding(self, layout: Layout) -> list[int]:
        """Return the padding of the local call: 0 along sharded dims, where the block includes the padding."""
        return [0 if layout.is_sharded(d) else p for d, p in zip(self.dims, self.padding, strict=True)]


@rule(
    *(f"max_pool{nd}d" for nd in MAX_POOL),
    *(f"max_pool{nd}d_with_indices" for nd in MAX_POOL),
    merged=True,
    accepts_deferred=accept_lazy_pad("reflect", "replicate", "circular"),  # zeros are not the lowest value
)
def max_pool(
    input: Operand,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=False,
    *,
    pre_pad=(),
    fn,
):
    """Pool a block padded with the lowest value. `pre_pad` is the padding of a deferred `F.pad` of the input."""
    source, input = input.layout, padded_operand(input, pre_pad)
    nd = int(fn.__name__.removeprefix("max_pool")[0])
    with_indices = return_indices or fn.__name__.endswith("with_indices")
    call = MAX_POOL[nd]
    meta = probe(call, input, kernel_size, stride, padding, dilation, ceil_mode, meta=True)
    one_cell = stand_in(input, (1,) * (nd + 2))
    dtype = (probe(call, one_cell, 1, return_indices=True)[0] if with_indices else probe(call, one_cell, 1)).dtype
    pool = PoolArgs(input, meta.shape[-nd:], kernel_size, stride, padding, dilation)
    layout = shard_by_one_axis(source, pool.dims)
    block_plan = PaddedBlockPlan(layout, pool.windows, dim_paddings=dim_paddings_of(layout, pre_pad))
    result = block_plan.result(layout)
    shape, fill = result.local_shape, reduction_identity(input.dtype, "max")
    args = (pool.kernel, pool.stride, pool.local_padding(layout), pool.dilation, ceil_mode)
    to_global = [
        _to_global_index(block_plan.block_starts[d], step) for d, step in zip(pool.dims, pool.dilation, strict=True)
    ]
    sizes = input.shape[-nd:]

    def pool_block(block):
        if not shape.numel():
            out = empty_result(block, shape, dtype)
            return (out, torch.empty_like(out, dtype=torch.int64)) if with_indices else out
        if not with_indices:
            return call(block, *args)
        out, index = call(block, *args, return_indices=True)
        return out, to_global_flat_index(index, block.shape[-nd:], sizes, to_global) if block_plan.steps else index

    run = connected(pool_block, [layout, result])

    def local(input):
        return run(block_plan.gather_block(input, fill))

    return Plan(local=local, operands={"input": layout}, layout=(result, result) if with_indices else result)


def _to_global_index(block_start: int, dilation: int) -> Callable[[Tensor], Tensor]:
    """Return a function from positions in the block to positions in the field, along one dim.

    For a window with only the lowest value, the local call returns the first cell, which may be in the padding. torch
    returns the first cell inside the field.
    """

    def to_global(position: Tensor) -> Tensor:
        position = position + block_start
        return torch.where(position < 0, position % dilation, position) if block_start < 0 else position

    return to_global


def to_global_flat_index(
    index: Tensor, local_sizes: Sequence[int], sizes: Sequence[int], to_global: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Convert flat indices into a block of spatial sizes `local_sizes` to flat indices into a field of `sizes`."""
    global_index, scale = torch.zeros_like(index), 1
    for n, size, convert in zip(reversed(local_sizes), reversed(sizes), reversed(to_global), strict=True):
        global_index = global_index + convert(index % n) * scale
        index, scale = index.div(n, rounding_mode="floor"), scale * size
    return global_index


# ---------------------------------------------------------------------- averages


@rule(*(f"avg_pool{nd}d" for nd in AVG_POOL), partial=True, merged=True, accepts_deferred=accept_lazy_pad())
def avg_pool(
    input: Operand,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
    *,
    pre_pad=(),
    fn,
):
    """Average the block, then correct the divisor of windows that the field's boundary clips."""
    source, input = input.layout, padded_operand(input, pre_pad)
    nd = int(fn.__name__.removeprefix("avg_pool")[0])
    call = AVG_POOL[nd]
    divisor = () if divisor_override is None else (divisor_override,)  # avg_pool1d has no such argument
    stride = None if stride is None or not to_ntuple(stride, nd) else stride
    stride = kernel_size if stride is None else stride
    meta = probe(call, input, kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor, meta=True)
    dtype = probe(call, stand_in(input, (1,) * (nd + 2)), 1).dtype
    pool = PoolArgs(input, meta.shape[-nd:], kernel_size, stride, padding, 1)
    layout = shard_by_one_axis(keep_partial_sums(source), pool.dims)
    block_plan = PaddedBlockPlan(layout, pool.windows, dim_paddings=dim_paddings_of(layout, pre_pad))
    result = block_plan.result(layout)
    shape = result.local_shape
    args = (pool.kernel, pool.stride, pool.local_padding(layout), ceil_mode, count_include_pad)
    counts = {
        d: [window_divisor(w, o, count_include_pad) for o in range(*block_plan.owned[d])]
        for d, w in pool.windows.items()
    }
    clipped = {d: c for d, c in counts.items() if layout.is_sharded(d) and set(c) - {pool.windows[d].kernel}}
    if divisor:
        clipped = {}

    def pool_block(block):
        if not shape.numel():
            return empty_result(block, shape, dtype)
        if clipped and not block.is_floating_point():
            return integer_avg_pool(block, pool, args[2], ceil_mode, counts)
        out = call(block, *args, *divisor)
        for dim, c in clipped.items():  # the local call divided by the size of an unclipped window
            out = out * broadcast_along(out, dim, [pool.windows[dim].kernel / n for n in c])
        return out

    run = connected(pool_block, [layout, result])

    def local(input):
        return run(block_plan.gather_block(input))

    return Plan(local=local, operands={"input": layout}, layout=result)


def keep_partial_sums(layout: Layout) -> Layout:
    """Return the layout of an operand of a linear op: pending sums stay Partial, other reductions are done first."""
    return layout if all(op == "sum" for _, op in layout.partial) else without_partial(layout)


def window_divisor(window: Window, o: int, include_pad: bool) -> int:
    """Return the number of cells that torch divides output `o` by, along one dim."""
    begin, end = window.receptive_field(o, o + 1)
    end = min(end, window.size + window.padding)
    return end - begin if include_pad else min(end, window.size) - max(begin, 0)


def broadcast_along(like: Tensor, dim: int, values: Sequence[float]) -> Tensor:
    """Return `values` as a tensor that broadcasts along `dim` of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *[1] * (like.ndim - 1 - dim))


def integer_avg_pool(
    block: Tensor, pool: PoolArgs, padding: Sequence[int], ceil_mode: bool, counts: Mapping[int, Sequence[int]]
) -> Tensor:
    """Average integers: divide the sum of the window once, as the quotient is truncated."""
    if pool.nd == 1:
        kernel, stride, padding = ((1, *pool.kernel), (1, *pool.stride), (0, *padding))
        sums = F.avg_pool2d(block.unsqueeze(-2), kernel, stride, padding, ceil_mode, divisor_override=1).squeeze(-2)
    else:
        sums = AVG_POOL[pool.nd](block, pool.kernel, pool.stride, padding, ceil_mode, divisor_override=1)
    divisor: Any = math.prod(broadcast_along(sums, d, c) for d, c in counts.items())
    return sums.div(divisor, rounding_mode="trunc")
