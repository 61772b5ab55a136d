"""Recurrent layers. The sequences of a batch know nothing of each other: ranks share them, each with all its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout, balanced


def batch_sharding(input: Operand, states: Sequence[Operand], batch: int) -> tuple[DimSharding, ...]:
    """The cut of the batch: where nothing else is cut, that of the input, otherwise over all axes that cut anything."""
    layout = input.layout
    if layout.sharded_dims in ((), (batch,)) and not (
        layout.is_replicated and any(s.layout.shard_axes for s in states)
    ):
        return layout.dims[batch]
    axes = sorted({a for t in (input, *states) for a in t.layout.shard_axes})
    parts = 1
    for axis in axes:
        parts *= layout.mesh.size(axis)
    size = layout.shape[batch]
    return (DimSharding(size, tuple(axes), balanced(size, parts)),)


def replicated_layouts(parameters: Sequence[Operand | None]) -> list[Layout]:
    return [Layout.replicate(p.layout.mesh, p.shape) for p in parameters if p is not None]


def pad_empty_batch(tensor: Tensor, dim: int) -> Tensor:
    """One sequence where a rank has none: kernels of devices want one, and torch's errors are raised on every rank."""
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, 1])


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", merged=True)
def recurrent(input: Operand, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=False, *,
              fn):  # fmt: skip
    """Where steps or features are cut, one all-to-all makes them whole; then no rank waits for another."""
    if not isinstance(has_biases, bool) or (dropout and train):  # packed sequences; numbers that are drawn inside
        return None
    batch = 0 if batch_first else 1
    states = [hx] if isinstance(hx, Operand) else list(hx)
    if input.ndim != 3 or any(s.ndim != 3 for s in states):
        return None
    if any(s.shape[1] != input.shape[batch] for s in states):
        # torch's float32 kernel on the CPU checks nothing here and reads beyond the end of the states
        sizes = [s.shape[1] for s in states]
        raise RuntimeError(f"{fn.__name__}: initial states are for batches of {sizes}, input has {input.shape[batch]}")
    cut = batch_sharding(input, states, batch)

    def laid(shape: Sequence[int], dim: int) -> Layout:
        return Layout.make(input.layout.mesh, [cut if d == dim else (DimSharding(n),) for d, n in enumerate(shape)])

    kept = [laid(s.shape, 1) for s in states]
    features = states[0].shape[2] * (2 if bidirectional else 1)
    out = laid([*input.shape[:2], features], batch)

    def local(input, hx, params):
        # a part of the states need not lie in one piece, and cuDNN wants it to
        given = [h.contiguous() for h in ([hx] if isinstance(hx, Tensor) else hx)]
        empty = not input.shape[batch]
        if empty:
            input, given = pad_empty_batch(input, batch), [pad_empty_batch(h, 1) for h in given]
        state: Any = given[0] if isinstance(hx, Tensor) else given
        found = fn(input, state, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        if not empty:
            return found
        return tuple(t.narrow(1 if i else batch, 0, 0) for i, t in enumerate(found))

    moved: Any = {"input": laid(input.shape, batch), "hx": kept[0] if isinstance(hx, Operand) else kept}
    return Plan(local=local, layout=[out, *kept], operands=moved | {"params": replicated_layouts(params)})


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", merged=True)
def recurrent_cell(input: Operand, hx, w_ih, w_hh, b_ih=None, b_hh=None, *, fn):
    """One step of the same."""
    states = [hx] if isinstance(hx, Operand) else list(hx)
    if any(t.ndim != 2 or t.shape[0] != input.shape[0] for t in (input, *states)):
        return None
    rows = batch_sharding(input, states, 0)
    kept = [Layout.make(input.layout.mesh, [rows, (DimSharding(s.shape[1]),)]) for s in states]
    several = not isinstance(hx, Operand)

    def local(input, hx, w_ih, w_hh, b_ih, b_hh):
        given = list(hx) if several else [hx]
        empty = not input.shape[0]
        if empty:
            input, given = pad_empty_batch(input, 0), [pad_empty_batch(h, 0) for h in given]
        found = fn(input, given if several else given[0], w_ih, w_hh, b_ih, b_hh)
        if not empty:
            return found
        return tuple(t[:0] for t in found) if several else found[:0]

    names = {"w_ih": w_ih, "w_hh": w_hh, "b_ih": b_ih, "b_hh": b_hh}
    moved: Any = {n: replicated_layouts([p])[0] for n, p in names.items() if p is not None}
    moved |= {"input": Layout.make(input.layout.mesh, [rows, (DimSharding(input.shape[1]),)])}
    moved |= {"hx": kept if several else kept[0]}
    return Plan(local=local, layout=kept if several else kept[0], operands=moved)
