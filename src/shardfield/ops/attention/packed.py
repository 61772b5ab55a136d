"""`torch.nn.attention.varlen.varlen_attn` on sharded tokens: documents of any lengths, one after the other.

Tokens stay on their ranks. Of a document that continues on other ranks, a rank receives the keys that its rows read. It
then calls torch's kernel with the documents, and parts of documents, that its rows belong to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import runtime
from ..._compat.autocast import concatenate
from ...dispatch.arguments import to_full_tensor
from ...errors import ShardingError
from ...layout import Span
from ...tensor import ShardTensor, torch_function
from .._common.derived import kept_with_tensor
from .ranged import attend, precision, weigh

OPERATOR = "torch_attn._varlen_attn.default"
UNSUPPORTED = ("seqused_k", "block_table", "num_splits")


class Part(NamedTuple):
    """The rows of one document among some rows, and the keys that they read, as global indices.

    `document`: all keys of the document. `first`: the position of the first row among them.
    """

    rows: Span
    keys: Span
    document: Span
    first: int


@dataclass(frozen=True)
class Documents:
    """Packed documents: document d has the rows from `rows[d]` to `rows[d + 1]`, and its keys likewise.

    A row reads the keys from `left` before its own position to `right` after it; -1 is no limit. The last row of a
    document has the position of its last key.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    left: int
    right: int

    def parts(self, first: int, stop: int) -> list[Part]:
        """Return the parts of the documents that rows `first` to `stop` belong to, also of those without rows."""
        found = []
        begin = max(bisect_right(self.rows, first) - 1, 0)
        for d in range(begin, len(self.rows) - 1):
            (row, end), (key, last) = self.rows[d : d + 2], self.keys[d : d + 2]
            if row >= stop:
                break
            a, b = max(first, row), max(min(stop, end), max(first, row))
            at = a - row + (last - key) - (end - row)
            low = 0 if self.left < 0 else at - self.left
            high = last - key if self.right < 0 else at + (b - a) + self.right
            low, high = (min(max(n, 0), last - key) for n in (low, high))
            found.append(Part(Span(a, b), Span(key + low, key + max(low, high)), Span(key, last), at))
        return found

    def columns(self, first: int, stop: int, size: int) -> Span:
        """Return the range of keys that the rows `first` to `stop` read."""
        spans = [p.keys for p in self.parts(first, stop) if p.keys.start < p.keys.stop and p.rows.start < p.rows.stop]
        if not spans:
            return Span(0, min(1, size))
        return Span(spans[0].start, spans[-1].stop)

    def compute(self, query, key, value, offsets, captured, scale) -> tuple[Tensor, Tensor, Tensor]:
        """Compute local rows, by torch's kernel where there is one; rows that belong to no document are zero."""
        row, column = offsets[2:]
        parts = self.parts(row, row + query.shape[2])
        parts = [part for part in parts if part.rows.start < part.rows.stop]
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        aligned = self.right == 0 or self.left == self.right == -1  # parts of documents have the kernel's alignment
        if parts and query.is_cuda and is_half and aligned:
            found = [(parts[0].rows.start, *self._run_kernel(query, key, value, parts, row, column, scale))]
        else:
            found = [(p.rows.start, *self._compute_part(query, key, value, p, row, column, scale)) for p in parts]
        return _placed(found, query, key, value, row)

    def _compute_part(self, query, key, value, part: Part, row: int, column: int, scale: float):
        q = query[:, :, part.rows.start - row : part.rows.stop - row]
        k, v = (t[:, :, part.keys.start - column : part.keys.stop - column] for t in (key, value))
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=precision(q))
        group, dtype = q.shape[1] // k.shape[1], precision(q)
        k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        scores = q.to(dtype) @ k.to(dtype).mT * scale
        at = torch.arange(part.first, part.first + q.shape[2], device=q.device)[:, None]
        of = torch.arange(k.shape[2], device=q.device) + (part.keys.start - part.document.start)
        if self.left >= 0:
            scores = scores.masked_fill(of < at - self.left, -torch.inf)
        if self.right >= 0:
            scores = scores.masked_fill(of > at + self.right, -torch.inf)
        return weigh(scores, q, v)[:2]

    def _run_kernel(self, query, key, value, parts: Sequence[Part], row: int, column: int, scale: float):
        """Call torch's kernel with the parts. Their keys are contiguous: only the first and the last are incomplete."""
        rows = Span(parts[0].rows.start, parts[-1].rows.stop)
        every = self.parts(rows.start, rows.stop)  # documents without rows have keys between those of others
        keys = [p.keys if p.rows.start < p.rows.stop else p.document for p in every]
        keys = [keys[0], *(Span(p.document.start, k.stop) for p, k in zip(every[1:], keys[1:], strict=True))]
        row_sizes, key_sizes = [p.rows.stop - p.rows.start for p in every], [s.stop - s.start for s in keys]
        q = query[0, :, rows.start - row : rows.stop - row].transpose(0, 1)
        k, v = (t[0, :, keys[0].start - column : keys[-1].stop - column].transpose(0, 1) for t in (key, value))
        positions = [
            torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(q.device, non_blocking=True)
            for n in (row_sizes, key_sizes)
        ]
        from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415 - it defines operators

        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # torch 2.11 has no such option
        out, lse = varlen_attn(
            q,
            k,
            v,
            *positions,
            max(row_sizes),
            max(key_sizes),
            scale=scale,
            window_size=(self.left, self.right),
            return_aux=AuxRequest(lse=True),
            **grouped,
        )
        return out.transpose(0, 1)[None], lse[None]


def _placed(
    found: Sequence[tuple], query: Tensor, key: Tensor, value: Tensor, row: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Join (first row, result, log-sum-exp) of parts; rows between them are zero, and no score of theirs is largest."""
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    at, lead = row, query.shape[:2]
    for start, out, lse in [*found, (row + query.shape[2], None, None)]:
        if start > at:
            outs.append(query.new_zeros(*lead, start - at, value.shape[3]))
            sums.append(query.new_full((*lead, start - at), -torch.inf, dtype=precision(query)))
        if out is not None:
            outs.append(out)
            sums.append(lse)
            at = start + out.shape[2]
    # The result is in the graph of every operand, also where no row reads a key: backward sends messages.
    result = concatenate(outs, 2) + sum(t.reshape(-1)[:0].sum() for t in (query, key, value))
    lse = concatenate(sums, 2)
    return result, lse, lse.detach()


def positions_of(positions: Tensor, name: str, tokens: int) -> tuple[int, ...]:
    """Return cumulative positions on the host, checked. They are read once as long as the tensor is not written."""

    def read() -> tuple[int, ...]:
        full = to_full_tensor(positions) if isinstance(positions, ShardTensor) else positions
        return tuple(int(n) for n in full.tolist())

    values = read() if isinstance(positions, ShardTensor) else kept_with_tensor(positions, ("packed",), read)
    if not values or values[0] or any(a > b for a, b in zip(values, values[1:], strict=False)) or values[-1] > tokens:
        raise ValueError(
            f"varlen_attn: {name} must increase from 0 to at most {tokens}, the tokens; it is {values[:8]}"
        )
    return values


def attend_documents(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run torch's operator on sharded tokens (token, head, feature)."""
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    refused = [name for name in UNSUPPORTED if given.get(name) is not None]
    if refused or given["cu_seq_k"] is None:
        raise ShardingError(f"varlen_attn: no rule for {', '.join(refused) or 'cu_seq_k=None'} on sharded tokens")
    query, key, value = given["query"], given["key"], given["value"]
    if any(t.ndim != 3 for t in (query, key, value)) or key.shape[:2] != value.shape[:2]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"varlen_attn: query, key and value are (tokens, heads, features), not {shapes}")
    left, right = given.get("window_size") or (-1, -1)
    documents = Documents(
        positions_of(given["cu_seq_q"], "cu_seq_q", query.shape[0]),
        positions_of(given["cu_seq_k"], "cu_seq_k", key.shape[0]),
        left,
        0 if given.get("is_causal") else right,
    )
    if len(documents.rows) != len(documents.keys):
        sizes = f"{len(documents.rows)} and {len(documents.keys)}"
        raise ValueError(f"varlen_attn: cu_seq_q and cu_seq_k have {sizes} positions: they must agree")
    scale = query.shape[2] ** -0.5 if given.get("scale") is None else given["scale"]
    operands = [t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
    out, lse, _ = torch_function(ShardTensor, attend, (), (*operands, [], documents, scale), {})
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of dropout, which there is none of
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), unused


runtime.active.registry.register_named(OPERATOR, attend_documents)
