"""Losses that look up class scores: cross_entropy, nll_loss, multi_margin_loss, multilabel_margin_loss.

The class dim may be sharded. A target is the index of one class, which one rank holds. That rank contributes the score
and the others contribute zero, so that the values per target are partial sums over the axes of the class dim. Cross
entropy over a sharded class dim communicates the two small messages of a softmax and the loss, never the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ..._compat import NAMESPACES
from ..._compat.autocast import stack
from ...comm import autograd_collectives
from ...comm.collectives import accumulate_dtype
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import composed, handler_of, rule
from ...layout import DimSharding, Layout, nested_chunk
from .._common.autocast import autocast_to_fp32
from .._common.probe import probe
from .._common.value_checks import raise_if, raise_if_any_rank
from .loss import MEAN, NONE

NN = NAMESPACES[1]


class ClassLookup:
    """The layouts of class scores and their targets, and the lookup of scores in this rank's shard of the classes."""

    def __init__(self, input: Operand, target: Operand):
        self.dim = 0 if input.ndim == 1 else 1
        self.classes = input.shape[self.dim]
        used_axes = set(input.layout.shard_axes)
        dims = list(input.layout.dims)
        sample_dims = [d for d in range(input.ndim) if d != self.dim][: target.ndim]
        # shard scores along dims that only the target shards
        for d, factors in zip(sample_dims, target.layout.dims, strict=False):
            axes = {a for f in factors for a in f.axes}
            if axes and not input.layout.axes_of(d) and not axes & used_axes:
                dims[d], used_axes = factors, used_axes | axes
        self.scores = Layout.make(input.layout.mesh, dims)
        self.targets = self.scores.drop_dims([self.dim])
        if target.ndim > self.targets.ndim:  # one score vector; the target is a vector of size 1
            self.targets = Layout.replicate(input.layout.mesh, target.shape)
        self.span = self.scores.span(self.dim)
        self.axes = self.scores.axes_of(self.dim)
        self.class_groups = process_groups(self.scores, self.axes)

    def local_mask(self, target: Tensor) -> Tensor:
        """Return the mask of targets that are in this rank's shard of the classes."""
        return (target >= self.span.start) & (target < self.span.stop)

    def local_score(self, input: Tensor, target: Tensor, is_local: Tensor) -> Tensor:
        """Return the target's score if it is in this rank's shard, else 0."""
        if not input.shape[self.dim]:
            # zeros that depend on input: all ranks need the same graph
            return input.sum(self.dim).reshape(target.shape)
        local_index = torch.where(is_local, target - self.span.start, 0).long()
        score = input.gather(
            self.dim, local_index.reshape(input.shape[: self.dim] + (1,) + input.shape[self.dim + 1 :])
        )
        return torch.where(is_local, score.reshape(target.shape), 0)

    def validate_targets(self, bad: Tensor, error: type[Exception], why: str) -> None:
        """Raise `error` on all ranks if any target on any rank is out of range."""
        raise_if_any_rank(bad, process_groups(self.targets, self.targets.shard_axes), error, why)

    def per_target_layout(self) -> Layout:
        """Return the layout of one value per target: a partial sum over the axes of the class dim."""
        return self.targets.with_partial(self.axes)

    def plan(self, local: Any, reduction: int, weight: Any, count: int = 1) -> Plan:
        """Return the plan of a loss; `local` returns one value per target, and a mean divides their sum by `count`."""
        operands = {"input": self.scores, "target": self.targets}
        if weight is not None:
            operands["weight"] = Layout.replicate(self.scores.mesh, weight.shape)
        if reduction == NONE:
            return Plan(local=local, operands=operands, layout=self.per_target_layout())
        scalar = Layout.replicate(self.scores.mesh, ()).with_partial(self.scores.shard_axes)

        def total(input, target, weight):
            losses = local(input, target, weight)
            loss_sum = losses.sum(dtype=accumulate_dtype(losses.dtype))
            return (loss_sum / count if reduction == MEAN else loss_sum).to(losses.dtype)

        return Plan(local=total, operands=operands, layout=scalar)


def _check_weight_no_grad(weight: Tensor | None, name: str) -> None:
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"The function '{name}' is not differentiable with respect to argument 'weight'. "
            "This input cannot have requires_grad True."
        )


def _check_shapes(fn: Callable, *args: Any) -> None:
    """Raise torch's errors about the shapes of a loss. Meta kernels refuse uint8 targets, which the real ones take."""

    def call(input: Tensor, target: Tensor, *rest: Any) -> Any:
        return fn(input, target.long() if target.dtype is torch.uint8 else target, *rest)

    probe(call, *args, meta=True)


@rule(NN.nll_loss_nd, NN.nll_loss, NN.nll_loss2d, exact=True)
def nll_loss(
    input: Operand, target: Operand, weight=None, reduction=NONE, ignore_index=-100, *, smoothing=0.0, fn
) -> Plan:
    """Return minus the target's log-probability; the mean needs one all_reduce of the sums of losses and weights.

    A target out of range raises on the CPU, on all ranks, and is NaN on other devices. `smoothing` distributes a part
    of every target evenly over the classes, like the `label_smoothing` of cross entropy.
    """
    dtype = probe(fn, input, target, weight, reduction, ignore_index).dtype
    _check_shapes(fn, input, target, weight, reduction, ignore_index)
    lookup = ClassLookup(input, target)
    classes, dim, span = lookup.classes, lookup.dim, lookup.span

    def values(input, target, weight):
        """Return the losses, the weights of targets in this rank's shard, and the mask of targets out of range."""
        _check_weight_no_grad(weight, "nll_loss_forward")
        input = input.to(dtype)
        valid = target != ignore_index
        bad = valid & ((target < 0) | (target >= classes))
        is_local = valid & lookup.local_mask(target)
        scale = is_local.to(input.dtype)
        if weight is not None:
            scale = scale * weight[torch.where(is_local, target, 0).long()]
        losses = -lookup.local_score(input, target, is_local) * scale
        if smoothing:
            weighted = (
                input if weight is None else input * _reshape_along(weight[span.start : span.stop], dim, input.ndim)
            )
            smooth_loss = -weighted.sum(dim).masked_fill(~valid, 0)
            losses = (1 - smoothing) * losses + smoothing / classes * smooth_loss
        return losses.masked_fill(bad, math.nan), scale, bad

    why = f"Target out of bounds: targets must be from 0 to {classes - 1}, or {ignore_index}"

    def local(input, target, weight):
        losses, _, bad = values(input, target, weight)
        lookup.validate_targets(bad, IndexError, why)
        return losses

    if reduction != MEAN:
        return lookup.plan(local, reduction, weight)
    groups = process_groups(lookup.scores, lookup.scores.shard_axes)

    def mean(input, target, weight):
        losses, scale, bad = values(input, target, weight)
        accumulate = accumulate_dtype(losses.dtype)
        sums = stack([losses.sum(dtype=accumulate), scale.sum(dtype=accumulate), bad.sum(dtype=accumulate)])
        loss_sum, weight_sum, bad_count = autograd_collectives.reduce(sums, groups).unbind()
        if bad_count.device.type == "cpu":
            raise_if(bad_count.detach(), IndexError, why)
        return (loss_sum / weight_sum).to(losses.dtype)

    plan = lookup.plan(local, NONE, weight)
    return Plan(local=mean, operands=plan.operands, layout=Layout.replicate(lookup.scores.mesh, ()))


def _reshape_along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    """Reshape a vector to broadcast along `dim` of a tensor of `ndim` dims."""
    return vector.reshape([-1 if d == dim else 1 for d in range(ndim)])


@composed(NN.cross_entropy_loss, exact=True)
def cross_entropy(input, target, weight=None, reduction=NONE, ignore_index=-100, label_smoothing=0.0):
    """Compute cross entropy with class indices, or with class probabilities if the target has the input's shape."""
    fn = NN.cross_entropy_loss
    _check_shapes(fn, input, target, weight, reduction, ignore_index, label_smoothing)
    input, target, weight = autocast_to_fp32(input, target, weight)
    dim = 0 if input.ndim == 1 else 1
    scores = torch.log_softmax(input, dim)
    if input.shape != target.shape:
        args = (scores, target, weight, reduction, ignore_index)
        return handler_of(NN.nll_loss_nd)(NN.nll_loss_nd, (), args, {"smoothing": label_smoothing})
    classes = input.shape[dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    if weight is not None:
        scores = scores * _reshape_along(weight, dim, input.ndim)
    losses = -(scores * target)
    if reduction == NONE:
        return losses.sum(dim)
    return losses.sum() / (input.numel() // max(classes, 1)) if reduction == MEAN else losses.sum()


@rule(NN.multi_margin_loss, exact=True)
def multi_margin_loss(input: Operand, target: Operand, p=1, margin=1.0, weight=None, reduction=NONE, *, fn):
    """Compute the margin violations of the other classes. One all_reduce replicates the target's score first."""
    dtype = probe(fn, input, target, p, margin, weight, reduction).dtype
    _check_shapes(fn, input, target, p, margin, weight, reduction)
    lookup = ClassLookup(input, target)
    classes, dim = lookup.classes, lookup.dim
    local_classes = torch.arange(lookup.span.start, lookup.span.stop, device=input.device)

    def local(input, target, weight):
        _check_weight_no_grad(weight, "multi_margin_loss")
        input = input.to(dtype)
        lookup.validate_targets((target < 0) | (target >= classes), RuntimeError, "target out of range")
        groups = lookup.class_groups
        score = autograd_collectives.reduce(lookup.local_score(input, target, lookup.local_mask(target)), groups)
        (score,) = autograd_collectives.replicate_in([score], groups)
        own = _reshape_along(local_classes, dim, input.ndim) if dim else local_classes
        not_target = own != (target.reshape(-1, 1) if dim else target)
        violation = torch.relu(margin - (score.reshape(-1, 1) if dim else score) + input) * not_target
        losses = (violation if p == 1 else violation.square()).sum(dim).reshape(target.shape) / classes
        return losses if weight is None else losses * weight[target]

    return lookup.plan(local, reduction, weight, target.numel())


@rule(NN.multilabel_margin_loss, exact=True)
def multilabel_margin_loss(input: Operand, target: Operand, reduction=NONE, *, fn):
    """Compare every label with every other class; the class dim is unsharded and its axes shard the batch instead."""
    probe(fn, input, target, reduction)
    _check_shapes(fn, input, target, reduction)
    mesh = input.layout.mesh
    layout = Layout.replicate(mesh, input.shape)
    if input.ndim == 2:
        ((size, axes, shard_sizes),), ((_, class_axes, _),) = input.layout.dims
        parts = [mesh.size(a) for a in class_axes]
        batch_sizes = tuple(n for m in (shard_sizes if axes else (size,)) for n in nested_chunk(m, parts))
        layout = layout.with_dim(0, DimSharding(size, axes + class_axes, batch_sizes if axes + class_axes else ()))
    per_sample = layout.drop_dims([layout.ndim - 1])
    out = per_sample if reduction == NONE else Layout.replicate(mesh, ()).with_partial(layout.shard_axes)
    groups, classes = process_groups(layout, layout.shard_axes), input.shape[-1]
    samples = input.shape[0] if input.ndim == 2 else 1

    def local(input, target):
        raise_if_any_rank(
            (target < -1) | (target >= classes), groups, RuntimeError, "argument #2 'target' is out of range"
        )
        if runtime.active.tracer is not None:
            raise NotImplementedError(
                "multilabel_margin_loss: torch's traced version counts classes after the last label"
            )
        values = fn(input, target, NONE)
        if reduction == NONE:
            return values
        loss_sum = values.sum(dtype=accumulate_dtype(values.dtype))
        return (loss_sum / samples if reduction == MEAN else loss_sum).to(values.dtype)

    return Plan(local=local, operands={"input": layout, "target": layout}, layout=out)
