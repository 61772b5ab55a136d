"""flex_attention: functions of scores and masks get global indices, on queries and keys of any layouts.

On plain tensors a row computes the explicit formula: torch's function compiles itself for each function it is given.
`test_flex.py` compares that formula with torch's function.
"""

import math
from functools import partial

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from shardfield import ShardTensor
from tests.harness import T, case, raises

FEW, SOME = {"layouts": 3}, {"layouts": 6}
INVALID = FEW | {"grad": False}  # torch's function refuses gradients on the CPU first


def without_autocast(function):
    """Return a function that computes in the dtype of its operands, as torch's functions do under autocast."""

    def run(q, *args):
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *args)

    return run


@without_autocast
def explicit(q, k, v, score_mod=None, mask_mod=None, scale=None):
    """Return attention, log-sum-exp and largest score by the formula, with the functions called on index tensors."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    index = [torch.arange(n).reshape([n if d == e else 1 for e in range(4)]) for d, n in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *index)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*index), scores, -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.where(hidden, 0, torch.where(hidden, 0, scores).softmax(-1))
    lse = torch.where(hidden, 0, scores).logsumexp(-1)
    return weights @ v, torch.where(hidden[..., 0], -math.inf, lse), scores.amax(-1).detach()


def flex(score_mod=None, mask_mod=None, block=2, per_sample=False, lse=False, **options):
    """Return a call of flex_attention. `score_mod(*tables)` and `mask_mod(*tables)` return the functions to pass."""

    def run(q, k, v, *tables):
        score = None if score_mod is None else score_mod(*tables)
        mask = None if mask_mod is None else mask_mod(*tables)
        if not any(isinstance(t, ShardTensor) for t in (q, k, v)):
            found = explicit(q, k, v, score, mask, options.get("scale"))
            return found[:2] if lse else found[0]
        blocks = None
        if mask is not None:
            lead = (q.shape[0], q.shape[1]) if per_sample else (None, None)
            blocks = create_block_mask(mask, *lead, q.shape[2], k.shape[2], device=str(q.device), BLOCK_SIZE=block)
        found = flex_attention(q, k, v, score_mod=score, block_mask=blocks, return_lse=lse, **options)
        if lse:
            return found[0], found[1]
        return found

    return run


def causal(*tables):
    return lambda b, h, i, j: i >= j


def window():
    return lambda b, h, i, j: (i - j).abs() <= 1


def documents(ids):
    return lambda b, h, i, j: ids[i] == ids[j]


def nothing():
    return lambda b, h, i, j: (i < 0) | (j > 5)


def alibi():
    return lambda s, b, h, i, j: s - (h + 1) * 0.3 * (i - j).abs()


def by_sample():
    return lambda s, b, h, i, j: s + 0.1 * b * j - 0.2 * h * i


def relative(table):
    return lambda s, b, h, i, j: s + table[h, i - j + 6]


def qkv(heads=2, key_heads=None, rows=7, columns=7, batch=2, key_batch=None, dtype=torch.float64):
    keys = [key_batch or batch, key_heads or heads, columns]
    return T(batch, heads, rows, 4, dtype=dtype), T(*keys, 4, dtype=dtype), T(*keys, 3, dtype=dtype)


def ids(shape, generator):
    return torch.tensor([0, 0, 0, 1, 1, 2, 2])


GQA = flex(alibi, causal, enable_gqa=True)
CASES = [
    case(flex(), *qkv(), options=SOME | {"name": "flex"}),
    case(flex(scale=0.3), *qkv(rows=5, columns=9), options=FEW | {"name": "flex, scale, cross"}),
    case(flex(alibi), *qkv(), options=SOME | {"name": "flex, alibi"}),
    case(flex(by_sample), *qkv(), options={"layouts": 10, "name": "flex, by sample and head"}),
    case(flex(relative), *qkv(), T(2, 13), options=SOME | {"name": "flex, learned relative bias"}),
    case(flex(None, causal), *qkv(), options=SOME | {"name": "flex, causal"}),
    case(flex(by_sample, window), *qkv(rows=9, columns=9), options={"layouts": 10, "name": "flex, window"}),
    case(flex(None, window, block=4, per_sample=True), *qkv(), options=FEW | {"name": "flex, window per sample"}),
    case(flex(None, documents), *qkv(), T(7, fill=ids, shard_dims=()), options=SOME | {"name": "flex, documents"}),
    case(flex(relative, causal), *qkv(), T(2, 13), options=FEW | {"name": "flex, learned bias, causal"}),
    case(flex(alibi, nothing), *qkv(), options=FEW | {"name": "flex, rows without keys"}),
    case(flex(alibi, window, lse=True), *qkv(), options=SOME | {"name": "flex, log-sum-exp"}),
    case(GQA, *qkv(4, 2), options=SOME | {"name": "flex, grouped queries"}),
    case(GQA, *qkv(4, 1, key_batch=1), options=FEW | {"name": "flex, keys of one sample"}),
    case(flex(None, causal), *qkv(rows=1), options=FEW | {"name": "flex, one query"}),
    case(flex_attention, *[T(2, 7, 4)] * 3, options=INVALID | raises(NotImplementedError, "must be 4D tensors")),
    case(
        partial(flex_attention, enable_gqa=True),
        *qkv(4, 3),
        options=INVALID | raises(ValueError, "multiple of kv heads") | {"name": "flex, heads in no groups"},
    ),
    case(flex_attention, *qkv(4, 2), options=INVALID | raises(ValueError, "the same number of heads")),
    case(flex_attention, *qkv(key_batch=1), options=INVALID | raises(ValueError, "the same batch size")),
    case(flex(), *qkv(dtype=torch.float32), options=FEW | {"tolerance": 1e-5, "name": "flex, float32"}),
]
