"""What normalisation layers share: torch's verdict on a call, and parameters on their way to the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import autograd_collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from .._common.probe import probe


def probe_results(fn: Callable, *args: Any) -> tuple[Tensor, ...]:
    """Return the results of `fn` on operands with one element per dim: their dtypes are those of the real call."""
    out = probe(fn, *args, single=True)
    return out if isinstance(out, tuple) else (out,)


class AffineParams:
    """Weight and bias on their way to the ranks: cut like the dims of the input that they belong to."""

    def __init__(
        self, layout: Layout, dims: Sequence[Sequence[DimSharding]], weight: Operand | None, bias: Operand | None
    ):
        self.layout = Layout.make(layout.mesh, dims).bare
        self.over = process_groups(layout, sorted(set(layout.shard_axes) - set(self.layout.shard_axes)))
        self.sources = [None if p is None else p.layout for p in (weight, bias)]
        self.in_place = all(s is None or s is self.layout for s in self.sources)
        # both in one message
        same = weight is not None and bias is not None and weight.dtype == bias.dtype
        self.paired = same and self.sources[0] is self.sources[1] is not self.layout

    def redistribute(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
        """This rank's part of them."""
        if self.in_place:
            return [weight, bias]
        if self.paired:
            assert weight is not None and bias is not None and self.sources[0] is not None
            both = torch.stack([weight, bias])
            return list(redistribute(both, self.sources[0].insert(0, 2), self.layout.insert(0, 2)).unbind())
        pairs = zip((weight, bias), self.sources, strict=True)
        return [p if p is None or s is None else redistribute(p, s, self.layout) for p, s in pairs]

    def replicate_in(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
        """This rank's part of them, for work that differs from rank to rank."""
        brought = self.redistribute(weight, bias)
        entered = iter(autograd_collectives.replicate_in([p for p in brought if p is not None], self.over))
        return [None if p is None else next(entered) for p in brought]


def norm_plan(local: Callable, input: Operand, source: Layout, layout: Any, **operands: Layout) -> Plan:
    """A plan whose `local` brings the parameters itself."""
    return Plan(
        local=local,
        layout=layout,
        operands=operands if input.layout is source else operands | {"input": source},
        whole=list(inspect.signature(local).parameters),
    )


def empty_result(input: Tensor, parameters: Sequence[Tensor | None], result: torch.dtype) -> Tensor:
    """The result of a rank that holds nothing, in the graph: torch's kernels refuse some such shapes."""
    out = input.to(result, copy=True)
    for parameter in parameters:
        if parameter is not None:
            out = out + 0 * parameter.sum().to(result)
    return out


def kernel_memory_format(input: Tensor) -> torch.memory_format | None:
    """The memory format that torch's kernels on a CPU take `input` for; None where it has none of them."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.ndim)
    if input.is_contiguous():
        return torch.contiguous_format
    return last if last is not None and input.is_contiguous(memory_format=last) else None


def match_memory_format(grad: Tensor, input: Tensor) -> Tensor:
    """`grad` in the order in which `input` lies in memory, for torch's backward of batch_norm.

    On a CPU that reads both in one order where dims of one element leave it open which it is, and is wrong if they
    lie differently. Pieces have such dims where the whole has none.
    """
    found = kernel_memory_format(input)
    return grad if found is None else grad.contiguous(memory_format=found)


def fix_grad_format(value: Tensor, input: Tensor) -> Tensor:
    """What torch's own batch_norm made of `input`: its gradient will come as `match_memory_format` brings it."""
    mistaken = value.requires_grad and 1 in input.shape and input.device.type == "cpu"
    found = kernel_memory_format(input) if mistaken else None
    if found is not None:
        value.register_hook(lambda grad: grad.contiguous(memory_format=found))
    return value
