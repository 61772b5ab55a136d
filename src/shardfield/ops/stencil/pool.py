"""Pools: max and average over windows, of a field that is cut along any of its dims. Indices are global.

Each rank makes the outputs whose windows have their centre in its piece (see `window.py`) from the piece that they read
(see `frame.py`). An average is linear, so addends stay addends. `lp_pool` is torch's own, made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import Layout
from .._common.probe import probe_shapes
from ..reduction.minmax import reduction_identity
from ..shape.flip_roll import shard_by_one_axis
from .conv import to_ntuple
from .pad import dim_paddings_of, padded_operand
from .padded_block import PaddedBlockPlan, empty_result
from .window import Window

MAX_POOL: dict[int, Callable] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL: dict[int, Callable] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def result_dtype(input: Operand, nd: int, call: Callable[[Tensor], Tensor]) -> torch.dtype:
    """What dtype a call gives, or torch's own error for one it lacks; a rank with an empty piece would not know."""
    with torch.no_grad():
        return call(torch.zeros((1,) * (nd + 2), dtype=input.dtype, device=input.device)).dtype


class PoolArgs:
    """The arguments of a pool, one number a dim, and the windows along the dims it runs over."""

    def __init__(self, input: Operand, out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any):
        self.nd = nd = len(out)
        self.dims = tuple(range(input.ndim - nd, input.ndim))
        self.kernel = to_ntuple(kernel, nd)
        self.stride = self.kernel if stride is None or stride in ((), []) else to_ntuple(stride, nd)
        self.padding, self.dilation = to_ntuple(padding, nd), to_ntuple(dilation, nd)
        sizes: Any = zip(input.shape[-nd:], out, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        self.windows = dict(zip(self.dims, (Window(*s) for s in sizes), strict=True))

    def local_padding(self, layout: Layout) -> list[int]:
        """What the local call pads: the dims that are whole here."""
        return [0 if layout.is_sharded(d) else p for d, p in zip(self.dims, self.padding, strict=True)]


@rule(
    *(f"max_pool{nd}d" for nd in MAX_POOL),
    *(f"max_pool{nd}d_with_indices" for nd in MAX_POOL),
    merged=True,
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
    """Outside the field no cell is larger than any other. `pre_pad` are those that input is to have first."""
    source, input = input.layout, padded_operand(input, pre_pad)
    nd = int(fn.__name__.removeprefix("max_pool")[0])
    pair = return_indices or fn.__name__.endswith("with_indices")
    call = MAX_POOL[nd]
    meta = probe_shapes(call, input, kernel_size, stride, padding, dilation, ceil_mode)
    dtype = result_dtype(input, nd, lambda x: call(x, 1, return_indices=True)[0] if pair else call(x, 1))
    pool = PoolArgs(input, meta.shape[-nd:], kernel_size, stride, padding, dilation)
    layout = shard_by_one_axis(source, pool.dims)
    frame = PaddedBlockPlan(layout, pool.windows, dim_paddings=dim_paddings_of(layout, pre_pad))
    result = frame.result(layout)
    shape, fill = result.local_shape, reduction_identity(input.dtype, "max")
    how = (pool.kernel, pool.stride, pool.local_padding(layout), pool.dilation, ceil_mode)
    steps = [_to_global_index(frame.block_starts[d], gap) for d, gap in zip(pool.dims, pool.dilation, strict=True)]
    sizes = input.shape[-nd:]

    def local(input):
        block = frame.gather_block(input, fill)
        if not shape.numel():
            made = empty_result(block, shape, dtype)
            return (made, torch.empty_like(made, dtype=torch.int64)) if pair else made
        if not pair:
            return call(block, *how)
        made, at = call(block, *how, return_indices=True)
        return made, to_global_flat_index(at, block.shape[-nd:], sizes, steps) if frame.steps else at

    return Plan(local=local, operands={"input": layout}, layout=(result, result) if pair else result)


def _to_global_index(begin: int, gap: int) -> Callable[[Tensor], Tensor]:
    """Positions in a piece as positions in the field. A window of nothing but the least value names its first cell,
    which for torch is the first one inside the field."""

    def at(position: Tensor) -> Tensor:
        position = position + begin
        return torch.where(position < 0, position % gap, position) if begin < 0 else position

    return at


def to_global_flat_index(
    at: Tensor, local_sizes: Sequence[int], sizes: Sequence[int], steps: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Flat positions in a piece of spatial sizes `local_sizes` as flat positions in a field of `sizes`."""
    found, scale = torch.zeros_like(at), 1
    for n, size, step in zip(reversed(local_sizes), reversed(sizes), reversed(steps), strict=True):
        found = found + step(at % n) * scale
        at, scale = at.div(n, rounding_mode="floor"), scale * size
    return found


# ---------------------------------------------------------------------- averages


@rule(*(f"avg_pool{nd}d" for nd in AVG_POOL), partial=True, merged=True)
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
    """Sums of what is inside the field, divided by how many cells the window has in the whole of it."""
    source, input = input.layout, padded_operand(input, pre_pad)
    nd = int(fn.__name__.removeprefix("avg_pool")[0])
    call = AVG_POOL[nd]
    more = () if divisor_override is None else (divisor_override,)  # which a pool of one dim does not have
    stride = None if stride is None or not to_ntuple(stride, nd) else stride
    stride = kernel_size if stride is None else stride
    meta = probe_shapes(call, input, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
    dtype = result_dtype(input, nd, lambda x: call(x, 1))
    pool = PoolArgs(input, meta.shape[-nd:], kernel_size, stride, padding, 1)
    layout = shard_by_one_axis(keep_partial_sums(source), pool.dims)
    frame = PaddedBlockPlan(layout, pool.windows, dim_paddings=dim_paddings_of(layout, pre_pad))
    result = frame.result(layout)
    shape = result.local_shape
    how = (pool.kernel, pool.stride, pool.local_padding(layout), ceil_mode, count_include_pad)
    counts = {
        d: [window_divisor(w, o, count_include_pad) for o in range(*frame.owned[d])] for d, w in pool.windows.items()
    }
    short = {d: c for d, c in counts.items() if layout.is_sharded(d) and set(c) - {pool.windows[d].kernel}}
    if more:
        short = {}

    def local(input):
        block = frame.gather_block(input)
        if not shape.numel():
            return empty_result(block, shape, dtype)
        if short and not block.is_floating_point():
            return integer_avg_pool(block, pool, how[2], ceil_mode, counts)
        made = call(block, *how, *more)
        for dim, c in short.items():  # the local call has divided by a whole window here
            made = made * broadcast_along(made, dim, [pool.windows[dim].kernel / n for n in c])
        return made

    return Plan(local=local, operands={"input": layout}, layout=result)


def keep_partial_sums(layout: Layout) -> Layout:
    """The layout of an operand of a linear op: addends may stay addends."""
    return layout if all(op == "sum" for _, op in layout.partial) else layout.with_partial(())


def window_divisor(window: Window, o: int, include_pad: bool) -> int:
    """By how many cells torch divides output `o` along one dim."""
    begin, end = window.receptive_field(o, o + 1)
    end = min(end, window.size + window.padding)
    return end - begin if include_pad else min(end, window.size) - max(begin, 0)


def broadcast_along(like: Tensor, dim: int, values: Sequence[float]) -> Tensor:
    """Numbers along one dim of a tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *[1] * (like.ndim - 1 - dim))


def integer_avg_pool(
    block: Tensor, pool: PoolArgs, padding: Sequence[int], ceil_mode: bool, counts: Mapping[int, Sequence[int]]
) -> Tensor:
    """Averages of integers: the quotient is cut off once, so it is taken of the whole sum."""
    if pool.nd == 1:
        kernel, stride, padding = ((1, *pool.kernel), (1, *pool.stride), (0, *padding))
        made = F.avg_pool2d(block.unsqueeze(-2), kernel, stride, padding, ceil_mode, divisor_override=1).squeeze(-2)
    else:
        made = AVG_POOL[pool.nd](block, pool.kernel, pool.stride, padding, ceil_mode, divisor_override=1)
    number: Any = math.prod(broadcast_along(made, d, c) for d, c in counts.items())
    return made.div(number, rounding_mode="trunc")
