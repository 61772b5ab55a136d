"""Local work of a sharded convolution: convolve the rank's own block while the halo is in flight, then add the halo.

A convolution is linear in its input. A rank therefore convolves its own block, padded with zeros, and adds the
contribution of each halo when it arrives. The block is never copied to join it with its halo.
Backward: the gradients of the halos are sent first, and the gradients of block, weight and bias are computed while
they are in flight. The sums of the weight's and the bias' gradients overlap the gradient of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm import adjoints, autograd_collectives, collectives, grad_deferral
from ...comm.autograd_collectives import Groups
from ...comm.halo import add_to_earlier_halos
from ...layout import Span, shard_sizes_of
from .half_conv import in_fp32, is_narrow, may_be_wrong
from .halo_plan import HaloPlan
from .window import Tile, Window, shard_spans

AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # autocast converts these to one dtype
CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
CONV_TRANSPOSE = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def is_empty(block: Tensor, weight: Tensor) -> bool:
    """Return whether this rank has no samples or no channels, which torch's convolutions refuse."""
    return not block.shape[0] or not weight.numel()


class ConvArgs(NamedTuple):
    """Arguments shared by all local convolutions of one call."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        zeros = (0,) * len(self.stride)
        if not input.is_complex():
            args = (self.stride, padding, self.dilation, self.transposed, zeros, self.groups)
            if may_be_wrong(input) and self.is_narrow(input, weight, padding):
                return in_fp32(lambda *tensors: torch.convolution(*tensors, *args), input, weight, bias)
            return torch.convolution(input, weight, bias, *args)
        if self.transposed:
            call = CONV_TRANSPOSE[len(zeros)]
            return call(input, weight, bias, self.stride, padding, zeros, self.groups, self.dilation)
        return CONV[len(zeros)](input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def grads(
        self, grad: Tensor, input: Tensor, weight: Tensor, bias: Any, padding: Sequence[int], needs_grad: list[bool]
    ):
        """Return the gradients of `run` with respect to input, weight and bias; None where `needs_grad` is False."""
        zeros = (0,) * len(self.stride)
        args = (self.stride, padding, self.dilation, self.transposed, zeros, self.groups)
        backward = torch.ops.aten.convolution_backward.default
        if may_be_wrong(input) and self.is_narrow(input, weight, padding):
            return in_fp32(lambda *tensors: backward(*tensors, bias, *args, needs_grad), grad, input, weight)
        return backward(grad, input, weight, bias, *args, needs_grad)

    def out_sizes(self, sizes: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> list[int]:
        """Return the spatial sizes of the result."""
        out = []
        for n, k, stride, pad, dilation in zip(sizes, kernel, self.stride, padding, self.dilation, strict=True):
            reach = (k - 1) * dilation
            if self.transposed:
                out.append((n - 1) * stride - 2 * pad + reach + 1)
            else:
                out.append((n + 2 * pad - reach - 1) // stride + 1)
        return out

    def is_narrow(self, input: Tensor, weight: Tensor, padding: Sequence[int]) -> bool:
        """Return whether input or output are narrow along some dim (see `half_conv`)."""
        sizes, kernel = input.shape[2:], weight.shape[2:]
        return is_narrow(sizes, self.out_sizes(sizes, kernel, padding), kernel, self.stride, self.dilation)


def needs_no_halo(window: Window, shard_sizes: Sequence[int], out_sizes: Sequence[int]) -> bool:
    """Return whether every shard contains all the inputs that its outputs read."""
    owned = shard_spans(out_sizes)
    tiles = [
        window.tile(start, stop - start, *out)
        for (start, stop), out in zip(shard_spans(shard_sizes), owned, strict=True)
    ]
    return all(t is not None and t.number == stop - start for t, (start, stop) in zip(tiles, owned, strict=True))


class LocalConv:
    """One local convolution: the cells and kernel taps it reads, and the region of the rank's outputs it adds to.

    Its input is the rank's own block, or one side of a halo.
    """

    def __init__(self, tiles: Sequence[Tile], taps: Sequence[tuple[int, int]], out: Sequence[int]):
        self.tiles, self.taps, self.out = tiles, taps, out
        self.padding = tuple(t.padding for t in tiles)
        self.covers_output = all(t.number == n for t, n in zip(tiles, out, strict=True))

    def _narrow_spatial(self, tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
        for dim, (start, length) in enumerate(ranges, 2):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def crop_input(self, block: Tensor) -> Tensor:
        """Return the cells of `block` that the convolution reads."""
        return self._narrow_spatial(block, [(t.start, t.length) for t in self.tiles])

    def crop_kernel(self, weight: Tensor) -> Tensor:
        """Return the taps of the kernel that read the input."""
        return self._narrow_spatial(weight, self.taps)

    def crop_output(self, result: Tensor) -> Tensor:
        """Return the results that belong to the rank's outputs."""
        return self._narrow_spatial(result, [(t.skip, t.number) for t in self.tiles])

    def output_region(self, out: Tensor) -> Tensor:
        """Return the view of the rank's outputs that the results are added to."""
        return self._narrow_spatial(out, [(t.out_start, t.number) for t in self.tiles])

    def output_margins(self) -> list[int]:
        """Return the number of outputs around the output region, in the order of F.pad."""
        margins = [(t.out_start, n - t.out_start - t.number) for t, n in zip(self.tiles, self.out, strict=True)]
        return [n for pair in reversed(margins) for n in pair]

    def scatter_grad(self, grad: Tensor, spatial: Sequence[int]) -> Tensor:
        """Return the gradient of all results, of shape `spatial`: the adjoint of cropping and placing them."""
        grad = self.output_region(grad)
        if tuple(grad.shape[2:]) == tuple(spatial):
            return grad
        full = grad.new_zeros(*grad.shape[:2], *spatial)
        self.crop_output(full).copy_(grad)
        return full


def make_local_conv(windows: Sequence[Window], held: Sequence[Span], owned: Sequence[Span]) -> LocalConv | None:
    """Plan the contribution of inputs `held` to outputs `owned`; None if these outputs read none of these inputs."""
    tiles, taps = [], []
    for window, (start, stop), (first, last) in zip(windows, held, owned, strict=True):
        tile = window.tile(start, stop - start, first, last)
        if tile is None:
            return None
        begin, number = window.taps(start, stop - start, first + tile.out_start, first + tile.out_start + tile.number)
        if not number:  # the inputs fall between the taps of a dilated window
            return None
        tile = window.sub_window(begin, number).tile(start, stop - start, first, last)
        if tile is None:  # the inputs fall between the windows of a stride larger than the kernel
            return None
        tiles.append(tile)
        taps.append((begin, number))
    return LocalConv(tiles, taps, [last - first for first, last in owned])


def run_local_conv(
    call: ConvArgs, local_conv: LocalConv | None, out: Sequence[int], block: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the contribution of one block to the rank's outputs, of spatial shape `out`. Differentiable."""
    if local_conv is not None and local_conv.covers_output and not is_empty(block, weight):
        return local_conv.crop_output(
            call.run(local_conv.crop_input(block), local_conv.crop_kernel(weight), bias, local_conv.padding)
        )
    result = block.new_zeros(block.shape[0], out_channels(call, weight), *out)
    # Keep block and weight in the graph: every rank's backward must reach the same collectives.
    result = result + (block.reshape(-1)[:0, None] * weight.reshape(-1)[None, :0]).sum()
    if bias is not None:
        result = result + bias.view(-1, *[1] * len(out))
    if local_conv is None or is_empty(block, weight):
        return result
    return result + F.pad(
        local_conv.crop_output(
            call.run(local_conv.crop_input(block), local_conv.crop_kernel(weight), None, local_conv.padding)
        ),
        local_conv.output_margins(),
    )


def out_channels(call: ConvArgs, weight: Tensor) -> int:
    """Return the number of output channels."""
    return weight.shape[1] * call.groups if call.transposed else weight.shape[0]


def _replicate_params(weight: Tensor, bias: Tensor | None, groups: Groups) -> tuple[Tensor, Tensor | None]:
    if bias is None:
        return autograd_collectives.replicate_in([weight], groups)[0], None
    weight, bias = autograd_collectives.replicate_in([weight, bias], groups)
    return weight, bias


class HaloConv:
    """Convolution of one rank, as a sum of local convolutions.

    One is of the rank's own block. For each halo, one is of the rows before the block and one of the rows after it.
    The gradients of weight and bias are all-reduced over `grad_groups` while the gradient of the block is computed.
    `all_nonempty`: every rank has samples and channels.
    """

    def __init__(self, call: ConvArgs, halo_plan: HaloPlan, grad_groups: Groups, all_nonempty: bool):
        self.call, self.halos, self.grad_groups = call, halo_plan.halos, grad_groups
        # True only if one local call is enough on every rank: the two paths issue different collectives.
        self.is_local = (
            all_nonempty
            and not self.halos
            and all(
                needs_no_halo(window, shard_sizes_of(sharding), shard_sizes_of(halo_plan.out_shardings[dim]))
                for dim, window in halo_plan.windows.items()
                for sharding in halo_plan.layout.dims[dim]
            )
        )
        self.windows = list(halo_plan.windows.values())
        held, owned = list(halo_plan.held.values()), list(halo_plan.owned.values())
        self.out = tuple(stop - start for start, stop in owned)
        self.own_block = make_local_conv(self.windows, held, owned)
        self.halo_parts: list[list[tuple[tuple[int, int], LocalConv]]] = []
        spans = list(held)  # the cells held so far: each halo spans the halos of the earlier dims (corners)
        for halo in self.halos:
            start, stop = held[halo.dim - 2]
            sides = []
            for rows, first in (((0, halo.before), start - halo.before), ((halo.before, halo.after), stop)):
                spans[halo.dim - 2] = Span(first, first + rows[1])
                local_conv = make_local_conv(self.windows, spans, owned)
                if local_conv is not None:
                    sides.append((rows, local_conv))
            self.halo_parts.append(sides)
            spans[halo.dim - 2] = Span(start - halo.before, stop + halo.after)
        self.with_halo = halo_plan.with_halo
        self.padded_block = make_local_conv(self.windows, spans, owned)

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the rank's outputs."""
        if block.is_complex():
            return self.convolve_padded(block, weight, bias, self.grad_groups)
        if self.is_local:
            return run_local_conv(
                self.call, self.own_block, self.out, block, *_replicate_params(weight, bias, self.grad_groups)
            )
        params = [weight] if bias is None else [weight, bias]
        params, groups = grad_deferral.defer_sums(params, self.grad_groups)
        return _HaloConvFunction.apply(self, groups, block, params[0], None if bias is None else params[1])

    def convolve_padded(self, block: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        """Return the rank's outputs by joining block and halo first: differentiable calls only, for double backward."""
        block = self.with_halo(block)
        weight, bias = _replicate_params(weight, bias, groups)
        return run_local_conv(self.call, self.padded_block, self.out, block, weight, bias)

    # ------------------------------------------------------------------ forward and backward of the autograd node

    def forward(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs and the received halos."""
        pending = self.halos[0].start(block, []) if self.halos else None
        nonempty = not is_empty(block, weight)
        if self.own_block is not None and self.own_block.covers_output and nonempty:
            out = self.own_block.crop_output(
                self.call.run(
                    self.own_block.crop_input(block), self.own_block.crop_kernel(weight), bias, self.own_block.padding
                )
            )
        else:
            out = block.new_zeros(block.shape[0], out_channels(self.call, weight), *self.out)
            if bias is not None:
                out += bias.view(-1, *[1] * len(self.out))
            if self.own_block is not None and nonempty:
                self._add(out, self.own_block, block, weight)
        received: list[Tensor] = []
        for i, sides in enumerate(self.halo_parts):
            assert pending is not None
            received.append(pending.wait())
            if i + 1 < len(self.halos):
                pending = self.halos[i + 1].start(block, list(zip(self.halos, received, strict=False)))
            for rows, local_conv in sides if nonempty else ():
                self._add(out, local_conv, received[i].narrow(self.halos[i].dim, *rows), weight)
        return out, received

    def _add(self, out: Tensor, local_conv: LocalConv, block: Tensor, weight: Tensor) -> None:
        crop, kernel = local_conv.crop_input(block), local_conv.crop_kernel(weight)
        result = local_conv.crop_output(self.call.run(crop, kernel, None, local_conv.padding))
        local_conv.output_region(out).add_(result)

    def backward(
        self,
        grad: Tensor,
        block: Tensor,
        received: Sequence[Tensor],
        weight: Tensor,
        needs_grad: Sequence[bool],
        groups: Groups,
    ):
        """Return the gradients of block, weight and bias. Each message is sent as soon as its data is computed."""
        need_block, need_weight, need_bias = needs_grad
        nonempty = bool(grad.numel()) and not is_empty(block, weight)
        weight_grad = torch.zeros_like(weight) if need_weight else None
        halo_grads = [torch.zeros_like(s) for s in received] if need_block else []
        for i, sides in enumerate(self.halo_parts if nonempty else ()):
            for rows, local_conv in sides:
                rows_of_halo = (self.halos[i].dim, *rows)
                grads = self._grads(
                    grad, local_conv, received[i].narrow(*rows_of_halo), weight, [need_block, need_weight, False]
                )
                if need_block:
                    local_conv.crop_input(halo_grads[i].narrow(*rows_of_halo)).add_(grads[0])
                if need_weight:
                    local_conv.crop_kernel(weight_grad).add_(grads[1])

        def start_param_grads() -> collectives.Pending[list[Tensor]]:
            """Start the sums of the gradients of weight and bias over `groups`."""
            param_grads = [weight_grad] if need_weight else []
            if need_weight and nonempty and self.own_block is not None:
                grads = self._grads(grad, self.own_block, block, weight, [False, True, False])
                self.own_block.crop_kernel(weight_grad).add_(grads[1])
            if need_bias:
                param_grads.append(grad.sum([d for d in range(grad.ndim) if d != 1]))
            return autograd_collectives.start_sum(param_grads, groups)

        def own_block_grad() -> Tensor:
            if not nonempty or self.own_block is None:
                return torch.zeros_like(block)
            (crop_grad, *_) = self._grads(grad, self.own_block, block, weight, [True, False, False])
            if crop_grad.shape == block.shape:
                return crop_grad
            full = torch.zeros_like(block)
            self.own_block.crop_input(full).copy_(crop_grad)
            return full

        pending_params = block_grad = None
        returned: list = []
        for i in reversed(range(len(self.halos) if need_block else 0)):
            pending = self.halos[i].start_adjoint(halo_grads[i], block.shape, self.halos[:i])
            pending_params = pending_params or start_param_grads()
            block_grad = own_block_grad() if i == 0 else None
            returned += add_to_earlier_halos(pending.wait(), list(zip(self.halos[:i], halo_grads[:i], strict=True)))
        pending_params = pending_params or start_param_grads()
        if need_block and block_grad is None:
            block_grad = own_block_grad()
        for region, region_grad in returned:
            region.view(block_grad).add_(region_grad)
        summed = iter(pending_params.wait())
        return block_grad, next(summed) if need_weight else None, next(summed) if need_bias else None

    def _grads(self, grad: Tensor, local_conv: LocalConv, block: Tensor, weight: Tensor, needs_grad: list[bool]):
        """Return the gradients of one local convolution with respect to its cropped input and kernel."""
        block, kernel = local_conv.crop_input(block), local_conv.crop_kernel(weight)
        spatial = self.call.out_sizes(block.shape[2:], kernel.shape[2:], local_conv.padding)
        return self.call.grads(
            local_conv.scatter_grad(grad, spatial), block, kernel, None, local_conv.padding, needs_grad
        )


class _HaloConvFunction(adjoints.Collective):
    """One autograd node for a convolution with its halo exchanges.

    Adjoint: the gradients of the halos are sent back to the ranks that own the rows and are added there.
    """

    @staticmethod
    def forward(ctx, halo_conv, groups, block, weight, bias):
        out, received = halo_conv.forward(block, weight, bias)
        ctx.halo_conv, ctx.grad_groups = halo_conv, groups
        ctx.save_for_backward(block, weight, bias, *received)
        return adjoints.detach_view(out)

    @staticmethod
    def backward(ctx, grad):
        block, weight, bias, *received = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[2:]
        if not torch.is_grad_enabled():
            return None, None, *ctx.halo_conv.backward(grad, block, received, weight, needs_grad, ctx.grad_groups)
        # Use views: the block may be a function of the weight, through which gradients would flow twice.
        block, weight, bias = (None if t is None else t.view_as(t) for t in (block, weight, bias))
        inputs = [t for t, needed in zip((block, weight, bias), needs_grad, strict=True) if needed]
        out = ctx.halo_conv.convolve_padded(block, weight, bias, ctx.grad_groups)
        grads = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
        return None, None, *(next(grads) if needed else None for needed in needs_grad)
