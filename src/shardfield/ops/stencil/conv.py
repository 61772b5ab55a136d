"""Convolutions, plain and transposed, of a field that is cut along any of its dims: where everything lies.

Each rank makes the outputs whose windows have their centre in its piece (see `window.py`); `blocks.py` has what it
does for them. Cut channels are split by groups, or give a Partial where every output needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, shard_sizes_of, starts
from ...redistribute import unmerge_dims
from .._common.probe import probe_shapes
from ..shape.flip_roll import shard_by_one_axis
from .conv_local import AUTOCAST_DTYPES, CONV, CONV_TRANSPOSE, ConvArgs, HaloConv
from .halo_plan import HaloPlan
from .pad import PadSpec, dim_paddings_of, padded_operand
from .window import Window


def to_ntuple(value: Any, nd: int) -> tuple[int, ...]:
    """One number a spatial dim, from one for all or one for each."""
    if isinstance(value, int):
        return (value,) * nd
    return tuple(value) * nd if len(value) == 1 else tuple(value)


def resolve_padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """How many cells come before the first input, from a number, one a dim, or a word."""
    if padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    return (0,) * len(kernel) if padding == "valid" else to_ntuple(padding, len(kernel))


@rule("conv1d", "conv2d", "conv3d", merged=True)
def conv(input: Operand, weight: Operand, bias=None, stride=1, padding=0, dilation=1, groups=1, *, pre_pad=(), fn):
    """Halos along cut spatial dims; nothing travels for other cuts. `pre_pad` are those that input is to have first."""
    wide = padded_operand(input, pre_pad)
    validate(fn, wide, weight, bias, stride, padding, dilation, groups)
    nd = weight.ndim - 2
    gaps = to_ntuple(dilation, nd)
    before = resolve_padding(padding, weight.shape[2:], gaps)
    point = {*weight.shape[2:], *to_ntuple(stride, nd)} == {1} and not any(before) and groups == 1
    several = not input.layout.is_simple or any(len(input.layout.axes_of(d)) > 1 for d in range(2, input.ndim))
    if (
        not pre_pad
        and point
        and several
        and input.ndim == nd + 2
        and weight.layout.is_replicated
        and not input.layout.is_sharded(1)
    ):
        return plan_pointwise(input, weight, bias, fn)
    input, weight, bias = (
        unmerge_operand(input),
        unmerge_operand(weight),
        bias if bias is None else unmerge_operand(bias),
    )
    out = probe_shapes(fn, wide, weight, bias, stride, padding, dilation, groups).shape[-nd:]
    call = ConvArgs(to_ntuple(stride, nd), gaps, False, groups)
    native = partial(bind_call, fn, (stride, padding, dilation, groups))
    return plan_conv(input, weight, bias, call, before, out, native, pre_pad)


def unmerge_operand(operand: Operand) -> Operand:
    """The operand as it will lie, without merged dims."""
    return Operand(unmerge_dims(operand.layout), operand.dtype, operand.device, operand.position)


def plan_pointwise(input: Operand, weight: Operand, bias: Operand | None, fn: Callable) -> Plan:
    """A kernel of one point mixes channels and looks at no neighbour: cells may lie in any order, as merged dims do."""
    mesh = input.layout.mesh
    targets = {"weight": Layout.replicate(mesh, weight.shape)}
    if bias is not None:
        targets["bias"] = Layout.replicate(mesh, bias.shape)

    def local(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.numel():
            return fn(input, weight, bias)
        made = torch.einsum("oi,bi...->bo...", weight.flatten(1), input)  # torch's kernels refuse empty pieces
        return made if bias is None else made + bias.to(made.dtype).view(-1, *[1] * (input.ndim - 2))

    return Plan(local=local, operands=targets, layout=input.layout.with_dim(1, DimSharding(weight.shape[0])))


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    input: Operand, weight: Operand, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1, *, fn
):
    """Inputs whose outputs lie on another rank travel, as in a convolution."""
    validate(fn, input, weight, bias, stride, padding, output_padding, groups, dilation)
    nd = weight.ndim - 2
    out = probe_shapes(fn, input, weight, bias, stride, padding, output_padding, groups, dilation).shape[-nd:]
    call = ConvArgs(to_ntuple(stride, nd), to_ntuple(dilation, nd), True, groups)
    how = (stride, padding, output_padding, groups, dilation)
    return plan_conv(input, weight, bias, call, to_ntuple(padding, nd), out, partial(bind_call, fn, how))


@composed("convolution")
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """All of them under one name."""
    nd = weight.ndim - 2
    if transposed:
        return CONV_TRANSPOSE[nd](input, weight, bias, stride, padding, output_padding, groups, dilation)
    return CONV[nd](input, weight, bias, stride, padding, dilation, groups)


def validate(fn: Callable, input: Operand, weight: Operand, bias: Operand | None, *how: Any) -> None:
    """torch's own errors; a rank with an empty piece would not see them otherwise."""
    if weight.ndim < 3:
        raise RuntimeError(f"{fn.__name__}: weight should have at least three dimensions")
    if not isinstance(how[1], str) and min(to_ntuple(how[1], weight.ndim - 2)) < 0:
        raise RuntimeError(f"{fn.__name__}: negative padding is not supported")
    out = probe_shapes(fn, input, weight, bias, *how).shape
    if min(out[2 - weight.ndim :]) < 1:  # before 2.13, torch finds it in the kernel only
        raise RuntimeError(f"{fn.__name__}: the kernel {tuple(weight.shape[2:])} is larger than the padded input")
    kinds = {t.dtype for t in (input, weight, bias) if t is not None}
    alike = torch.is_autocast_enabled(input.device.type) and kinds.issubset(AUTOCAST_DTYPES)
    if len(kinds) > 1 and not alike:
        raise RuntimeError(
            f"{fn.__name__}: input, weight and bias should have one dtype, not {sorted(map(str, kinds))}"
        )


class ChannelPlan:
    """Where the channels of input, weight, bias and result lie, and which groups a rank works on."""

    def __init__(self, layout: Layout, weight: Layout, groups: int, transposed: bool):
        axis_in = 0 if transposed else 1  # the weight's dim of input channels
        out = weight.shape[1] * groups if transposed else weight.shape[0]
        (cut,) = layout.dims[1]
        self.input, self.weight = layout, Layout.replicate(layout.mesh, weight.shape)
        self.bias = Layout.replicate(layout.mesh, (out,))
        self.result: DimSharding = DimSharding(out)
        self.partial: tuple[int, ...] = ()
        self.narrow: tuple[int, int, int] | None = None  # this rank's part of a whole weight
        self.groups = groups
        if layout.is_sharded(1) and groups == 1:
            self.partial = cut.axes
            start, stop = layout.span(1)
            if weight.dims[axis_in] == (cut,) and not weight.axes_of(1 - axis_in):
                self.weight = weight.unshard(range(2, weight.ndim))  # it lies as it is needed
            else:
                self.narrow = (axis_in, start, stop - start)
        elif layout.is_sharded(1):
            per = cut.size // groups
            marks = [(start + per // 2) // per for start in (*starts(cut.shard_sizes), cut.size)]
            share = [b - a for a, b in pairwise(marks)]
            self.input = layout.with_dim(1, DimSharding(cut.size, cut.axes, tuple(n * per for n in share)))
            self.result = DimSharding(out, cut.axes, tuple(n * (out // groups) for n in share))
            at = layout.index(cut.axes)
            self.groups = share[at]
            rows = weight.shape[0] // groups
            self.narrow = (0, marks[at] * rows, share[at] * rows)
            self.bias = Layout.make(layout.mesh, [(self.result,)])
        elif groups == 1 and self._uses_free_axes(layout, weight, 1 - axis_in):
            self.weight = weight.unshard([axis_in, *range(2, weight.ndim)])
            (self.result,) = weight.dims[1 - axis_in]
            self.bias = Layout.make(layout.mesh, [(self.result,)])

    @staticmethod
    def _uses_free_axes(layout: Layout, weight: Layout, dim: int) -> bool:
        """True if the weight is cut by output channels over axes that the input leaves free."""
        return weight.is_sharded(dim) and not set(weight.axes_of(dim)) & set(layout.shard_axes)


def bind_call(fn: Callable, how: tuple, with_bias: bool) -> Callable:
    """torch's own call, as a function of the tensors alone."""
    if with_bias:
        return lambda input, weight, bias: fn(input, weight, bias, *how)
    return lambda input, weight: fn(input, weight, None, *how)


def plan_conv(
    input: Operand,
    weight: Operand,
    bias: Operand | None,
    call: ConvArgs,
    before: Sequence[int],
    out: Sequence[int],
    native: Callable[[bool], Callable],
    pre_pad: PadSpec = (),
) -> Plan:
    """Where operands go, who makes which outputs, and what each rank does for them."""
    nd = weight.ndim - 2
    batched = input.ndim == nd + 2
    layout = input.layout if batched else input.layout.insert(0)
    layout = shard_by_one_axis(layout, range(2, nd + 2))
    channels = ChannelPlan(layout, weight.layout, call.groups, call.transposed)
    layout = channels.input
    edges = dim_paddings_of(layout, pre_pad)
    zeros = {d: edges.pop(d) for d, edge in list(edges.items()) if edge.mode == "constant"}
    windows = {}
    dims = zip(out, weight.shape[2:], call.stride, before, call.dilation, strict=True)
    for dim, (o, k, s, p, d) in enumerate(dims, 2):
        size, pad = layout.shape[dim], p + zeros[dim].before if dim in zeros else p
        size += edges[dim].before + edges[dim].after if dim in edges else 0
        windows[dim] = Window(size, o, k, s, pad, d, call.transposed)
    cover = HaloPlan(layout, windows, edges)
    result = cover.result(layout).with_dim(1, channels.result).with_partial(channels.partial)
    # A whole weight's gradient is summed by the convolution itself, which has work to do meanwhile.
    plain = channels.narrow is None and not channels.partial
    others = {*layout.shard_axes, *result.shard_axes} - set(channels.weight.shard_axes)
    over = process_groups(layout, sorted(others)) if plain else ()
    filled = [layout.dims[0], layout.dims[1], *result.dims[1:2]]
    busy = all(n for (factor,) in filled for n in shard_sizes_of(factor)) and 0 not in weight.shape
    targets = {"input": layout if batched else layout.drop_dims([0]), "weight": channels.weight}
    if bias is not None:
        targets["bias"] = channels.bias
    made = result if batched else result.drop_dims([0])
    if plain and busy and not pre_pad and not any(layout.is_sharded(d) for d in range(2, nd + 2)):
        return Plan(local=native(bias is not None), operands=targets, layout=made)
    # with edges, the first and last piece may lack cells that no rank has to send
    blocks = HaloConv(call._replace(groups=channels.groups), cover, over, busy and not edges)
    first = all(layout.coords[a] == 0 for a in channels.partial)
    narrow = channels.narrow

    def local(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if narrow is not None:
            weight = weight.narrow(*narrow)
        if bias is not None and not first:
            bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool), 0)  # one of the addends has it
        if batched:
            return blocks.convolve(input, weight, bias)
        return blocks.convolve(input.unsqueeze(0), weight, bias).squeeze(0)

    whole = ("weight", "bias") if plain else ()
    return Plan(local=local, operands=targets, layout=made, whole=whole)
