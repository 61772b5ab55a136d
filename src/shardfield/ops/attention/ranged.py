"""Attention whose rows read known ranges of keys: each rank keeps its rows and receives the keys between.

`attend` is the rule of all such calls. A `Form` returns which keys some rows read, and computes local rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm import autograd_collectives
from ...comm.route import Route, RowRequest, fetch_route
from ...debug import explain
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout, Span, balanced, shard_sizes_of, starts
from .._common.autocast import autocast_disabled
from .._common.together import empty_result_of, together
from .sdpa import exchange_together

SEQUENCE = 2  # operands are (batch, heads, sequence, features)


class Form(Protocol):
    """A kind of attention."""

    def columns(self, first: int, stop: int, size: int) -> Span:
        """Return the range of keys that the rows `first` to `stop` read: at least one key if there is one."""
        ...

    def compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Sequence[int],
        captured: Sequence[Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, the log-sum-exp and the largest score of each row.

        `offsets`: global indices of the first sample, head, row and key of the local tensors.
        """
        ...


def attend(query, key, value, captured, form, scale):
    """Represent torch's functions in the registry: the rule below is registered for this function."""
    raise NotImplementedError


@rule(attend, exact=True)
def attend_ranges(query: Operand, key: Operand, value: Operand, captured, form: Form, scale):
    """Compute each rank's rows with the keys that they read."""
    group = query.shape[1] // max(key.shape[1], 1)
    rows = _query_layout(query, key, value, group)
    keys = _key_layout(rows, key, group)
    values = keys.with_dim(3, DimSharding(value.shape[3]))
    fetch = _plan_fetch(rows, keys, form)
    offsets = [*(rows.span(d).start for d in range(3)), fetch.start]
    lead = rows.dims[:3]
    outputs = [Layout.make(rows.mesh, dims) for dims in ([*lead, (DimSharding(value.shape[3]),)], lead, lead)]

    def local(query, key, value, captured):
        explain.record_outcome(f"rule: {fetch.summary}")
        if fetch.route is not None:
            move = partial(autograd_collectives.exchange, route=fetch.route, group=fetch.group)
            key, value = exchange_together(move, key, value)
        query, key, value, *captured = together([query, key, value, *captured])
        if not query.numel():
            sources = [query, key, value, *captured]
            shapes = [x.local_shape for x in outputs]
            kinds = (query.dtype, precision(query), precision(query))
            out, lse, largest = (
                empty_result_of(sources, shape, kind, query) for shape, kind in zip(shapes, kinds, strict=True)
            )
            return out, lse, largest.detach()
        with autocast_disabled(query):  # as torch's functions
            return form.compute(query, key, value, offsets, captured, scale)

    operands: Any = {"query": rows, "key": keys, "value": values}
    operands["captured"] = [Layout.replicate(rows.mesh, c.shape) for c in captured]
    return Plan(local=local, layout=outputs, operands=operands, own=True)


def precision(query: Tensor) -> torch.dtype:
    """Return the dtype of scores."""
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def weigh(scores: Tensor, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the log-sum-exp and the largest score of each row of `scores`; hidden ones are -inf."""
    largest = scores.detach().amax(-1)
    hidden = largest == -math.inf
    # a row without keys has weights of zero, and no gradient that is not a number
    lse = scores.masked_fill(hidden[..., None], 0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden[..., None], 0)
    return weights.to(query.dtype) @ value.to(query.dtype), lse.masked_fill(hidden, -math.inf), largest


def _query_layout(query: Operand, key: Operand, value: Operand, group: int) -> Layout:
    """Return the layout of the rows: axes that shard features, or keys only, shard the sequence."""
    layout = query.layout
    batch, heads, (sequence,) = layout.dims[0], layout.dims[1], layout.dims[SEQUENCE]
    if group > 1 and any(n % group for f in heads for n in f.shard_sizes):
        heads = (DimSharding(query.shape[1]),)  # a shard would end inside a group
    kept = {a for f in (*batch, *heads, sequence) for a in f.axes}
    others = {a for x in (layout, key.layout, value.layout) for a in x.shard_axes} - kept
    if others:
        axes = tuple(sorted({*sequence.axes, *others}))
        parts = math.prod(layout.mesh.size(a) for a in axes)
        sequence = DimSharding(sequence.size, axes, balanced(sequence.size, parts))
    return Layout.make(layout.mesh, [batch, heads, (sequence,), (DimSharding(query.shape[3]),)])


def _key_layout(rows: Layout, key: Operand, group: int) -> Layout:
    """Return the layout in which keys enter: samples and heads as the rows, the sequence sharded or replicated."""
    batch = rows.dims[0] if key.shape[0] == rows.shape[0] else (DimSharding(key.shape[0]),)
    heads = tuple(DimSharding(f.size // group, f.axes, tuple(n // group for n in f.shard_sizes)) for f in rows.dims[1])
    (sequence,) = key.layout.dims[SEQUENCE]
    same = key.layout.nontrivial_axes(sequence.axes) == rows.nontrivial_axes(rows.axes_of(SEQUENCE))
    if not same or not key.layout.is_sharded(SEQUENCE) or len(sequence.axes) != 1:
        sequence = DimSharding(key.shape[SEQUENCE])
    return Layout.make(rows.mesh, [batch, heads, (sequence,), (DimSharding(key.shape[3]),)])


class _Fetch(NamedTuple):
    """How this rank receives its keys. `start`: global index of the first one that it then has."""

    route: Route | None
    group: ProcessGroup | None
    start: int
    summary: str


def _plan_fetch(rows: Layout, keys: Layout, form: Form) -> _Fetch:
    (sharding,) = keys.dims[SEQUENCE]
    if not keys.is_sharded(SEQUENCE):
        return _Fetch(None, None, 0, "keys gathered" if rows.is_sharded(SEQUENCE) else "local")
    (axis,), size = sharding.axes, sharding.size
    (of_rows,) = rows.dims[SEQUENCE]
    row_sizes = shard_sizes_of(of_rows)
    spans = [form.columns(s, s + n, size) for s, n in zip(starts(row_sizes), row_sizes, strict=True)]
    requests = [[RowRequest(s.start, s.stop - s.start)] for s in spans]
    coord = rows.coords[axis]
    route = fetch_route(SEQUENCE, sharding.shard_sizes, coord, requests, [s.stop - s.start for s in spans])
    summary = "keys gathered" if all(s == Span(0, size) for s in spans) else "halo of keys"
    return _Fetch(route, keys.mesh.get_group(axis), spans[coord].start, summary)
