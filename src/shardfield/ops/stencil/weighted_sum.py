"""Weighted sums of cells along one dim. The adjoint is also a weighted sum, so backward needs no scatter_add."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from ..._compat import function_apply
from ...trace_state import concrete


class WeightedSum:
    """Linear map along `dim` of `size` cells: output `o` is the sum over j of `weights[o, j] * block[cells[o, j]]`.

    A NaN weight marks an unused term. Without `weights` all weights are 1.
    """

    def __init__(self, dim: int, size: int, cells: Tensor, weights: Tensor | None):
        self.dim, self.size, self.cells, self.weights = dim, size, cells, weights

    def __call__(self, block: Tensor) -> Tensor:
        """Return the sums. Differentiable, also for empty blocks."""
        return _WeightedSumFunction.apply(block, self)

    def run(self, block: Tensor) -> Tensor:
        """Return the sums, accumulated term by term: this needs the memory of the result and one term."""
        shape = list(block.shape)
        shape[self.dim] = len(self.cells)
        total = None
        for cells, weights, missing in self._terms if block.numel() else ():
            # index_select along the last dim copies single elements on the CPU, ten times slower than gather.
            last = self.dim == block.ndim - 1
            term = block.gather(self.dim, cells.expand(shape)) if last else block.index_select(self.dim, cells)
            if missing is not None:
                term.masked_fill_(missing.view(-1, *[1] * (block.ndim - self.dim - 1)), 0)  # 0 * inf would be NaN
            if weights is not None:
                weights = weights.view(-1, *[1] * (block.ndim - self.dim - 1))
            if total is None:
                total = term if weights is None else term.mul_(weights)
            else:
                total = total.add_(term) if weights is None else total.addcmul_(term, weights)
        return block.new_zeros(shape) if total is None else total

    @cached_property
    def _terms(self) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        with concrete():
            if self.weights is None:
                return [(column.contiguous(), None, None) for column in self.cells.unbind(1)]
            missing = self.weights.isnan()
            columns = zip(self.cells.unbind(1), self.weights.nan_to_num(0).unbind(1), missing.unbind(1), strict=True)
            return [(c.contiguous(), w.contiguous(), m.contiguous() if m.any() else None) for c, w, m in columns]

    @cached_property
    def adjoint(self) -> WeightedSum:
        """The map from gradients of outputs to gradients of cells: for every cell, the outputs that read it."""
        with concrete():
            return self._adjoint()

    def _adjoint(self) -> WeightedSum:
        outputs = torch.arange(len(self.cells), device=self.cells.device)[:, None].expand(self.cells.shape)
        cells, weights = self.cells, self.weights
        weights = torch.ones(cells.shape, device=cells.device) if weights is None else weights
        used = ~weights.isnan()
        cells, weights, outputs = cells[used], weights[used], outputs[used]
        cells, order = cells.sort(stable=True)
        counts = cells.bincount(minlength=self.size)
        column = torch.arange(len(cells), device=cells.device) - (counts.cumsum(0) - counts)[cells]
        shape = (self.size, int(counts.max()) if self.size else 0)
        adjoint_cells, adjoint_weights = outputs.new_zeros(shape), weights.new_full(shape, math.nan)
        adjoint_cells[cells, column], adjoint_weights[cells, column] = outputs[order], weights[order]
        adjoint = WeightedSum(self.dim, len(self.cells), adjoint_cells, adjoint_weights)
        adjoint.__dict__["adjoint"] = self
        return adjoint


class _WeightedSumFunction(torch.autograd.Function):
    apply = function_apply

    @staticmethod
    def forward(ctx, block, sums):
        ctx.sums = sums
        return sums.run(block)

    @staticmethod
    def backward(ctx, grad):
        return _WeightedSumFunction.apply(grad, ctx.sums.adjoint), None
