"""natten's neighborhood attention on sharded fields: windows with strides, dilation and causal dims, shared heads.

natten's kernels have no build for CPUs: a function with its name, parameters, results and errors stands in.
`tests/zoo/test_natten.py` runs natten itself.
"""

import math

import torch

from shardfield.ops.attention.natten import on_shards
from tests.harness import T, case, raises

FEW, SOME = {"layouts": 4}, {"layouts": 8}


def window(n, size, stride, step, causal):
    """Return which cells of a dim (columns) each cell (row) reads."""
    reads = torch.zeros(n, n, dtype=torch.bool)
    for residue in range(step):
        cells = range(residue, n, step)
        for i, cell in enumerate(cells):
            leader = min(i // stride * stride + (stride - 1 if causal else stride // 2), len(cells) - 1)
            first = leader - size + 1 if causal else min(max(leader - size // 2, 0), len(cells) - size)
            last = i if causal else first + size - 1
            reads[cell, cells[max(first, 0) : last + 1]] = True
    return reads


def neighborhood_attention_generic(
    query,
    key,
    value,
    kernel_size,
    stride=1,
    dilation=1,
    is_causal=False,
    scale=None,
    additional_keys=None,
    additional_values=None,
    attention_kwargs=None,
    backend=None,
    return_lse=False,
):
    space = query.shape[1:-2]
    dims = [x if isinstance(x, tuple) else (x,) * len(space) for x in (kernel_size, stride, dilation, is_causal)]
    if any(len(x) != len(space) for x in dims) or any(s * d > n for s, d, n in zip(*dims[::2], space, strict=True)):
        raise ValueError("the product of kernel size and dilation cannot be larger than input size")
    if len(space) == 1 and is_causal and kernel_size == space[0]:
        raise NotImplementedError("causal attention has no kernel")  # natten takes a window of all cells for attention
    reads = torch.ones(1, 1, dtype=torch.bool)
    for n, *options in zip(space, *dims, strict=True):
        reads = (reads[:, None, :, None] & window(n, *options)[None, :, None, :]).flatten(0, 1).flatten(1)
    q, k, v = (t.flatten(1, -3) for t in (query, key, value))
    if additional_keys is not None:
        k, v = torch.cat([k, additional_keys], 1), torch.cat([v, additional_values], 1)
        reads = torch.cat([reads, torch.ones(len(reads), additional_keys.shape[1], dtype=torch.bool)], 1)
    k, v = (t.repeat_interleave(query.shape[-2] // key.shape[-2], -2) for t in (k, v))
    scores = torch.einsum("bqhf,bkhf->bqhk", q, k) * (scale or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~reads[:, None].to(scores.device), -math.inf)
    out = torch.einsum("bqhk,bkhf->bqhf", scores.softmax(-1), v).unflatten(1, space)
    return (out, scores.logsumexp(-1).unflatten(1, space)) if return_lse else out


attend = on_shards(neighborhood_attention_generic)


def qkv(*space, heads=2, shared=1):
    return T(2, *space, heads, 3), T(2, *space, heads // shared, 3), T(2, *space, heads // shared, 2)


def with_more(q, k, v, keys, values):
    return attend(q, k, v, 3, additional_keys=keys, additional_values=values, return_lse=True)


CASES = [
    case(attend, *qkv(8), 3, options=SOME),
    case(attend, *qkv(7), 4, options=FEW | {"name": "a window of even size"}),
    case(attend, *qkv(9, 4), (3, 2), dilation=(2, 1), return_lse=True, options=SOME | {"name": "2-D, with lse"}),
    case(attend, *qkv(9), 3, is_causal=True, dilation=2, options=SOME | {"name": "causal"}),
    case(attend, *qkv(6, 5), (3, 5), is_causal=(True, False), options=SOME | {"name": "causal along one dim"}),
    case(attend, *qkv(9, 4), (4, 3), stride=(2, 1), options=SOME | {"name": "a stride along one dim"}),
    case(attend, *qkv(8), 4, stride=4, scale=0.3, options=FEW | {"name": "blocks"}),
    case(attend, *qkv(5, 4, heads=4, shared=2), 3, options=SOME | {"name": "shared heads"}),
    case(with_more, *qkv(5, 4), T(2, 3, 2, 3), T(2, 3, 2, 2), options=SOME),
    case(attend, *qkv(4, 2, 3), (3, 1, 3), options=FEW | {"name": "3-D"}),
    case(attend, *qkv(5), 7, options=FEW | raises(ValueError, "larger than input size")),
    case(attend, *qkv(5), (3, 3), options=FEW | raises(ValueError, "larger than input size") | {"name": "two sizes"}),
]
