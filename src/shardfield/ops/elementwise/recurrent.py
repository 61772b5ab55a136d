"""Recurrent layers and cells. Sequences are independent, so the batch is sharded and each rank has all time steps.

If time steps or features are sharded, one all_to_all moves the sharding to the batch. After it, ranks work without
communication. The adjoint is the reverse all_to_all, and an all_reduce of the parameter gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout, balanced


def batch_sharding(input: Operand, states: Sequence[Operand], batch: int) -> tuple[DimSharding, ...]:
    """Return the input's sharding of the batch if nothing else is sharded, else one over all sharding axes."""
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
    """Append one zero sequence to an empty batch: device kernels need one, and errors must be raised on every rank."""
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, 1])


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", merged=True)
def recurrent(input: Operand, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=False, *,
              fn):  # fmt: skip
    """Run torch's layer on this rank's sequences, with the sharding of time steps or features moved to the batch."""
    if not isinstance(has_biases, bool) or (dropout and train):  # packed sequences; dropout draws random numbers inside
        return None
    batch = 0 if batch_first else 1
    states = [hx] if isinstance(hx, Operand) else list(hx)
    if input.ndim != 3 or any(s.ndim != 3 for s in states):
        return None
    if any(s.shape[1] != input.shape[batch] for s in states):
        # torch's float32 kernel on the CPU checks nothing here and reads beyond the end of the states
        sizes = [s.shape[1] for s in states]
        raise RuntimeError(f"{fn.__name__}: initial states are for batches of {sizes}, input has {input.shape[batch]}")
    sharding = batch_sharding(input, states, batch)

    def batch_sharded(shape: Sequence[int], dim: int) -> Layout:
        return Layout.make(
            input.layout.mesh, [sharding if d == dim else (DimSharding(n),) for d, n in enumerate(shape)]
        )

    state_layouts = [batch_sharded(s.shape, 1) for s in states]
    features = states[0].shape[2] * (2 if bidirectional else 1)
    out = batch_sharded([*input.shape[:2], features], batch)

    def local(input, hx, params):
        # a shard of the states or a gathered parameter may be non-contiguous, which cuDNN rejects
        params = [p.contiguous() for p in params]
        local_states = [h.contiguous() for h in ([hx] if isinstance(hx, Tensor) else hx)]
        empty = not input.shape[batch]
        if empty:
            input, local_states = pad_empty_batch(input, batch), [pad_empty_batch(h, 1) for h in local_states]
        state: Any = local_states[0] if isinstance(hx, Tensor) else local_states
        outputs = fn(input, state, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        if not empty:
            return outputs
        return tuple(t.narrow(1 if i else batch, 0, 0) for i, t in enumerate(outputs))

    operands: Any = {
        "input": batch_sharded(input.shape, batch),
        "hx": state_layouts[0] if isinstance(hx, Operand) else state_layouts,
    }
    return Plan(local=local, layout=[out, *state_layouts], operands=operands | {"params": replicated_layouts(params)})


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", merged=True)
def recurrent_cell(input: Operand, hx, w_ih, w_hh, b_ih=None, b_hh=None, *, fn):
    """Run one time step on this rank's sequences."""
    states = [hx] if isinstance(hx, Operand) else list(hx)
    if any(t.ndim != 2 or t.shape[0] != input.shape[0] for t in (input, *states)):
        return None
    rows = batch_sharding(input, states, 0)
    state_layouts = [Layout.make(input.layout.mesh, [rows, (DimSharding(s.shape[1]),)]) for s in states]
    is_pair = not isinstance(hx, Operand)

    def local(input, hx, w_ih, w_hh, b_ih, b_hh):
        local_states = list(hx) if is_pair else [hx]
        empty = not input.shape[0]
        if empty:
            input, local_states = pad_empty_batch(input, 0), [pad_empty_batch(h, 0) for h in local_states]
        outputs = fn(input, local_states if is_pair else local_states[0], w_ih, w_hh, b_ih, b_hh)
        if not empty:
            return outputs
        return tuple(t[:0] for t in outputs) if is_pair else outputs[:0]

    names = {"w_ih": w_ih, "w_hh": w_hh, "b_ih": b_ih, "b_hh": b_hh}
    operands: Any = {n: replicated_layouts([p])[0] for n, p in names.items() if p is not None}
    operands |= {"input": Layout.make(input.layout.mesh, [rows, (DimSharding(input.shape[1]),)])}
    operands |= {"hx": state_layouts if is_pair else state_layouts[0]}
    return Plan(local=local, layout=state_layouts if is_pair else state_layouts[0], operands=operands)
