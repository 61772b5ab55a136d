"""The operands of each tile of ring attention: views of queries, keys, values and the mask, and factors of dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...comm import collectives
from ...layout import Span
from ..elementwise.random import uniform_at
from . import block_kernels
from .block_kernels import StoredWeights, expand_heads, reduce_heads
from .causal_tiles import Spans, Tile
from .kv_blocks import take
from .ring_plan import RingPlan


def mask_tile(mask: Tensor, plan: RingPlan, tile: Tile, columns: Spans) -> Tensor:
    """Return a view of a mask (or of its gradient) with the rows of a tile and its columns of the block."""
    if mask.shape[-2] > 1:
        mask = mask[..., slice(*tile.rows), :]
    if mask.shape[-1] > 1:
        (block,) = columns  # with a mask, keys are not in zigzag order
        start = block.start - plan.origin
        mask = mask[..., start + tile.columns.start : start + tile.columns.stop]
    return mask


def mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as a bias that is added to the scores."""
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.detach()


def span_indices(spans: Spans, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in spans] or [torch.arange(0, device=device)])


def dropout_mask_fn(
    plan: RingPlan, head_index: Tensor, key: Tensor, columns: Spans, dtype: torch.dtype
) -> Callable[[Tile], block_kernels.DropoutMaskFn]:
    """Return tile -> dropout factors of its weights: 0, or 1 / (1 - p)."""
    assert plan.dropout is not None
    p, (height, width) = plan.dropout
    rows, cols = span_indices(plan.rows, head_index.device), span_indices(columns, head_index.device)
    factor = 0.0 if p == 1 else 1 / (1 - p)

    def for_tile(tile: Tile) -> block_kernels.DropoutMaskFn:
        def mask_rows(first: int, last: int) -> Tensor:
            r = rows[tile.rows.start + first : tile.rows.start + last]
            c = cols[tile.columns.start : tile.columns.stop]
            index = (head_index[:, :, None, None] * height + r[:, None]) * width + c
            return (uniform_at(key, index) >= p).to(dtype) * factor

        return mask_rows

    return for_tile


class TileOperands:
    """The tiles of one visit's blocks, with the operands of each."""

    def __init__(
        self,
        plan: RingPlan,
        number: int,
        q,
        k,
        v,
        mask,
        head_index,
        key,
        bias_grad: bool,
        weights: StoredWeights | None = None,
    ):
        self.plan, self.tiles, self.bias_grad, self.weights = plan, plan.tiles[number], bias_grad, weights
        if q.shape[0] != 1 or mask is not None or plan.dropout is not None:  # squares cannot be a batch of views
            self.tiles = tuple(square for tile in self.tiles for square in tile.separate)
        self.q, self.k, self.v, self.mask = q, k, v, mask
        _, self.columns = plan.used[number]
        self.dropout_mask_fn = (
            dropout_mask_fn(plan, head_index, key, self.columns, collectives.accumulate_dtype(q.dtype))
            if plan.dropout is not None
            else None
        )

    def __iter__(self) -> Iterator[tuple[Tile, block_kernels.Kernel, tuple]]:
        if not self.q.shape[0] or not self.q.shape[1]:
            return
        k, v = (expand_heads(t, self.q) for t in (self.k, self.v)) if self.tiles else (self.k, self.v)
        for tile in self.tiles:
            bias = None
            if self.mask is not None:
                bias = mask_to_bias(mask_tile(self.mask, self.plan, tile, self.columns), self.q.dtype)
                if tile.causal:  # combine the masks: a row may be masked fully by both together, and by neither alone
                    size = tile.rows.stop - tile.rows.start
                    future = torch.ones(size, size, dtype=torch.bool, device=bias.device).triu(1)
                    bias, tile = bias.masked_fill(future, -math.inf), tile._replace(causal=False)
            dropout = self.dropout_mask_fn(tile) if self.dropout_mask_fn is not None else None
            qt, kt, vt = take_rows(self.q, tile), take_columns(k, tile), take_columns(v, tile)
            kernel = block_kernels.select_kernel(
                qt, vt, bias, dropout=dropout, bias_grad=self.bias_grad, weights=self.weights
            )
            yield tile, kernel, (qt, kt, vt, bias)


def take_rows(tensor: Tensor, tile: Tile, dim: int = -2) -> Tensor:
    """Return the rows of a tile."""
    return _squares_as_batch(take(tensor, dim, tile.rows), tile.squares)


def take_columns(tensor: Tensor, tile: Tile) -> Tensor:
    """Return the columns of a tile."""
    return _squares_as_batch(take(tensor, -2, tile.columns), tile.squares)


def add_tile(total: Tensor | None, part: Tensor, span: Span, squares: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a tile's gradient, of a span of the rows of `like`, to the sum in `dtype` of the tiles before it.

    A first gradient of all rows is the sum, as it is: most visits have one tile, and need no zeros and no addition.
    """
    if squares > 1:  # in the order of rows
        part = part.transpose(0, 1).reshape(1, part.shape[1], -1, part.shape[-1])
    part = reduce_heads(part, like)
    if total is None and span == (0, like.shape[-2]):
        return part
    if total is None:
        total = torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    total = total.to(dtype)
    take(total, -2, span).add_(part)
    return total


def _squares_as_batch(tensor: Tensor, squares: int) -> Tensor:
    """Return a view of a batch of 1 with the squares of a tile as its batch: one kernel computes all of them."""
    if squares == 1:
        return tensor
    _, heads, rows, *features = tensor.shape
    return tensor.view(heads, squares, rows // squares, *features).transpose(0, 1)
