"""Exchange one wide halo for a run of convolutions instead of one per layer: fewer messages, some redundant work.

If messages are slow and shards are wide, it pays to fetch the receptive field of a run of layers at once, and to
compute the rows near a shard boundary on both sides. The result is exact: every layer pads the field with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from .. import runtime
from ..comm import autograd_collectives
from ..comm.halo import Halo
from ..dispatch.plan import process_groups
from ..layout import DimSharding, Layout, Span, shard_sizes_of
from ..ops.stencil.conv import resolve_padding, to_ntuple
from ..ops.stencil.conv_local import ConvArgs, make_local_conv, run_local_conv
from ..ops.stencil.halo_plan import is_subspan
from ..ops.stencil.window import Window, shard_spans
from ..tensor import ShardTensor, wrap

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POINTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Identity)


def halo_blocks(model: nn.Module, redundancy: float = 0.1) -> nn.Module:
    """Run the convolutions (and activations between them) of every nn.Sequential in `model` on shared halos.

    A run is as long as possible with redundant work below the fraction `redundancy`. Parameters, names and results do
    not change, nor do calls with plain tensors. Returns the model.

        model = halo_blocks(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1)))
    """
    install_halo_blocks(model.modules(), redundancy)
    return model


def install_halo_blocks(modules: Iterable[nn.Module], redundancy: float, only_if_fewer_bytes: bool = False) -> None:
    """Run all nn.Sequential among the modules, without a forward of their own, on shared halos.

    only_if_fewer_bytes: only if the shared halo has at most the bytes of the layers' separate halos.
    """
    for module in modules:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = partial(
                    halo_block_forward, module, redundancy=redundancy, only_if_fewer_bytes=only_if_fewer_bytes
                )


def halo_block_forward(layers: nn.Sequential, input: Any, redundancy: float, only_if_fewer_bytes: bool) -> Any:
    """Run an nn.Sequential on shared halos."""
    left = list(layers)
    while left:
        run = _fusable_layers(left) if isinstance(input, ShardTensor) else []
        value = input._unmerged_value() if run else input
        count = _count_fused(value._layout, tuple(map(_conv_shape, run)), redundancy, only_if_fewer_bytes) if run else 0
        if count:
            input = _run_fused(value, run[:count])
        else:
            count, input = 1, left[0](input)
        left = left[count:]
    return input


class ConvShape(NamedTuple):
    """The arguments of a convolution that determine its output shape. A pointwise layer has None."""

    channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]
    dilation: tuple[int, ...]

    def window(self, i: int, size: int) -> Window:
        out = (size + 2 * self.padding[i] + self.extra[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[
            i
        ]
        return Window(size, out + 1, self.kernel[i], self.stride[i], self.padding[i], self.dilation[i])


def _fusable_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the leading layers that are zero-padded convolutions or pointwise."""
    found = []
    for layer in layers:
        hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        zero = (
            type(layer) in CONVS
            and layer.padding_mode == "zeros"
            and not isinstance(layer.weight, (ShardTensor, DTensor))
        )
        if hooked or not (zero or type(layer) in POINTWISE):
            break
        found.append(layer)
    return found


def _conv_shape(layer: Any) -> ConvShape | None:
    if not isinstance(layer, CONVS):
        return None
    nd = len(layer.kernel_size)
    before = resolve_padding(layer.padding, layer.kernel_size, to_ntuple(layer.dilation, nd))
    extra = [0] * nd
    if layer.padding == "same":  # an even window is padded by one cell more at the end
        extra = [d * (k - 1) % 2 for d, k in zip(to_ntuple(layer.dilation, nd), layer.kernel_size, strict=True)]
    args = (layer.kernel_size, to_ntuple(layer.stride, nd), before, extra, to_ntuple(layer.dilation, nd))
    return ConvShape(layer.out_channels, *(tuple(v) for v in args))


class DimRanges(NamedTuple):
    """The plan of a run along one dim.

    windows: one per layer. needed: per layer, the outputs that each coord computes. owned: shard sizes of the result.
    read: the input range of each coord.
    """

    windows: tuple[Window, ...]
    needed: tuple[tuple[Span, ...], ...]
    owned: tuple[int, ...]
    read: tuple[Span, ...]

    @property
    def work_ratio(self) -> float:
        """The work of the busiest coord, relative to its work without redundancy."""
        own = [1, *(n for n in self.owned if n)]
        widest = [max(stop - start for start, stop in spans_) for spans_ in self.needed]
        return sum(widest) / (max(own) * len(widest) or 1)


@lru_cache(maxsize=1024)
def _dim_ranges(lengths: tuple[int, ...], shapes: tuple[ConvShape, ...], i: int) -> DimRanges | None:
    windows, shardings = [], [lengths]
    for shape in shapes:
        window = shape.window(i, sum(shardings[-1]))
        if window.out < 1:
            return None
        windows.append(window)
        shardings.append(window.owned(shardings[-1]))
    needed = [tuple(shard_spans(shardings[-1]))]
    for window in reversed(windows):
        needed.append(tuple(window.input_range(*span) for span in needed[-1]))
    *made, read = needed
    return DimRanges(tuple(windows), tuple(reversed(made)), shardings[-1], read)


@runtime.memo
def _count_fused(layout: Layout, shapes: tuple[ConvShape | None, ...], redundancy: float, lean: bool) -> int:
    """Return the number of layers to run on one halo: 0 if it does not pay, or if channels are sharded."""
    convs = [shape for shape in shapes if shape]
    if not convs or layout.ndim != len(convs[0].kernel) + 2 or layout.is_sharded(1):
        return 0
    if not layout.sharded_dims or any(
        len(layout.nontrivial_axes(layout.axes_of(d))) > 1 for d in range(2, layout.ndim)
    ):
        return 0
    best = number = 0
    for at, shape in enumerate(shapes, 1):
        if shape is None:
            continue
        number += 1
        work = 1.0
        for dim in layout.sharded_dims:
            found = _dim_ranges(layout.shard_sizes(dim), tuple(convs[:number]), dim - 2) if dim > 1 else None
            if dim > 1 and found is None:
                return best
            work *= found.work_ratio if found else 1.0
        if number > 1 and (work - 1 > redundancy or (lean and not _sends_fewer_bytes(layout, convs[:number]))):
            break
        best = at if number > 1 else best
    return best


def _sends_fewer_bytes(layout: Layout, convs: Sequence[ConvShape]) -> bool:
    """Return whether one halo of the first layer's input has at most the bytes of the halos of all layers."""
    channels, thickness, each_alone = layout.shape[1], 0, 0
    for shape in convs:
        cells = sum((shape.kernel[d - 2] - 1) * shape.dilation[d - 2] for d in layout.sharded_dims if d > 1)
        thickness, each_alone = thickness + cells, each_alone + cells * channels
        channels = shape.channels
    return thickness * layout.shape[1] <= each_alone


def _run_fused(input: Any, layers: Sequence[nn.Module]) -> Any:
    """Exchange one halo, then run the layers; each of them computes the range that the next ones need."""
    layout, block = input._layout, input._local_tensor
    convs: list[Any] = [layer for layer in layers if isinstance(layer, CONVS)]
    shapes = [shape for shape in map(_conv_shape, convs) if shape]
    result = layout.with_dim(1, DimSharding(convs[-1].out_channels))
    held, ranges = [], []
    for dim in range(2, layout.ndim):
        (factor,) = layout.dims[dim]
        found = _dim_ranges(shard_sizes_of(factor), tuple(shapes), dim - 2)
        assert found is not None
        at = layout.index(factor.axes)
        start, stop = shard_spans(shard_sizes_of(factor))[at]
        if layout.is_sharded(dim):
            (axis,) = layout.nontrivial_axes(factor.axes)
            if any(not is_subspan(r, s) for r, s in zip(found.read, shard_spans(shard_sizes_of(factor)), strict=True)):
                ranges_read, group = found.read, layout.mesh.get_group(axis)
                halo = Halo.plan(dim, shard_sizes_of(factor), ranges_read.__getitem__, layout.coords[axis], group)
                block = halo.with_halo(block)
                start, stop = start - halo.before, stop + halo.after
        held.append(Span(start, stop))
        ranges.append((found, at))
        result = result.with_dim(dim, DimSharding(sum(found.owned), factor.axes, found.owned if factor.axes else ()))
    parameters = [p for conv in convs for p in (conv.weight, conv.bias) if p is not None]
    entered = iter(autograd_collectives.replicate_in(parameters, process_groups(layout, layout.shard_axes)))
    number = 0
    for layer in layers:
        if not isinstance(layer, CONVS):
            block = layer(block)
            continue
        weight, bias = next(entered), next(entered) if layer.bias is not None else None
        outs = [found.needed[number][at] for found, at in ranges]
        call = ConvArgs(shapes[number].stride, shapes[number].dilation, False, layer.groups)
        box = make_local_conv([found.windows[number] for found, _ in ranges], held, outs)
        block = run_local_conv(call, box, [stop - start for start, stop in outs], block, weight, bias)
        held, number = outs, number + 1
    return wrap(block, result)
