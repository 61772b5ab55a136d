"""Weighted sums of the cells of a block along one dim, whose adjoint is again one: no scattered additions."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from ..._compat import function_apply
from ...trace_state import concrete


class WeightedSum:
    """Output `o` is the sum over j of `weights[o, j]` times the cell `cells[o, j]`, of `size` cells along `dim`.

    Where a weight is NaN there is nothing to add; without weights they are 1.
    """

    def __init__(self, dim: int, size: int, cells: Tensor, weights: Tensor | None):
        self.dim, self.size, self.cells, self.weights = dim, size, cells, weights

    def __call__(self, block: Tensor) -> Tensor:
        """Differentiable, with empty blocks too."""
        return _WeightedSumFunction.apply(block, self)

    def run(self, block: Tensor) -> Tensor:
        """The sums, one term of all of them after the other: no more memory than the result and a term."""
        shape = list(block.shape)
        shape[self.dim] = len(self.cells)
        total = None
        for cells, weights, missing in self._terms if block.numel() else ():
            # along the last dim, index_select goes element by element on the CPU: ten times as slow
            last = self.dim == block.ndim - 1
            term = block.gather(self.dim, cells.expand(shape)) if last else block.index_select(self.dim, cells)
            if missing is not None:
                term.masked_fill_(missing.view(-1, *[1] * (block.ndim - self.dim - 1)), 0)  # of an infinity too
            if weights is not None:
                term.mul_(weights.view(-1, *[1] * (block.ndim - self.dim - 1)))
            total = term if total is None else total.add_(term)
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
        """From the gradients of the outputs to those of the cells: every cell lists the outputs it is part of."""
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
        place = torch.arange(len(cells), device=cells.device) - (counts.cumsum(0) - counts)[cells]
        shape = (self.size, int(counts.max()) if self.size else 0)
        listed, how = outputs.new_zeros(shape), weights.new_full(shape, math.nan)
        listed[cells, place], how[cells, place] = outputs[order], weights[order]
        found = WeightedSum(self.dim, len(self.cells), listed, how)
        found.__dict__["adjoint"] = self
        return found


class _WeightedSumFunction(torch.autograd.Function):
    apply = function_apply

    @staticmethod
    def forward(ctx, block, sums):
        ctx.sums = sums
        return sums.run(block)

    @staticmethod
    def backward(ctx, grad):
        return _WeightedSumFunction.apply(grad, ctx.sums.adjoint), None
