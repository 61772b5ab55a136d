"""Rules of convolution and transposed convolution on an input sharded along any dim.

Spatial dims: each rank computes the outputs whose windows are centered in its shard (`window.py`) and receives the
halo they read (`halo_plan.py`). `conv_local.py` does the local work. Channels: with groups == 1, sharded input channels
give a Partial result, as every output sums over all of them. With groups > 1, each rank gets entire groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...comm.autograd_collectives import Groups
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, balanced, shard_sizes_of, starts
from ...redistribute import unmerge_dims
from .._common.autocast import HALF_DTYPES, autocast_disabled
from .._common.probe import probe, stand_in
from ..shape.flip_roll import reduce_into_field, shard_by_one_axis
from .conv_local import AUTOCAST_DTYPES, CONV, CONV_TRANSPOSE, ConvArgs, HaloConv
from .half_conv import is_narrow
from .halo_plan import HaloPlan
from .lazy_pad import accept_lazy_pad
from .pad import PadSpec, dim_paddings_of, padded_operand
from .padded_block import PaddedBlockPlan
from .padded_conv import PaddedConv, prefers_joining, prefers_overlap
from .window import Window


def to_ntuple(value: Any, nd: int) -> tuple[int, ...]:
    """Return one number per spatial dim, from one number for all dims or one per dim."""
    if isinstance(value, int):
        return (value,) * nd
    return tuple(value) * nd if len(value) == 1 else tuple(value)


def resolve_padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding before the first input of each dim, from a number, one per dim, "same" or "valid"."""
    if padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    return (0,) * len(kernel) if padding == "valid" else to_ntuple(padding, len(kernel))


@rule("conv1d", "conv2d", "conv3d", partial=True, merged=True, accepts_deferred=accept_lazy_pad())
def conv(input: Operand, weight: Operand, bias=None, stride=1, padding=0, dilation=1, groups=1, *, pre_pad=(), fn):
    """Exchange halos along sharded spatial dims. `pre_pad` is the padding of a deferred `F.pad` of the input."""
    input, weight, bias = reduce_operands(input, weight, bias)
    padded = padded_operand(input, pre_pad)
    validate(fn, padded, weight, bias, stride, padding, dilation, groups)
    nd = weight.ndim - 2
    dilations = to_ntuple(dilation, nd)
    before = resolve_padding(padding, weight.shape[2:], dilations)
    pointwise = {*weight.shape[2:], *to_ntuple(stride, nd)} == {1} and not any(before) and groups == 1
    merged = not input.layout.is_simple or any(len(input.layout.axes_of(d)) > 1 for d in range(2, input.ndim))
    if (
        not pre_pad
        and pointwise
        and merged
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
    out = probe(fn, padded, weight, bias, stride, padding, dilation, groups, meta=True).shape[-nd:]
    call = ConvArgs(to_ntuple(stride, nd), dilations, False, groups)
    native = partial(bind_call, fn, (stride, padding, dilation, groups))
    return plan_conv(input, weight, bias, call, before, out, native, pre_pad)


def reduce_operands(input: Operand, weight: Operand, bias: Operand | None) -> tuple[Operand, Operand, Operand | None]:
    """Return the operands in the layouts that they have after their pending reductions."""

    def reduced(operand: Operand, layout: Layout) -> Operand:
        return Operand(layout, operand.dtype, operand.device, operand.position)

    if input.layout.partial:
        input = reduced(input, reduce_into_field(input.layout, range(input.ndim - weight.ndim + 2, input.ndim)))
    weight = reduced(weight, weight.layout.with_partial(()))
    return input, weight, bias if bias is None else reduced(bias, bias.layout.with_partial(()))


def unmerge_operand(operand: Operand) -> Operand:
    """Return the operand in the layout it is redistributed to: one without merged dims."""
    return Operand(unmerge_dims(operand.layout), operand.dtype, operand.device, operand.position)


def plan_pointwise(input: Operand, weight: Operand, bias: Operand | None, fn: Callable) -> Plan:
    """Plan a 1x1 convolution: it mixes channels only, so spatial dims may be sharded in any way, also merged."""
    mesh = input.layout.mesh
    targets = {"input": input.layout, "weight": Layout.replicate(mesh, weight.shape)}
    if bias is not None:
        targets["bias"] = Layout.replicate(mesh, bias.shape)

    def local(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.numel():
            return fn(input, weight, bias)
        out = torch.einsum("oi,bi...->bo...", weight.flatten(1), input)  # conv kernels refuse empty shards
        return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * (input.ndim - 2))

    return Plan(local=local, operands=targets, layout=input.layout.with_dim(1, DimSharding(weight.shape[0])))


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", partial=True)
def conv_transpose(
    input: Operand, weight: Operand, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1, *, fn
):
    """Exchange a halo of the inputs that contribute to outputs of another rank."""
    input, weight, bias = reduce_operands(input, weight, bias)
    validate(fn, input, weight, bias, stride, padding, output_padding, groups, dilation)
    nd = weight.ndim - 2
    out = probe(fn, input, weight, bias, stride, padding, output_padding, groups, dilation, meta=True).shape[-nd:]
    call = ConvArgs(to_ntuple(stride, nd), to_ntuple(dilation, nd), True, groups)
    args = (stride, padding, output_padding, groups, dilation)
    return plan_conv(input, weight, bias, call, to_ntuple(padding, nd), out, partial(bind_call, fn, args))


@composed("convolution")
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """Call conv or conv_transpose of the weight's number of spatial dims."""
    nd = weight.ndim - 2
    zeros = (0,) * nd
    # Autocast of the CPU casts operands of conv2d, but not of convolution.
    ones = [None if t is None else stand_in(t, [1] * t.ndim) for t in (input, weight, bias)]
    dtype = probe(torch.convolution, *ones, (1,) * nd, zeros, (1,) * nd, transposed, zeros, 1).dtype
    with autocast_disabled(input) if dtype == input.dtype else nullcontext():
        if transposed:
            return CONV_TRANSPOSE[nd](input, weight, bias, stride, padding, output_padding, groups, dilation)
        return CONV[nd](input, weight, bias, stride, padding, dilation, groups)


def validate(fn: Callable, input: Operand, weight: Operand, bias: Operand | None, *args: Any) -> None:
    """Raise torch's errors on all ranks. A rank with an empty shard calls no kernel and would not raise otherwise."""
    if weight.ndim < 3:
        raise RuntimeError(f"{fn.__name__}: weight should have at least three dimensions")
    if not isinstance(args[1], str) and min(to_ntuple(args[1], weight.ndim - 2)) < 0:
        raise RuntimeError(f"{fn.__name__}: negative padding is not supported")
    out = probe(fn, input, weight, bias, *args, meta=True).shape
    if min(out[2 - weight.ndim :]) < 1:  # before torch 2.13 only the kernel raises this error, not the meta function
        raise RuntimeError(f"{fn.__name__}: the kernel {tuple(weight.shape[2:])} is larger than the padded input")
    dtypes = {t.dtype for t in (input, weight, bias) if t is not None}
    autocast = torch.is_autocast_enabled(input.device.type) and dtypes.issubset(AUTOCAST_DTYPES)
    if len(dtypes) > 1 and not autocast:
        raise RuntimeError(
            f"{fn.__name__}: input, weight and bias should have one dtype, not {sorted(map(str, dtypes))}"
        )


class ChannelPlan:
    """Sharding of the channels of input, weight, bias and result, and the channel groups of this rank."""

    def __init__(self, layout: Layout, weight: Layout, groups: int, transposed: bool):
        axis_in = 0 if transposed else 1  # the weight's dim of input channels
        out = weight.shape[1] * groups if transposed else weight.shape[0]
        (sharding,) = layout.dims[1]
        self.input, self.weight = layout, Layout.replicate(layout.mesh, weight.shape)
        self.bias = Layout.replicate(layout.mesh, (out,))
        self.result: DimSharding = DimSharding(out)
        self.partial: tuple[int, ...] = ()
        self.narrow: tuple[int, int, int] | None = None  # this rank's slice of a replicated weight
        self.groups = groups
        if layout.is_sharded(1) and groups == 1:
            self.partial = sharding.axes
            start, stop = layout.span(1)
            if weight.dims[axis_in] == (sharding,) and not weight.axes_of(1 - axis_in):
                self.weight = weight.unshard(range(2, weight.ndim))  # sharded as needed already
            else:
                self.narrow = (axis_in, start, stop - start)
        elif layout.is_sharded(1):
            channels_per_group = sharding.size // groups
            bounds = [
                (start + channels_per_group // 2) // channels_per_group
                for start in (*starts(sharding.shard_sizes), sharding.size)
            ]
            groups_per_rank = [b - a for a, b in pairwise(bounds)]
            self.input = layout.with_dim(
                1, DimSharding(sharding.size, sharding.axes, tuple(n * channels_per_group for n in groups_per_rank))
            )
            self.result = DimSharding(out, sharding.axes, tuple(n * (out // groups) for n in groups_per_rank))
            coord = layout.index(sharding.axes)
            self.groups = groups_per_rank[coord]
            rows = weight.shape[0] // groups
            self.narrow = (0, bounds[coord] * rows, groups_per_rank[coord] * rows)
            self.bias = Layout.make(layout.mesh, [(self.result,)])
        elif groups == 1 and self._uses_free_axes(layout, weight, 1 - axis_in):
            self.weight = weight.unshard([axis_in, *range(2, weight.ndim)])
            (self.result,) = weight.dims[1 - axis_in]
            self.bias = Layout.make(layout.mesh, [(self.result,)])

    @staticmethod
    def _uses_free_axes(layout: Layout, weight: Layout, dim: int) -> bool:
        """Return whether the weight's output channels are sharded over axes that do not shard the input."""
        return weight.is_sharded(dim) and not set(weight.axes_of(dim)) & set(layout.shard_axes)


def spread_channels(layout: Layout, outputs: int) -> Layout:
    """Return the layout of an input whose channels are sharded, or one with their sharding moved to another dim.

    Sharded channels make the result Partial. With `outputs` elements for each sample, it may be larger than the shard
    of the input; then the input is exchanged instead. The axis goes to the dim that it sharded before, to the samples,
    or to the largest spatial dim.
    """
    axes, shards = layout.axes_of(1), math.prod(layout.mesh.size(a) for a in layout.shard_axes)
    parts = math.prod(layout.mesh.size(a) for a in axes)
    elements = layout.shape[0] * outputs * parts // shards  # of the result, on a rank
    if len(axes) > 1 or elements < runtime.active.min_scattered or elements <= layout.numel // shards:
        return layout
    former = layout.former_shardings.get(frozenset(axes))
    if former is not None and former[0] != 1:
        return layout.unshard([1]).with_dim(*former)
    free = [d for d in range(layout.ndim) if d != 1 and not layout.axes_of(d) and layout.shape[d] >= parts]
    if not free:
        return layout
    dim = max(free, key=lambda d: (d == 0 and layout.shape[0] % parts == 0, d != 0, layout.shape[d]))
    return layout.unshard([1]).with_dim(dim, DimSharding(layout.shape[dim], axes, balanced(layout.shape[dim], parts)))


def bind_call(fn: Callable, args: tuple, with_bias: bool) -> Callable:
    """Return torch's function with all arguments bound that are not tensors."""
    if with_bias:
        return lambda input, weight, bias: fn(input, weight, bias, *args)
    return lambda input, weight: fn(input, weight, None, *args)


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
    """Plan the operand layouts, the halo exchange and the local convolution."""
    nd = weight.ndim - 2
    batched = input.ndim == nd + 2
    layout = input.layout if batched else input.layout.insert(0)
    layout = shard_by_one_axis(layout, range(2, nd + 2), last=1)  # sharded channels would leave partial sums
    if layout.is_sharded(1) and call.groups == 1 and weight.layout.is_replicated:
        layout = spread_channels(layout, weight.shape[1 if call.transposed else 0] * math.prod(out))
    channels = ChannelPlan(layout, weight.layout, call.groups, call.transposed)
    layout = channels.input
    boundaries = dim_paddings_of(layout, pre_pad)
    zero_pads = {d: boundaries.pop(d) for d, pad in list(boundaries.items()) if pad.mode == "constant"}
    windows = {}
    dims = zip(out, weight.shape[2:], call.stride, before, call.dilation, strict=True)
    for dim, (o, k, s, p, d) in enumerate(dims, 2):
        size, pad = layout.shape[dim], p + zero_pads[dim].before if dim in zero_pads else p
        size += boundaries[dim].before + boundaries[dim].after if dim in boundaries else 0
        windows[dim] = Window(size, o, k, s, pad, d, call.transposed)
    halo_plan = HaloPlan(layout, windows, boundaries)
    result = halo_plan.result(layout).with_dim(1, channels.result).with_partial(channels.partial)
    # The gradient of a replicated weight is reduced by the convolution itself, which overlaps it with the block's work.
    reduces_grads = channels.narrow is None and not channels.partial
    grad_axes = {*layout.shard_axes, *result.shard_axes} - set(channels.weight.shard_axes)
    grad_groups = process_groups(layout, sorted(grad_axes)) if reduces_grads else ()
    nonempty = [layout.dims[0], layout.dims[1], *result.dims[1:2]]
    all_nonempty = all(n for (sharding,) in nonempty for n in shard_sizes_of(sharding)) and 0 not in weight.shape
    targets = {"input": layout if batched else layout.drop_dims([0]), "weight": channels.weight}
    if bias is not None:
        targets["bias"] = channels.bias
    out_layout = result if batched else result.drop_dims([0])
    half = input.dtype in HALF_DTYPES or torch.is_autocast_enabled(input.device.type)
    narrow_half = half and is_narrow(input.shape[-nd:], out, weight.shape[2:], call.stride, call.dilation)
    spatial = any(layout.is_sharded(d) for d in range(2, nd + 2))
    if reduces_grads and all_nonempty and not pre_pad and not spatial and not narrow_half:
        return Plan(local=native(bias is not None), operands=targets, layout=out_layout)
    call = call._replace(groups=channels.groups)
    halo_conv: HaloConv | PaddedConv | None = None
    if all_nonempty and not pre_pad and not input.dtype.is_complex:
        halo_conv = plan_padded_conv(layout, halo_plan, call, before, grad_groups, input.dtype, input.device)
    if halo_conv is None:
        # With a boundary condition the first and the last rank read padding cells that no rank sends.
        halo_conv = HaloConv(call, halo_plan, grad_groups, all_nonempty and not boundaries)
    has_bias = all(layout.coords[a] == 0 for a in channels.partial)
    narrow = channels.narrow

    def local(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):  # before the exchange, so that the halo is sent in lower precision
            dtype = torch.get_autocast_dtype(device)
            input, weight, bias = (
                t.to(dtype) if t is not None and t.dtype in AUTOCAST_DTYPES else t for t in (input, weight, bias)
            )
        if narrow is not None:
            weight = weight.narrow(*narrow)
        if bias is not None and not has_bias:
            bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool), 0)  # only one partial sum includes it
        if batched:
            return halo_conv.convolve(input, weight, bias)
        return halo_conv.convolve(input.unsqueeze(0), weight, bias).squeeze(0)

    own_reduction = ("weight", "bias") if reduces_grads else ()
    return Plan(local=local, operands=targets, layout=out_layout, complete_grads=own_reduction)


def plan_padded_conv(
    layout: Layout,
    halo_plan: HaloPlan,
    call: ConvArgs,
    before: Sequence[int],
    grad_groups: Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> PaddedConv | None:
    """Plan one convolution of the block joined with its halo; None if that is impossible or slower than overlapping."""
    windows = halo_plan.windows
    if call.transposed or not halo_plan.ranges:
        return None
    padding = []
    for (dim, window), pad in zip(windows.items(), before, strict=True):
        symmetric = (window.size + 2 * pad - window.reach - 1) // window.stride + 1 == window.out
        if not layout.is_sharded(dim) and not symmetric:
            return None  # torch pads both sides of an unsharded dim equally
        padding.append(0 if layout.is_sharded(dim) else pad)
    largest = [max(layout.shard_sizes(d)) if len(layout.dims[d]) == 1 else layout.shape[d] for d in range(layout.ndim)]
    block_bytes = math.prod(largest) * dtype.itemsize
    rows = {d: max(windows[d].reach - windows[d].stride, 1) for d in halo_plan.ranges}
    halo_bytes = max(block_bytes // max(largest[d], 1) * n for d, n in rows.items())
    if not prefers_joining(device.type, block_bytes, halo_bytes, len(halo_plan.ranges)):
        return None
    block_plan = PaddedBlockPlan(layout, windows)
    out = [stop - start for start, stop in block_plan.owned.values()]
    any_empty = any(0 in shard_sizes_of(sharding) for sharding in block_plan.out_shardings.values())
    at_once = not any_empty and not prefers_overlap(device.type, block_bytes, halo_bytes)
    return PaddedConv(call, block_plan.steps, padding, out, grad_groups, at_once)
