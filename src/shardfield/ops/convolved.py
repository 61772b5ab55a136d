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

from ..comm import defer, moves, wire
from ..comm.fetch import add_back
from ..comm.moves import Groups
from ..layout import Span, pieces
from .cover import Cover
from .window import Tile, Window, spans

CAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast makes one dtype of
PLAIN = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def idle(block: Tensor, weight: Tensor) -> bool:
    """True where a rank has no samples or no channels: torch's convolutions want some."""
    return not block.shape[0] or not weight.numel()


class Call(NamedTuple):
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
            call = TRANSPOSED[len(none)]
            return call(input, weight, bias, self.stride, padding, none, self.groups, self.dilation)
        return PLAIN[len(none)](input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def grads(self, grad: Tensor, input: Tensor, weight: Tensor, bias: Any, padding: Sequence[int], wanted: list[bool]):
        """The gradients of `run` with respect to input, weight and bias, those that are wanted."""
        none = (0,) * len(self.stride)
        how = (self.stride, padding, self.dilation, self.transposed, none, self.groups)
        return torch.ops.aten.convolution_backward(grad, input, weight, bias, *how, wanted)


def alone(window: Window, lengths: Sequence[int]) -> bool:
    """True if every piece makes all the outputs it owns by itself."""
    owned = spans(window.owned(lengths))
    tiles = [window.tile(start, stop - start, *out) for (start, stop), out in zip(spans(lengths), owned, strict=True)]
    return all(t is not None and t.number == stop - start for t, (start, stop) in zip(tiles, owned, strict=True))


class Box:
    """A local convolution of one piece of the input: which part of it, and where in the output its results belong."""

    def __init__(self, tiles: Sequence[Tile], taps: Sequence[tuple[int, int]], out: Sequence[int]):
        self.tiles, self.taps, self.out = tiles, taps, out
        self.padding = tuple(t.padding for t in tiles)
        self.fills = all(t.number == n for t, n in zip(tiles, out, strict=True))

    def _narrowed(self, tensor: Tensor, which: Sequence[tuple[int, int]]) -> Tensor:
        for dim, (start, length) in enumerate(which, 2):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def of(self, piece: Tensor) -> Tensor:
        """The cells of a piece that are read."""
        return self._narrowed(piece, [(t.start, t.length) for t in self.tiles])

    def kernel(self, weight: Tensor) -> Tensor:
        """The part of the kernel that meets the piece."""
        return self._narrowed(weight, self.taps)

    def kept(self, result: Tensor) -> Tensor:
        """What is wanted of the results."""
        return self._narrowed(result, [(t.skip, t.number) for t in self.tiles])

    def region(self, out: Tensor) -> Tensor:
        """Where it belongs in the rank's outputs."""
        return self._narrowed(out, [(t.at, t.number) for t in self.tiles])

    def margins(self) -> list[int]:
        """The outputs around the region, as F.pad wants them."""
        both = [(t.at, n - t.at - t.number) for t, n in zip(self.tiles, self.out, strict=True)]
        return [n for pair in reversed(both) for n in pair]

    def spread(self, grad: Tensor, spatial: Sequence[int]) -> Tensor:
        """The adjoint of keeping and placing: the gradient of all results, `spatial` in number."""
        grad = self.region(grad)
        if tuple(grad.shape[2:]) == tuple(spatial):
            return grad
        full = grad.new_zeros(*grad.shape[:2], *spatial)
        self.kept(full).copy_(grad)
        return full


def box_of(windows: Sequence[Window], held: Sequence[Span], owned: Sequence[Span]) -> Box | None:
    """The box of a piece that covers `held` among the outputs `owned`; None if it contributes nothing."""
    tiles, taps = [], []
    for window, (start, stop), (first, last) in zip(windows, held, owned, strict=True):
        tile = window.tile(start, stop - start, first, last)
        if tile is None:
            return None
        begin, number = window.taps(start, stop - start, first + tile.at, first + tile.at + tile.number)
        if not number:  # it lies in the gaps of the window
            return None
        tile = window.only(begin, number).tile(start, stop - start, first, last)
        if tile is None:  # its cells lie between those that these outputs look at
            return None
        tiles.append(tile)
        taps.append((begin, number))
    return Box(tiles, taps, [last - first for first, last in owned])


def placed(
    call: Call, box: Box | None, out: Sequence[int], piece: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The outputs, `out` in number, that one piece gives by itself. Differentiable."""
    if box is not None and box.fills and not idle(piece, weight):
        return box.kept(call.run(box.of(piece), box.kernel(weight), bias, box.padding))
    made = piece.new_zeros(piece.shape[0], channels(call, weight), *out)
    # every rank's graph must lead to the same moves, also where there is nothing to do
    made = made + (piece.reshape(-1)[:0, None] * weight.reshape(-1)[None, :0]).sum()
    if bias is not None:
        made = made + bias.view(-1, *[1] * len(out))
    if box is None or idle(piece, weight):
        return made
    return made + F.pad(box.kept(call.run(box.of(piece), box.kernel(weight), None, box.padding)), box.margins())


def channels(call: Call, weight: Tensor) -> int:
    """How many channels come out."""
    return weight.shape[1] * call.groups if call.transposed else weight.shape[0]


def _entered(weight: Tensor, bias: Tensor | None, over: Groups) -> tuple[Tensor, Tensor | None]:
    if bias is None:
        return moves.enter([weight], over)[0], None
    weight, bias = moves.enter([weight, bias], over)
    return weight, bias


class Blocks:
    """One rank's part: the box of its own block and, for each strip, of the rows before and behind the block.

    The gradients of weight and bias are summed over the groups `over`, while that of the block is taken. `busy`: every
    rank has samples and channels.
    """

    def __init__(self, call: Call, cover: Cover, over: Groups, busy: bool):
        self.call, self.halos, self.over = call, cover.halos, over
        # One local call does it, on every rank: all of them must go the same way, or their gradients' sums do not meet.
        self.simple = (
            busy
            and not self.halos
            and all(
                alone(window, pieces(factor))
                for dim, window in cover.windows.items()
                for factor in cover.layout.dims[dim]
            )
        )
        self.windows = list(cover.windows.values())
        held, owned = list(cover.held.values()), list(cover.owned.values())
        self.out = tuple(stop - start for start, stop in owned)
        self.own = box_of(self.windows, held, owned)
        self.strips: list[list[tuple[tuple[int, int], Box]]] = []
        box = list(held)
        for halo in self.halos:
            start, stop = held[halo.dim - 2]
            found = []
            for rows, at in (((0, halo.before), start - halo.before), ((halo.before, halo.after), stop)):
                box[halo.dim - 2] = Span(at, at + rows[1])
                made = box_of(self.windows, box, owned)
                if made is not None:
                    found.append((rows, made))
            self.strips.append(found)
            box[halo.dim - 2] = Span(start - halo.before, stop + halo.after)
        self.widen = cover.widen
        self.wide = box_of(self.windows, box, owned)

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The rank's outputs."""
        device = block.device.type
        if torch.is_autocast_enabled(device):  # as torch would, but before the halo travels
            to = torch.get_autocast_dtype(device)
            block, weight, bias = (t.to(to) if t is not None and t.dtype in CAST else t for t in (block, weight, bias))
        if block.is_complex():
            return self.widened(block, weight, bias, self.over)
        if self.simple:
            return placed(self.call, self.own, self.out, block, *_entered(weight, bias, self.over))
        given = [weight] if bias is None else [weight, bias]
        given, over = defer.postponed(given, self.over)
        return _Convolved.apply(self, over, block, given[0], None if bias is None else given[1])

    def widened(self, block: Tensor, weight: Tensor, bias: Tensor | None, over: Groups) -> Tensor:
        """The same by widening the block first: all in differentiable calls, for derivatives of derivatives."""
        block = self.widen(block)
        weight, bias = _entered(weight, bias, over)
        return placed(self.call, self.wide, self.out, block, weight, bias)

    # ------------------------------------------------------------------ the parts, without autograd

    def forward(self, block: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and the strips that came."""
        pending = self.halos[0].start(block, []) if self.halos else None
        working = not idle(block, weight)
        if self.own is not None and self.own.fills and working:
            out = self.own.kept(self.call.run(self.own.of(block), self.own.kernel(weight), bias, self.own.padding))
        else:
            out = block.new_zeros(block.shape[0], channels(self.call, weight), *self.out)
            if bias is not None:
                out += bias.view(-1, *[1] * len(self.out))
            if self.own is not None and working:
                self._add(out, self.own, block, weight)
        strips: list[Tensor] = []
        for i, parts in enumerate(self.strips):
            assert pending is not None
            strips.append(pending.wait())
            if i + 1 < len(self.halos):
                pending = self.halos[i + 1].start(block, list(zip(self.halos, strips, strict=False)))
            for rows, box in parts if working else ():
                self._add(out, box, strips[i].narrow(self.halos[i].dim, *rows), weight)
        return out, strips

    def _add(self, out: Tensor, box: Box, piece: Tensor, weight: Tensor) -> None:
        box.region(out).add_(box.kept(self.call.run(box.of(piece), box.kernel(weight), None, box.padding)))

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
        working = bool(grad.numel()) and not idle(block, weight)
        weight_grad = torch.zeros_like(weight) if of_weight else None
        strip_grads = [torch.zeros_like(s) for s in strips] if of_block else []
        for i, parts in enumerate(self.strips if working else ()):
            for rows, box in parts:
                at = (self.halos[i].dim, *rows)
                made = self._grads(grad, box, strips[i].narrow(*at), weight, [of_block, of_weight, False])
                if of_block:
                    box.of(strip_grads[i].narrow(*at)).add_(made[0])
                if of_weight:
                    box.kernel(weight_grad).add_(made[1])

        def of_parameters() -> wire.Pending[list[Tensor]]:
            """The gradients of weight and bias, on their way."""
            found = [weight_grad] if of_weight else []
            if of_weight and working and self.own is not None:
                made = self._grads(grad, self.own, block, weight, [False, True, False])
                self.own.kernel(weight_grad).add_(made[1])
            if of_bias:
                found.append(grad.sum([d for d in range(grad.ndim) if d != 1]))
            return moves.start_sum(found, over)

        def of_own() -> Tensor:
            if not working or self.own is None:
                return torch.zeros_like(block)
            (made, *_) = self._grads(grad, self.own, block, weight, [True, False, False])
            if made.shape == block.shape:
                return made
            full = torch.zeros_like(block)
            self.own.of(full).copy_(made)
            return full

        parameters = block_grad = None
        returned: list = []
        for i in reversed(range(len(self.halos) if of_block else 0)):
            pending = self.halos[i].give_back(strip_grads[i], block.shape, self.halos[:i])
            parameters = parameters or of_parameters()
            block_grad = of_own() if i == 0 else None
            returned += add_back(pending.wait(), list(zip(self.halos[:i], strip_grads[:i], strict=True)))
        parameters = parameters or of_parameters()
        if of_block and block_grad is None:
            block_grad = of_own()
        for piece, part in returned:
            piece.of(block_grad).add_(part)
        found = iter(parameters.wait())
        return block_grad, next(found) if of_weight else None, next(found) if of_bias else None

    def _grads(self, grad: Tensor, box: Box, piece: Tensor, weight: Tensor, wanted: list[bool]):
        """The gradients of one piece's convolution with respect to the cells and the kernel it uses."""
        piece, kernel = box.of(piece), box.kernel(weight)
        spatial = []
        for i, n in enumerate(piece.shape[2:]):
            reach = (kernel.shape[i + 2] - 1) * self.call.dilation[i]
            if self.call.transposed:
                spatial.append((n - 1) * self.call.stride[i] - 2 * box.padding[i] + reach + 1)
            else:
                spatial.append((n + 2 * box.padding[i] - reach - 1) // self.call.stride[i] + 1)
        return self.call.grads(box.spread(grad, spatial), piece, kernel, None, box.padding, wanted)


class _Convolved(moves.Move):
    """One node for a convolution with its halos. Adjoint: the strips' gradients go back to their rows' owners."""

    @staticmethod
    def forward(ctx, blocks, over, block, weight, bias):
        out, strips = blocks.forward(block, weight, bias)
        ctx.blocks, ctx.over = blocks, over
        ctx.save_for_backward(block, weight, bias, *strips)
        return moves.unviewed(out)

    @staticmethod
    def backward(ctx, grad):
        block, weight, bias, *strips = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if not torch.is_grad_enabled():
            return None, None, *ctx.blocks.backward(grad, block, strips, weight, wanted, ctx.over)
        chosen = [t for t, want in zip((block, weight, bias), wanted, strict=True) if want]
        out = ctx.blocks.widened(block, weight, bias, ctx.over)
        found = iter(torch.autograd.grad(out, chosen, grad, create_graph=True))
        return None, None, *(next(found) if want else None for want in wanted)
