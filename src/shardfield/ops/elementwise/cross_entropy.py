"""Losses that look up a class: each rank answers for the classes it holds, and the answers add up.

A target names one class, which one rank holds; the others add zero. So cross entropy over a cut class dim sends a
softmax's two small messages and the loss, never the scores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import trace_state
from ..._compat import NAMESPACES
from ...comm import autograd_collectives
from ...comm.collectives import accumulate_dtype
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import HANDLERS, composed, rule
from ...layout import DimSharding, Layout, nested_chunk
from .._common.probe import autocast_to_fp32, probe, probe_shapes, raise_if, raise_if_any_rank
from .loss import MEAN, NONE

NN = NAMESPACES[1]


class ClassLookup:
    """Where scores of classes along `dim` meet their targets, and how a rank answers for its own classes."""

    def __init__(self, input: Operand, target: Operand):
        self.dim = 0 if input.ndim == 1 else 1
        self.classes = input.shape[self.dim]
        taken = set(input.layout.shard_axes)
        dims = list(input.layout.dims)
        rest = [d for d in range(input.ndim) if d != self.dim][: target.ndim]
        for d, factors in zip(rest, target.layout.dims, strict=False):  # cut scores where only the target is cut
            axes = {a for f in factors for a in f.axes}
            if axes and not input.layout.axes_of(d) and not axes & taken:
                dims[d], taken = factors, taken | axes
        self.scores = Layout.make(input.layout.mesh, dims)
        self.targets = self.scores.drop_dims([self.dim])
        if target.ndim > self.targets.ndim:  # one score vector, its target as a vector of one
            self.targets = Layout.replicate(input.layout.mesh, target.shape)
        self.span = self.scores.span(self.dim)
        self.axes = self.scores.axes_of(self.dim)
        self.class_groups = process_groups(self.scores, self.axes)

    def local_mask(self, target: Tensor) -> Tensor:
        """Which targets are among this rank's classes."""
        return (target >= self.span.start) & (target < self.span.stop)

    def local_score(self, input: Tensor, target: Tensor, mine: Tensor) -> Tensor:
        """The target's score where it is this rank's, 0 elsewhere."""
        if not input.shape[self.dim]:
            return input.sum(self.dim).reshape(target.shape)  # zeros, in the graph like the others'
        at = torch.where(mine, target - self.span.start, 0).long()
        found = input.gather(self.dim, at.reshape(input.shape[: self.dim] + (1,) + input.shape[self.dim + 1 :]))
        return torch.where(mine, found.reshape(target.shape), 0)

    def validate_targets(self, bad: Tensor, error: type[Exception], why: str) -> None:
        """No target may name a class that is not there."""
        raise_if_any_rank(bad, process_groups(self.targets, self.targets.shard_axes), error, why)

    def per_target_layout(self) -> Layout:
        """The layout of one value per target, still to be added over the ranks that share the classes."""
        return self.targets.with_partial(self.axes)

    def plan(self, local: Any, reduction: int, weight: Any, count: int = 1) -> Plan:
        """A plan whose `local` gives one value per target, to be added up or averaged over `count` if asked."""
        operands = {"input": self.scores, "target": self.targets}
        if weight is not None:
            operands["weight"] = Layout.replicate(self.scores.mesh, weight.shape)
        if reduction == NONE:
            return Plan(local=local, operands=operands, layout=self.per_target_layout())
        everywhere = Layout.replicate(self.scores.mesh, ()).with_partial(self.scores.shard_axes)

        def total(input, target, weight):
            each = local(input, target, weight)
            added = each.sum(dtype=accumulate_dtype(each.dtype))
            return (added / count if reduction == MEAN else added).to(each.dtype)

        return Plan(local=total, operands=operands, layout=everywhere)


def _check_weight_no_grad(weight: Tensor | None, name: str) -> None:
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"The function '{name}' is not differentiable with respect to argument 'weight'. "
            "This input cannot have requires_grad True."
        )


@rule(NN.nll_loss_nd, NN.nll_loss, NN.nll_loss2d, exact=True)
def nll_loss(
    input: Operand, target: Operand, weight=None, reduction=NONE, ignore_index=-100, *, smoothing=0.0, fn
) -> Plan:
    """Minus the target's log-probability; for the mean, sum and weights travel in one message.

    A target that names no class raises on the CPU, on all ranks, and is NaN elsewhere. `smoothing` spreads a part of
    every target evenly over the classes, as cross entropy's `label_smoothing` does.
    """
    result = probe(fn, input, target, weight, reduction, ignore_index).dtype
    probe_shapes(fn, input, target, weight, reduction, ignore_index)
    at = ClassLookup(input, target)
    classes, dim, span = at.classes, at.dim, at.span

    def values(input, target, weight):
        """One value per target, its weight where it is this rank's, and which targets name no class."""
        _check_weight_no_grad(weight, "nll_loss_forward")
        input = input.to(result)
        valid = target != ignore_index
        bad = valid & ((target < 0) | (target >= classes))
        mine = valid & at.local_mask(target)
        scale = mine.to(input.dtype)
        if weight is not None:
            scale = scale * weight[torch.where(mine, target, 0).long()]
        each = -at.local_score(input, target, mine) * scale
        if smoothing:
            shares = (
                input if weight is None else input * _reshape_along(weight[span.start : span.stop], dim, input.ndim)
            )
            spread = -shares.sum(dim).masked_fill(~valid, 0)
            each = (1 - smoothing) * each + smoothing / classes * spread
        return each.masked_fill(bad, math.nan), scale, bad

    why = f"Target out of bounds: targets must be from 0 to {classes - 1}, or {ignore_index}"

    def local(input, target, weight):
        each, _, bad = values(input, target, weight)
        at.validate_targets(bad, IndexError, why)
        return each

    if reduction != MEAN:
        return at.plan(local, reduction, weight)
    everyone = process_groups(at.scores, at.scores.shard_axes)

    def mean(input, target, weight):
        each, scale, bad = values(input, target, weight)
        wide = accumulate_dtype(each.dtype)
        sums = torch.stack([each.sum(dtype=wide), scale.sum(dtype=wide), bad.sum(dtype=wide)])
        added, weights, wrong = autograd_collectives.reduce(sums, everyone).unbind()
        if wrong.device.type == "cpu":
            raise_if(wrong.detach(), IndexError, why)
        return (added / weights).to(each.dtype)

    plan = at.plan(local, NONE, weight)
    return Plan(local=mean, operands=plan.operands, layout=Layout.replicate(at.scores.mesh, ()))


def _reshape_along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    """A vector laid along one dim of many."""
    return vector.reshape([-1 if d == dim else 1 for d in range(ndim)])


@composed(NN.cross_entropy_loss, exact=True)
def cross_entropy(input, target, weight=None, reduction=NONE, ignore_index=-100, label_smoothing=0.0):
    """Class indices or class probabilities, as the target's shape says."""
    fn = NN.cross_entropy_loss
    probe_shapes(fn, input, target, weight, reduction, ignore_index, label_smoothing)
    input, target, weight = autocast_to_fp32(input, target, weight)
    dim = 0 if input.ndim == 1 else 1
    scores = torch.log_softmax(input, dim)
    if input.shape != target.shape:
        args = (scores, target, weight, reduction, ignore_index)
        return HANDLERS[NN.nll_loss_nd](NN.nll_loss_nd, (), args, {"smoothing": label_smoothing})
    classes = input.shape[dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    if weight is not None:
        scores = scores * _reshape_along(weight, dim, input.ndim)
    each = -(scores * target)
    if reduction == NONE:
        return each.sum(dim)
    return each.sum() / (input.numel() // max(classes, 1)) if reduction == MEAN else each.sum()


@rule(NN.multi_margin_loss, exact=True)
def multi_margin_loss(input: Operand, target: Operand, p=1, margin=1.0, weight=None, reduction=NONE, *, fn):
    """How far other classes come within the margin of the target's. The target's score is shared first: one message."""
    result = probe(fn, input, target, p, margin, weight, reduction).dtype
    probe_shapes(fn, input, target, p, margin, weight, reduction)
    at = ClassLookup(input, target)
    classes, dim = at.classes, at.dim
    own = torch.arange(at.span.start, at.span.stop, device=input.device)

    def local(input, target, weight):
        _check_weight_no_grad(weight, "multi_margin_loss")
        input = input.to(result)
        at.validate_targets((target < 0) | (target >= classes), RuntimeError, "target out of range")
        (score,) = autograd_collectives.replicate_in(
            [autograd_collectives.reduce(at.local_score(input, target, at.local_mask(target)), at.class_groups)],
            at.class_groups,
        )
        other = _reshape_along(own, dim, input.ndim) != target.reshape(-1, 1) if dim else own != target
        over = torch.relu(margin - (score.reshape(-1, 1) if dim else score) + input) * other
        each = (over if p == 1 else over.square()).sum(dim).reshape(target.shape) / classes
        return each if weight is None else each * weight[target]

    return at.plan(local, reduction, weight, target.numel())


@rule(NN.multilabel_margin_loss, exact=True)
def multilabel_margin_loss(input: Operand, target: Operand, reduction=NONE, *, fn):
    """Every label against every other class: a sample's classes must be together, so cuts of them go to the batch."""
    probe(fn, input, target, reduction)
    probe_shapes(fn, input, target, reduction)
    mesh = input.layout.mesh
    layout = Layout.replicate(mesh, input.shape)
    if input.ndim == 2:
        ((size, axes, lengths),), ((_, more, _),) = input.layout.dims
        parts = [mesh.size(a) for a in more]
        cut = tuple(n for piece in (lengths if axes else (size,)) for n in nested_chunk(piece, parts))
        layout = layout.with_dim(0, DimSharding(size, axes + more, cut if axes + more else ()))
    each = layout.drop_dims([layout.ndim - 1])
    out = each if reduction == NONE else Layout.replicate(mesh, ()).with_partial(layout.shard_axes)
    over, classes = process_groups(layout, layout.shard_axes), input.shape[-1]
    samples = input.shape[0] if input.ndim == 2 else 1

    def local(input, target):
        raise_if_any_rank(
            (target < -1) | (target >= classes), over, RuntimeError, "argument #2 'target' is out of range"
        )
        if trace_state.tracer is not None:
            raise NotImplementedError("torch's own trace of it counts classes behind the last label")
        values = fn(input, target, NONE)
        if reduction == NONE:
            return values
        added = values.sum(dtype=accumulate_dtype(values.dtype))
        return (added / samples if reduction == MEAN else added).to(values.dtype)

    return Plan(local=local, operands={"input": layout, "target": layout}, layout=out)
