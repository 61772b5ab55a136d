"""`torch.gradient`: finite differences, one-sided at the edges of the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.empty_shards import connected
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import Layout
from .._common.probe import probe
from .._common.together import empty_result_of, together
from ..shape.flip_roll import shard_by_one_axis
from .clipped import ClippedWindow
from .padded_block import PaddedBlockPlan


@rule("gradient")
def gradient(input: Operand, *, spacing=None, dim=None, edge_order=1, fn):
    """Exchange one row with each neighbor along a sharded dim; no communication for other dims."""
    given = {"spacing": spacing, "dim": dim, "edge_order": edge_order}
    probe(fn, input, meta=True, **given)
    found = probe(fn, input, **given | {"edge_order": None})  # a stand-in has 2 cells along each dim
    dtype = found[0].dtype if found else input.dtype
    dims = range(input.ndim) if dim is None else [d % input.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    steps = list(spacing) if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
    layout = shard_by_one_axis(input.layout, list(dims))
    coordinates = any(isinstance(step, Operand) for step in steps)
    partials = [
        _partial_derivative(fn, layout, d, edge_order, None if coordinates else step, dtype)
        for d, step in zip(dims, steps, strict=True)
    ]

    def local(input: Tensor, spacing: Any) -> tuple[Tensor, ...]:
        points = spacing if coordinates else [None] * len(partials)
        return tuple(run(input, x) for run, x in zip(partials, points, strict=True))

    operands: dict[str, Any] = {"input": layout}
    if coordinates:
        operands["spacing"] = [Layout.replicate(layout.mesh, step.shape) for step in steps]
    return Plan(local=local, operands=operands, layout=(layout,) * len(partials))


def _partial_derivative(
    fn: Callable, layout: Layout, dim: int, edge_order: int, step: float | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the function of the local tensor, and of the coordinates of the global dim, for one partial derivative."""
    spacing: Any = {} if step is None else {"spacing": step}
    block_plan = PaddedBlockPlan(layout, {dim: ClippedWindow(layout.shape[dim], 1, 1, edge_order + 1)})
    start, owned = block_plan.block_starts[dim], block_plan.owned[dim]
    shape: Sequence[int] = layout.local_shape

    def differentiate(block: Tensor, *rest: Tensor) -> Tensor:
        if 0 in shape:
            return empty_result_of([block, *rest], shape, dtype, block)
        given = {"spacing": [rest[0].narrow(0, start, block.shape[dim])]} if rest else spacing
        out = fn(block, dim=dim, edge_order=edge_order, **given)[0]
        return out.narrow(dim, owned.start - start, owned.stop - owned.start)

    run = connected(differentiate, [layout])

    def local(input: Tensor, points: Tensor | None) -> Tensor:
        block = block_plan.gather_block(input)
        return run(*together([block] if points is None else [block, points]))

    return local
