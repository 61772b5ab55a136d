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

from ..dispatch import rule
from ..layout import Layout
from ..plan import Operand, Plan
from .across import probe_shapes
from .conv import each
from .extreme import least
from .frame import Frame, nothing
from .pad import continued, edges_of
from .rearrange import one_axis
from .window import Window

MAX: dict[int, Callable] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE: dict[int, Callable] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def result_dtype(input: Operand, nd: int, call: Callable[[Tensor], Tensor]) -> torch.dtype:
    """What dtype a call gives, or torch's own error for one it lacks; a rank with an empty piece would not know."""
    with torch.no_grad():
        return call(torch.zeros((1,) * (nd + 2), dtype=input.dtype, device=input.device)).dtype


class Pool:
    """The arguments of a pool, one number a dim, and the windows along the dims it runs over."""

    def __init__(self, input: Operand, out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any):
        self.nd = nd = len(out)
        self.dims = tuple(range(input.ndim - nd, input.ndim))
        self.kernel = each(kernel, nd)
        self.stride = self.kernel if stride is None or stride in ((), []) else each(stride, nd)
        self.padding, self.dilation = each(padding, nd), each(dilation, nd)
        sizes: Any = zip(input.shape[-nd:], out, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        self.windows = dict(zip(self.dims, (Window(*s) for s in sizes), strict=True))

    def inner_padding(self, layout: Layout) -> list[int]:
        """What the local call pads: the dims that are whole here."""
        return [0 if layout.is_cut(d) else p for d, p in zip(self.dims, self.padding, strict=True)]


@rule(
    *(f"max_pool{nd}d" for nd in MAX),
    *(f"max_pool{nd}d_with_indices" for nd in MAX),
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
    borders=(),
    fn,
):
    """Outside the field no cell is larger than any other. `borders` are those that input is to have first."""
    source, input = input.layout, continued(input, borders)
    nd = int(fn.__name__.removeprefix("max_pool")[0])
    pair = return_indices or fn.__name__.endswith("with_indices")
    call = MAX[nd]
    meta = probe_shapes(call, input, kernel_size, stride, padding, dilation, ceil_mode)
    dtype = result_dtype(input, nd, lambda x: call(x, 1, return_indices=True)[0] if pair else call(x, 1))
    pool = Pool(input, meta.shape[-nd:], kernel_size, stride, padding, dilation)
    layout = one_axis(source, pool.dims)
    frame = Frame(layout, pool.windows, edges=edges_of(layout, borders))
    result = frame.result(layout)
    shape, fill = result.local_shape, least(input.dtype, "max")
    how = (pool.kernel, pool.stride, pool.inner_padding(layout), pool.dilation, ceil_mode)
    steps = [_inside(frame.begins[d], gap) for d, gap in zip(pool.dims, pool.dilation, strict=True)]
    sizes = input.shape[-nd:]

    def local(input):
        block = frame.take(input, fill)
        if not shape.numel():
            made = nothing(block, shape, dtype)
            return (made, torch.empty_like(made, dtype=torch.int64)) if pair else made
        if not pair:
            return call(block, *how)
        made, at = call(block, *how, return_indices=True)
        return made, renumbered(at, block.shape[-nd:], sizes, steps) if frame.turns else at

    return Plan(local=local, operands={"input": layout}, layout=(result, result) if pair else result)


def _inside(begin: int, gap: int) -> Callable[[Tensor], Tensor]:
    """Positions in a piece as positions in the field. A window of nothing but the least value names its first cell,
    which for torch is the first one inside the field."""

    def at(position: Tensor) -> Tensor:
        position = position + begin
        return torch.where(position < 0, position % gap, position) if begin < 0 else position

    return at


def renumbered(
    at: Tensor, here: Sequence[int], sizes: Sequence[int], steps: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Flat positions in a piece of spatial sizes `here` as flat positions in a field of `sizes`."""
    found, scale = torch.zeros_like(at), 1
    for n, size, step in zip(reversed(here), reversed(sizes), reversed(steps), strict=True):
        found = found + step(at % n) * scale
        at, scale = at.div(n, rounding_mode="floor"), scale * size
    return found


# ---------------------------------------------------------------------- averages


@rule(*(f"avg_pool{nd}d" for nd in AVERAGE), partial=True, merged=True)
def avg_pool(
    input: Operand,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
    *,
    borders=(),
    fn,
):
    """Sums of what is inside the field, divided by how many cells the window has in the whole of it."""
    source, input = input.layout, continued(input, borders)
    nd = int(fn.__name__.removeprefix("avg_pool")[0])
    call = AVERAGE[nd]
    more = () if divisor_override is None else (divisor_override,)  # which a pool of one dim does not have
    stride = None if stride is None or not each(stride, nd) else stride
    stride = kernel_size if stride is None else stride
    meta = probe_shapes(call, input, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
    dtype = result_dtype(input, nd, lambda x: call(x, 1))
    pool = Pool(input, meta.shape[-nd:], kernel_size, stride, padding, 1)
    layout = one_axis(linear(source), pool.dims)
    frame = Frame(layout, pool.windows, edges=edges_of(layout, borders))
    result = frame.result(layout)
    shape = result.local_shape
    how = (pool.kernel, pool.stride, pool.inner_padding(layout), ceil_mode, count_include_pad)
    counts = {d: [count(w, o, count_include_pad) for o in range(*frame.owned[d])] for d, w in pool.windows.items()}
    short = {d: c for d, c in counts.items() if layout.is_cut(d) and set(c) - {pool.windows[d].kernel}}
    if more:
        short = {}

    def local(input):
        block = frame.take(input)
        if not shape.numel():
            return nothing(block, shape, dtype)
        if short and not block.is_floating_point():
            return whole_numbers(block, pool, how[2], ceil_mode, counts)
        made = call(block, *how, *more)
        for dim, c in short.items():  # the local call has divided by a whole window here
            made = made * along(made, dim, [pool.windows[dim].kernel / n for n in c])
        return made

    return Plan(local=local, operands={"input": layout}, layout=result)


def linear(layout: Layout) -> Layout:
    """The layout of an operand of a linear op: addends may stay addends."""
    return layout if all(op == "sum" for _, op in layout.partial) else layout.with_partial(())


def count(window: Window, o: int, include_pad: bool) -> int:
    """By how many cells torch divides output `o` along one dim."""
    begin, end = window.covers(o, o + 1)
    end = min(end, window.size + window.padding)
    return end - begin if include_pad else min(end, window.size) - max(begin, 0)


def along(like: Tensor, dim: int, values: Sequence[float]) -> Tensor:
    """Numbers along one dim of a tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *[1] * (like.ndim - 1 - dim))


def whole_numbers(
    block: Tensor, pool: Pool, padding: Sequence[int], ceil_mode: bool, counts: Mapping[int, Sequence[int]]
) -> Tensor:
    """Averages of integers: the quotient is cut off once, so it is taken of the whole sum."""
    if pool.nd == 1:
        kernel, stride, padding = ((1, *pool.kernel), (1, *pool.stride), (0, *padding))
        made = F.avg_pool2d(block.unsqueeze(-2), kernel, stride, padding, ceil_mode, divisor_override=1).squeeze(-2)
    else:
        made = AVERAGE[pool.nd](block, pool.kernel, pool.stride, padding, ceil_mode, divisor_override=1)
    number: Any = math.prod(along(made, d, c) for d, c in counts.items())
    return made.div(number, rounding_mode="trunc")
