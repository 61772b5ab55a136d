"""varlen_attn: documents of any lengths, packed one after the other, with tokens, heads and features sharded.

torch's operator has no CPU kernel, so that on plain tensors a row computes each document by the formula.
"""

import inspect
import math

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from shardfield import ShardTensor
from tests.harness import T, case
from tests.ops.attention.flex_cases import without_autocast

FEW, SOME = {"layouts": 4}, {"layouts": 8}


@without_autocast
def explicit(q, k, v, rows, keys, left, right):
    """Return attention within each document, and the log-sum-exp; rows of no document are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    outs, sums = [], []
    for d in range(len(rows) - 1):
        a, b, c, e = rows[d], rows[d + 1], keys[d], keys[d + 1]
        scores = torch.einsum("ihd,jhd->hij", q[a:b], k[c:e]) / math.sqrt(q.shape[2])
        at, of = torch.arange(b - a)[:, None] + (e - c) - (b - a), torch.arange(e - c)
        hidden = (of < at - left if left >= 0 else of < -1) | (of > at + right if right >= 0 else of < -1)
        scores = scores.masked_fill(hidden, -math.inf)
        none = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(none, 0)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1).masked_fill(none, 0), v[c:e]))
        sums.append(scores.logsumexp(-1).masked_fill(none[..., 0], -math.inf) if e > c else scores.sum(-1) - math.inf)
    last = q.shape[0] - rows[-1]
    outs.append(q.new_zeros(last, q.shape[1], v.shape[2]))
    sums.append(q.new_full((q.shape[1], last), -math.inf))
    return torch.cat(outs), torch.cat(sums, 1)


def packed(rows, keys=None, left=-1, right=-1, lse=False):
    """Return a call of varlen_attn with documents that begin at these rows and keys."""
    keys = rows if keys is None else keys

    def run(q, k, v):
        if not any(isinstance(t, ShardTensor) for t in (q, k, v)):
            found = explicit(q, k, v, rows, keys, left, right)
            return found if lse else found[0]
        positions = [torch.tensor(n, dtype=torch.int32, device=q.device) for n in (rows, keys)]
        sizes = [max(b - a for a, b in zip(n, n[1:], strict=False)) for n in (rows, keys)]
        options = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        aux = AuxRequest(lse=True) if lse else None
        return varlen_attn(q, k, v, *positions, *sizes, window_size=(left, right), return_aux=aux, **options)

    return run


def qkv(tokens=11, keys=None, heads=2, key_heads=None):
    keys = [keys or tokens, key_heads or heads]
    return T(tokens, heads, 4), T(*keys, 4), T(*keys, 4)


DOCUMENTS = (0, 2, 3, 9, 11)
CASES = [
    case(packed(DOCUMENTS), *qkv(), options=SOME | {"name": "packed"}),
    case(packed((0, 11)), *qkv(), options=FEW | {"name": "packed, one document"}),
    case(packed(DOCUMENTS, right=0), *qkv(), options=SOME | {"name": "packed, causal"}),
    case(packed(DOCUMENTS, left=2, right=0), *qkv(), options=SOME | {"name": "packed, sliding window"}),
    case(packed(DOCUMENTS, left=1, right=2), *qkv(), options=FEW | {"name": "packed, window of both sides"}),
    case(packed(DOCUMENTS, left=1), *qkv(), options=FEW | {"name": "packed, window of one side"}),
    case(packed((0, 3, 3, 8)), *qkv(), options=SOME | {"name": "packed, an empty document and padding"}),
    case(packed((0, 2, 7, 11), (0, 4, 4, 9)), *qkv(keys=9), options=SOME | {"name": "packed, other keys"}),
    case(packed((0, 2, 7, 11), (0, 4, 6, 9), right=0), *qkv(keys=9), options=FEW | {"name": "packed, other, causal"}),
    case(packed((0, 5, 11), lse=True), *qkv(), options=FEW | {"name": "packed, log-sum-exp"}),
]
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.12-2.15
    grouped = case(
        packed(DOCUMENTS, right=0), *qkv(heads=4, key_heads=2), options=SOME | {"name": "packed, grouped queries"}
    )
    CASES.append(grouped)
