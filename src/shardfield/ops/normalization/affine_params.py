"""Helpers of all normalization layers: affine parameters, result dtypes, memory formats."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat.autocast import stack
from ...comm import autograd_collectives
from ...dispatch.empty_shards import connected
from ...dispatch.plan import Operand, Plan, process_groups
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from .._common.probe import probe


def probe_results(fn: Callable, *args: Any) -> tuple[Tensor, ...]:
    """Return the results of `fn` on operands with one element per dim: their dtypes are those of the real call."""
    out = probe(fn, *args, single=True)
    return out if isinstance(out, tuple) else (out,)


class AffineParams:
    """Redistribute weight and bias to the sharding of the input dims that they scale."""

    def __init__(
        self, layout: Layout, dims: Sequence[Sequence[DimSharding]], weight: Operand | None, bias: Operand | None
    ):
        self.layout = Layout.make(layout.mesh, dims).bare
        self.over = process_groups(layout, sorted(set(layout.shard_axes) - set(self.layout.shard_axes)))
        self.sources = [None if p is None else p.layout for p in (weight, bias)]
        self.in_place = all(s is None or s is self.layout for s in self.sources)
        # Weight and bias with one dtype and layout are redistributed in one message.
        same = weight is not None and bias is not None and weight.dtype == bias.dtype
        self.paired = same and self.sources[0] is self.sources[1] is not self.layout

    def redistribute(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
        """Return this rank's shards of weight and bias."""
        if self.in_place:
            return [weight, bias]
        if self.paired:
            assert weight is not None and bias is not None and self.sources[0] is not None
            both = stack([weight, bias])
            return list(redistribute(both, self.sources[0].insert(0, 2), self.layout.insert(0, 2)).unbind())
        pairs = zip((weight, bias), self.sources, strict=True)
        return [p if p is None or s is None else redistribute(p, s, self.layout) for p, s in pairs]

    def replicate_in(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
        """Return this rank's shards; their gradients are summed over the axes that shard the input but not them."""
        local = self.redistribute(weight, bias)
        replicated = iter(autograd_collectives.replicate_in([p for p in local if p is not None], self.over))
        return [None if p is None else next(replicated) for p in local]


def norm_plan(local: Callable, input: Operand, source: Layout, layout: Any, **operands: Layout) -> Plan:
    """Build a plan whose `local` redistributes the parameters itself."""
    return Plan(
        local=local,
        layout=layout,
        operands=operands if input.layout is source else operands | {"input": source},
        complete_grads=list(inspect.signature(local).parameters),
    )


def on_kernel(layout: Layout, kernel: Callable, result: torch.dtype) -> Callable:
    """Return `kernel(input, weight, bias)` for shards of `layout`, some of which may be empty."""

    def run(input: Tensor, *params: Tensor | None) -> Tensor:
        return kernel(input, *params) if input.numel() else empty_result(input, params, result)

    return connected(run, [layout])


def empty_result(input: Tensor, parameters: Sequence[Tensor | None], result: torch.dtype) -> Tensor:
    """Return the result of a rank with an empty shard: torch's kernels refuse some empty shapes.

    The parameters are in its graph: all ranks must send the messages of backward.
    """
    out = input.to(result, copy=True)
    for parameter in parameters:
        if parameter is not None:
            out = out + 0 * parameter.sum().to(result)
    return out


def kernel_params(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias for torch's batch_norm; on a device, the one that is missing becomes ones or zeros.

    CUDA's backward with only one of them raises. Only ranks with data would raise; the others would wait for them.
    """
    given = bias if weight is None else weight
    if given is None or given.device.type == "cpu":
        return weight, bias
    return (
        torch.ones_like(given) if weight is None else weight,
        torch.zeros_like(given) if bias is None else bias,
    )


def kernel_memory_format(input: Tensor) -> torch.memory_format | None:
    """Return the memory format that torch's CPU kernels detect for `input`; None if it has none of them."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.ndim)
    if input.is_contiguous():
        return torch.contiguous_format
    return last if last is not None and input.is_contiguous(memory_format=last) else None


def match_memory_format(grad: Tensor, input: Tensor) -> Tensor:
    """Return `grad` in the memory format of `input`, for torch's backward of batch_norm.

    With a dim of size 1 the memory format is ambiguous. torch's CPU kernel then assumes one format for both tensors and
    is wrong if they differ. Shards can have dims of size 1 where the global tensor has none.
    """
    found = kernel_memory_format(input)
    return grad if found is None else grad.contiguous(memory_format=found)


def fix_grad_format(value: Tensor, input: Tensor) -> Tensor:
    """Convert the gradient of torch's batch_norm of `input` as in `match_memory_format`; return `value`."""
    ambiguous = value.requires_grad and 1 in input.shape and input.device.type == "cpu"
    found = kernel_memory_format(input) if ambiguous else None
    if found is not None:
        value.register_hook(lambda grad: grad.contiguous(memory_format=found))
    return value
