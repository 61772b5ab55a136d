"""Neighborhood attention in torch: each cell of a field attends to the window around it; halos instead of a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..._compat.autocast import concatenate
from ..stencil.decorators import stencil

MAX_WINDOW_BYTES = 256 << 20  # keys and values of windows held at a time; backward gathers those of larger fields again


def neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    scale: float | None = None,
) -> Tensor:
    """Return attention of each cell to the `kernel_size` cells around it.

    Tensors are (batch, space..., heads, features) with one, two or three dims of space, plain or sharded along any
    dims. At the edge of the field the window shifts inward, so that every cell attends to the same number of cells.
    With `dilation` d, a window has every d-th cell. These are the definition and the layout of natten's `na1d`, `na2d`
    and `na3d`.

    >>> x = torch.ones(1, 6, 6, 2, 4)
    >>> neighborhood_attention(x, x, x, 3).shape
    torch.Size([1, 6, 6, 2, 4])
    """
    space = query.ndim - 3
    if not 1 <= space <= 3 or query.shape != key.shape or key.shape[:-1] != value.shape[:-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(
            "neighborhood_attention: query, key and value are (batch, one to three dims of space, heads, features) and "
            f"have equal sizes, not {shapes}"
        )
    sizes, steps = (tuple([n] * space) if isinstance(n, int) else tuple(n) for n in (kernel_size, dilation))
    if len(sizes) != space or len(steps) != space or any(n < 1 or n % 2 == 0 for n in sizes) or min(steps) < 1:
        raise ValueError(
            f"neighborhood_attention: kernel_size {kernel_size} and dilation {dilation} for {space} dims: odd sizes "
            "and positive dilations are needed, one number or one for each dim"
        )
    for n, size, step in zip(query.shape[1:-2], sizes, steps, strict=True):
        if size * step > n:
            raise ValueError(f"neighborhood_attention: {size} cells with dilation {step} do not fit a dim of {n} cells")
    return _attend(query, key, value, sizes, steps, query.shape[-1] ** -0.5 if scale is None else scale)


def _reach(query: Any, key: Any, value: Any, sizes: Sequence[int], steps: Sequence[int], scale: float) -> dict:
    """Return how far a cell reads along each dim; samples and heads are independent.

    At the edge of a field a block has a full window, `size * step` cells: dilated windows that shift inward end there.
    """
    reach = {1 + d: size * step // 2 for d, (size, step) in enumerate(zip(sizes, steps, strict=True))}
    return {0: 0} | reach | {1 + len(sizes): 0}


@stencil(radius=_reach, fields=("query", "key", "value"))
def _attend(query, key, value, sizes, steps, scale):
    """Attend in a block of a field. The caller discards outputs near block ends that are inside the field."""
    tables = [
        _window_table(n, size, step, query.device)
        for n, size, step in zip(query.shape[1:-2], sizes, steps, strict=True)
    ]
    row_bytes = math.prod(sizes) * (key[:, :1].numel() + value[:, :1].numel()) * key.element_size()
    rows = max(1, MAX_WINDOW_BYTES // max(row_bytes, 1))
    if rows >= query.shape[1]:
        return _attend_rows(query, key, value, tables, scale)
    blocks = [
        checkpoint(_attend_rows, q, key, value, [table, *tables[1:]], scale, use_reentrant=False)
        for q, table in zip(query.split(rows, 1), tables[0].split(rows), strict=True)
    ]
    return concatenate(blocks, 1)


def _window_table(n: int, size: int, step: int, device: torch.device) -> Tensor:
    """Return the cells (cell, position in its window) of the windows along a dim of `n` cells."""
    cell = torch.arange(n, device=device)
    residue = cell % step
    count = (n - 1 - residue) // step + 1  # cells with this residue, among which the window shifts inward
    first = torch.minimum((cell // step - size // 2).clamp_min(0), (count - size).clamp_min(0))
    window = (first[:, None] + torch.arange(size, device=device)) * step + residue[:, None]
    return window.clamp_max(n - 1)


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, tables: Sequence[Tensor], scale: float) -> Tensor:
    for d, table in enumerate(tables):  # a dim becomes two: cells, and positions in their windows
        at = (slice(None),) * (1 + 2 * d)
        key, value = key[(*at, table)], value[(*at, table)]
    cells, windows = "xyz"[: len(tables)], "uvw"[: len(tables)]
    around = "".join(c + w for c, w in zip(cells, windows, strict=True))
    scores = torch.einsum(f"b{cells}hf,b{around}hf->b{cells}h{windows}", query * scale, key)
    weights = scores.flatten(-len(tables)).softmax(-1).unflatten(-1, [t.shape[1] for t in tables])
    return torch.einsum(f"b{cells}h{windows},b{around}hf->b{cells}hf", weights, value)
