"""What one rank does for a convolution: its own block, and the strips that neighbours send.

A convolution is linear in its input, so a rank convolves its own block at once, padded by zeros, and adds what the
strips contribute when they arrive: no block is copied to be widened, and the halo travels while the block is worked
on. Backward is the same: the strips' gradients leave first and land while the block's are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm import autograd_collectives, collectives, grad_deferral
from ...comm.autograd_collectives import Groups
from ...comm.halo import add_to_earlier_halos
from ...layout import Span, shard_sizes_of
from .halo_plan import HaloPlan
from .window import Tile, Window, shard_spans

AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what autocast makes one dtype of
CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
CONV_TRANSPOSE = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def is_empty(block: Tensor, weight: Tensor) -> bool:
    """True where a rank has no samples or no channels: torch's convolutions want some."""
    return not block.shape[0] or not weight.numel()


class ConvArgs(NamedTuple):
    """The arguments that every local convolution of a call shares."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        none = (0,) * len(self.stride)
        if not input.is_complex():
            how = (self.stride, padding, self.dilation, self.transposed, none, self.groups)
            return torch.convolution(input, weight, bias, *how)
        if self.transposed:
            call = CONV_TRANSPOSE[len(none)]
            return call(input, weight, bias, self.stride, padding, none, self.groups, self.dilation)
        return CONV[len(none)](input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def grads(self, grad: Tensor, input: Tensor, weight: Tensor, bias: Any, padding: Sequence[int], wanted: list[bool]):
        """The gradients of `run` with respect to input, weight and bias, those that are wanted."""
        none = (0,) * len(self.stride)
        how = (self.stride, padding, self.dilation, self.transposed, none, self.groups)
        return torch.ops.aten.convolution_backward(grad, input, weight, bias, *how, wanted)


def needs_no_halo(window: Window, lengths: Sequence[int]) -> bool:
    """True if every piece makes all the outputs it owns by itself."""
    owned = shard_spans(window.owned(lengths))
    tiles = [
        window.tile(start, stop - start, *out) for (start, stop), out in zip(shard_spans(lengths), owned, strict=True)
    ]
    return all(t is not None and t.number == stop - start for t, (start, stop) in zip(tiles, owned, strict=True))


class LocalConv:
    """A local convolution of one piece of the input: which part of it, and where in the output its results belong."""

    def __init__(self, tiles: Sequence[Tile], taps: Sequence[tuple[int, int]], out: Sequence[int]):
        self.tiles, self.taps, self.out = tiles, taps, out
        self.padding = tuple(t.padding for t in tiles)
        self.covers_output = all(t.number == n for t, n in zip(tiles, out, strict=True))

    def _narrow_spatial(self, tensor: Tensor, which: Sequence[tuple[int, int]]) -> Tensor:
        for dim, (start, length) in enumerate(which, 2):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def crop_input(self, piece: Tensor) -> Tensor:
        """The cells of a piece that are read."""
        return self._narrow_spatial(piece, [(t.start, t.length) for t in self.tiles])

    def crop_kernel(self, weight: Tensor) -> Tensor:
        """The part of the kernel that meets the piece."""
        return self._narrow_spatial(weight, self.taps)

    def crop_output(self, result: Tensor) -> Tensor:
        """What is wanted of the results."""
        return self._narrow_spatial(result, [(t.skip, t.number) for t in self.tiles])

    def output_region(self, out: Tensor) -> Tensor:
        """Where it belongs in the rank's outputs."""
        return self._narrow_spatial(out, [(t.at, t.number) for t in self.tiles])

    def output_margins(self) -> list[int]:
        """The outputs around the region, as F.pad wants them."""
        both = [(t.at, n - t.at - t.number) for t, n in zip(self.tiles, self.out, strict=True)]
        return [n for pair in reversed(both) for n in pair]

    def scatter_grad(self, grad: Tensor, spatial: Sequence[int]) -> Tensor:
        """The adjoint of keeping and placing: the gradient of all results, `spatial` in number."""
        grad = self.output_region(grad)
        if tuple(grad.shape[2:]) == tuple(spatial):
            return grad
        full = grad.new_zeros(*grad.shape[:2], *spatial)
        self.crop_output(full).copy_(grad)
        return full


def make_local_conv(windows: Sequence[Window], held: Sequence[Span], owned: Sequence[Span]) -> LocalConv | None:
    """The box of a piece that covers `held` among the outputs `owned`; None if it contributes nothing."""
    tiles, taps = [], []
    for window, (start, stop), (first, last) in zip(windows, held, owned, strict=True):
        tile = window.tile(start, stop - start, first, last)
        if tile is None:
            return None
        begin, number = window.taps(start, stop - start, first + tile.at, first + tile.at + tile.number)
        if not number:  # it lies in the gaps of the window
            return None
        tile = window.sub_window(begin, number).tile(start, stop - start, first, last)
        if tile is None:  # its cells lie between those that these outputs look at
            return None
        tiles.append(tile)
        taps.append((begin, number))
    return LocalConv(tiles, taps, [last - first for first, last in owned])


def run_local_conv(
    call: ConvArgs, box: LocalConv | None, out: Sequence[int], piece: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The outputs, `out` in number, that one piece gives by itself. Differentiable."""
    if box is not None and box.covers_output and not is_empty(piece, weight):
        return box.crop_output(call.run(box.crop_input(piece), box.crop_kernel(weight), bias, box.padding))
    made = piece.new_zeros(piece.shape[0], out_channels(call, weight), *out)
    # every rank's graph must lead to the same moves, also where there is nothing to do
    made = made + (piece.reshape(-1)[:0, None] * weight.reshape(-1)[None, :0]).sum()
    if bias is not None:
        made = made + bias.view(-1, *[1] * len(out))
    if box is None or is_empty(piece, weight):
        return made
    return made + F.pad(
        box.crop_output(call.run(box.crop_input(piece), box.crop_kernel(weight), None, box.padding)),
        box.output_margins(),
    )


def out_channels(call: ConvArgs, weight: Tensor) -> int:
    """How many channels come out."""
    return weight.shape[1] * call.groups if call.transposed else weight.shape[0]


def _replicate_params(weight: Tensor, bias: Tensor | None, over: Groups) -> tuple[Tensor, Tensor | None]:
    if bias is None:
        return autograd_collectives.replicate_in([weight], over)[0], None
    weight, bias = autograd_collectives.replicate_in([weight, bias], over)
    return weight, bias


class HaloConv:
    """One rank's part: the box of its own block and, for each strip, of the rows before and behind the block.

    The gradients of weight and bias are summed over the groups `grad_groups`, while that of the block is taken.
    `all_nonempty`: every rank has samples and channels.
    """

    def __init__(self, call: ConvArgs, halo_plan: HaloPlan, grad_groups: Groups, all_nonempty: bool):
        self.call, self.halos, self.grad_groups = call, halo_plan.halos, grad_groups
        # One local call does it, on every rank: all of them must go the same way, or their gradients' sums do not meet.
        self.is_local = (
            all_nonempty
            and not self.halos
            and all(
                needs_no_halo(window, shard_sizes_of(factor))
                for dim, window in halo_plan.windows.items()
                for factor in halo_plan.layout.dims[dim]
            )
        )
        self.windows = list(halo_plan.windows.values())
        held, owned = list(halo_plan.held.values()), list(halo_plan.owned.values())
        self.out = tuple(stop - start for start, stop in owned)
        self.own_block = make_local_conv(self.windows, held, owned)
        self.halo_parts: list[list[tuple[tuple[int, int], LocalConv]]] = []
        box = list(held)
        for halo in self.halos:
            start, stop = held[halo.dim - 2]
            found = []
            for rows, at in (((0, halo.before), start - halo.before), ((halo.before, halo.after), stop)):
                box[halo.dim - 2] = Span(at, at + rows[1])
                made = make_local_conv(self.windows, box, owned)
                if made is not None:
                    found.append((rows, made))
            self.halo_parts.append(found)
            box[halo.dim - 2] = Span(start - halo.before, stop + halo.after)
        self.with_halo = halo_plan.with_halo
        self.padded_block = make_local_conv(self.windows, box, owned)

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The rank's outputs."""
        device = block.device.type
        if torch.is_autocast_enabled(device):  # as torch would, but before the halo travels
            to = torch.get_autocast_dtype(device)
            block, weight, bias = (
                t.to(to) if t is not None and t.dtype in AUTOCAST_DTYPES else t for t in (block, weight, bias)
            )
        if block.is_complex():
            return self.convolve_padded(block, weight, bias, self.grad_groups)
        if self.is_local:
            return run_local_conv(
                self.call, self.own_block, self.out, block, *_replicate_params(weight, bias, self.grad_groups)
            )
        given = [weight] if bias is None else [weight, bias]
        given, over = grad_deferral.defer_sums(given, self.grad_groups)
        return _HaloConvFunction.apply(self, over, block, given[0], None if bias is None else given[1])

    def convolve_padded(self, block: Tensor, weight: Tensor, bias: Tensor | None, over: Groups) -> Tensor:
        """The same by widening the block first: all in differentiable calls, for derivatives of derivatives."""
        block = self.with_halo(block)
        weight, bias = _replicate_params(weight, bias, over)
        return run_local_conv(self.call, self.padded_block, self.out, block, weight, bias)

    # ------------------------------------------------------------------ the parts, without autograd

    def forward(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and the strips that came."""
        pending = self.halos[0].start(block, []) if self.halos else None
        working = not is_empty(block, weight)
        if self.own_block is not None and self.own_block.covers_output and working:
            out = self.own_block.crop_output(
                self.call.run(
                    self.own_block.crop_input(block), self.own_block.crop_kernel(weight), bias, self.own_block.padding
                )
            )
        else:
            out = block.new_zeros(block.shape[0], out_channels(self.call, weight), *self.out)
            if bias is not None:
                out += bias.view(-1, *[1] * len(self.out))
            if self.own_block is not None and working:
                self._add(out, self.own_block, block, weight)
        strips: list[Tensor] = []
        for i, parts in enumerate(self.halo_parts):
            assert pending is not None
            strips.append(pending.wait())
            if i + 1 < len(self.halos):
                pending = self.halos[i + 1].start(block, list(zip(self.halos, strips, strict=False)))
            for rows, box in parts if working else ():
                self._add(out, box, strips[i].narrow(self.halos[i].dim, *rows), weight)
        return out, strips

    def _add(self, out: Tensor, box: LocalConv, piece: Tensor, weight: Tensor) -> None:
        box.output_region(out).add_(
            box.crop_output(self.call.run(box.crop_input(piece), box.crop_kernel(weight), None, box.padding))
        )

    def backward(
        self,
        grad: Tensor,
        block: Tensor,
        strips: Sequence[Tensor],
        weight: Tensor,
        wanted: Sequence[bool],
        over: Groups,
    ):
        """The gradients of block, weight and bias. What must travel leaves as soon as it is known."""
        of_block, of_weight, of_bias = wanted
        working = bool(grad.numel()) and not is_empty(block, weight)
        weight_grad = torch.zeros_like(weight) if of_weight else None
        strip_grads = [torch.zeros_like(s) for s in strips] if of_block else []
        for i, parts in enumerate(self.halo_parts if working else ()):
            for rows, box in parts:
                at = (self.halos[i].dim, *rows)
                made = self._grads(grad, box, strips[i].narrow(*at), weight, [of_block, of_weight, False])
                if of_block:
                    box.crop_input(strip_grads[i].narrow(*at)).add_(made[0])
                if of_weight:
                    box.crop_kernel(weight_grad).add_(made[1])

        def of_parameters() -> collectives.Pending[list[Tensor]]:
            """The gradients of weight and bias, on their way."""
            found = [weight_grad] if of_weight else []
            if of_weight and working and self.own_block is not None:
                made = self._grads(grad, self.own_block, block, weight, [False, True, False])
                self.own_block.crop_kernel(weight_grad).add_(made[1])
            if of_bias:
                found.append(grad.sum([d for d in range(grad.ndim) if d != 1]))
            return autograd_collectives.start_sum(found, over)

        def of_own() -> Tensor:
            if not working or self.own_block is None:
                return torch.zeros_like(block)
            (made, *_) = self._grads(grad, self.own_block, block, weight, [True, False, False])
            if made.shape == block.shape:
                return made
            full = torch.zeros_like(block)
            self.own_block.crop_input(full).copy_(made)
            return full

        parameters = block_grad = None
        returned: list = []
        for i in reversed(range(len(self.halos) if of_block else 0)):
            pending = self.halos[i].start_adjoint(strip_grads[i], block.shape, self.halos[:i])
            parameters = parameters or of_parameters()
            block_grad = of_own() if i == 0 else None
            returned += add_to_earlier_halos(pending.wait(), list(zip(self.halos[:i], strip_grads[:i], strict=True)))
        parameters = parameters or of_parameters()
        if of_block and block_grad is None:
            block_grad = of_own()
        for piece, part in returned:
            piece.view(block_grad).add_(part)
        found = iter(parameters.wait())
        return block_grad, next(found) if of_weight else None, next(found) if of_bias else None

    def _grads(self, grad: Tensor, box: LocalConv, piece: Tensor, weight: Tensor, wanted: list[bool]):
        """The gradients of one piece's convolution with respect to the cells and the kernel it uses."""
        piece, kernel = box.crop_input(piece), box.crop_kernel(weight)
        spatial = []
        for i, n in enumerate(piece.shape[2:]):
            reach = (kernel.shape[i + 2] - 1) * self.call.dilation[i]
            if self.call.transposed:
                spatial.append((n - 1) * self.call.stride[i] - 2 * box.padding[i] + reach + 1)
            else:
                spatial.append((n + 2 * box.padding[i] - reach - 1) // self.call.stride[i] + 1)
        return self.call.grads(box.scatter_grad(grad, spatial), piece, kernel, None, box.padding, wanted)


class _HaloConvFunction(autograd_collectives.Collective):
    """One node for a convolution with its halos. Adjoint: the strips' gradients go back to their rows' owners."""

    @staticmethod
    def forward(ctx, blocks, over, block, weight, bias):
        out, strips = blocks.forward(block, weight, bias)
        ctx.blocks, ctx.grad_groups = blocks, over
        ctx.save_for_backward(block, weight, bias, *strips)
        return autograd_collectives.detach_view(out)

    @staticmethod
    def backward(ctx, grad):
        block, weight, bias, *strips = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if not torch.is_grad_enabled():
            return None, None, *ctx.blocks.backward(grad, block, strips, weight, wanted, ctx.grad_groups)
        chosen = [t for t, want in zip((block, weight, bias), wanted, strict=True) if want]
        out = ctx.blocks.convolve_padded(block, weight, bias, ctx.grad_groups)
        found = iter(torch.autograd.grad(out, chosen, grad, create_graph=True))
        return None, None, *(next(found) if want else None for want in wanted)
