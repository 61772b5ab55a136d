"""Attention with sequence, heads, batch and features sharded; masks, causal, grouped heads."""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness import T, case, raises

attend = F.scaled_dot_product_attention
SOME = {"layouts": 6}
FEW = {"layouts": 4}


def hidden(shape, generator):
    """Draw a mask in which some rows are fully masked."""
    seen = torch.rand(shape, generator=generator) > 0.4
    seen[..., 1, :] = False
    return seen


def minus_inf(shape, generator):
    bias = torch.randn(shape, dtype=torch.float64, generator=generator)
    return bias.masked_fill(~hidden(shape, generator), -math.inf)


def padded(shape, generator):
    return torch.arange(shape[1]) < torch.tensor([[3], [5], [1]])


def padding(shape, generator):
    """Hide the last keys of the first sample."""
    hidden = torch.zeros(shape, dtype=torch.bool)
    hidden[0, -3:] = True
    return hidden


def attend_then_write(q, k, v):
    """Write into the result, which the math kernel of one device does not save."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q, k, v).mul_(2)


def attend_then_write_view(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        out = attend(q, k, v)
    out.reshape(-1).mul_(2)
    return out


def write_contiguous(q, k, v, *mask, **options):
    """Write into `contiguous` of the result: the result itself, if its dims are in order in memory."""
    out = attend(q, k, v, *mask, **options)
    y = out.contiguous()
    y.add_(1)
    return out, y


def write_contiguous_of_transposed(q, k, v, *mask, **options):
    """Call with heads inside the rows, as models do."""
    return write_contiguous(*(t.transpose(1, 2) for t in (q, k, v)), *mask, **options)


def write_contiguous_math(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return write_contiguous(q, k, v, **options)


def qkv(*lead, rows=7, columns=None, features=4, dtype=torch.float64):
    """Return queries, keys and values."""
    columns = rows if columns is None else columns
    return [T(*lead, n, features, dtype=dtype) for n in (rows, columns, columns)]


def tokens(x):
    """Return a field as tokens (batch, heads, rows times columns, features)."""
    return x.flatten(2).unflatten(1, (2, -1)).transpose(2, 3)


def attend_field(q, k, v, **kwargs):
    """Attend between the cells of fields, and return a field."""
    out = attend(tokens(q), tokens(k), tokens(v), **kwargs)
    return out.transpose(2, 3).flatten(1, 2).unflatten(2, q.shape[2:])


def sliding_window(q, k, v):
    """Attend to the three keys before each query and to its own."""
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return attend(q, k, v, ((distance >= 0) & (distance <= 3)).to(q.device))


def alibi(q, k, v):
    """Attend with a bias that falls with the distance, by a slope for each head."""
    distance = (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])).abs()
    slopes = 0.5 ** torch.arange(1, q.shape[-3] + 1).view(-1, 1, 1)
    return attend(q, k, v, (-slopes * distance).to(q))


def linear_attention(q, k, v):
    """Attend with a kernel in the place of the softmax: sums over keys, which ranks add up."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1))


def causal_linear_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)
    return (q.unsqueeze(-2) @ state).squeeze(-2) / (q * k.cumsum(-2)).sum(-1, keepdim=True)


def slice_attention(x, assign):
    """Pool points into slices, which attend to each other, and give the result to the points, as Transolver does."""
    weights = (x @ assign).softmax(-1)
    slices = weights.mT @ x / (weights.sum(-2).unsqueeze(-1) + 1e-5)
    return weights @ attend(slices, slices, slices)


def lower_triangle(shape, generator):
    """Return the mask of a chunk of the last queries: the last query sees all keys."""
    return torch.ones(shape, dtype=torch.bool).tril(shape[-1] - shape[-2])


def all_hidden(shape, generator):
    return torch.zeros(shape, dtype=torch.bool)


def explicit_causal(q, k, v):
    """Attend by the formula, as models without the fused function do."""
    scores = q @ k.mT * 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def relative_table(q, k, v, table):
    """Attend with a learned bias of each distance, which an index on every rank picks."""
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    return attend(q, k, v, table[distance + q.shape[-2] - 1].permute(2, 0, 1))


def learned_alibi(q, k, v, slopes):
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    return attend(q, k, v, slopes.view(-1, 1, 1) * distance.to(q))


def grow_cache(q, k, v, new_k, new_v):
    """Attend twice while a cache of keys and values grows by new tokens of another layout."""
    k, v = torch.cat([k, new_k], -2), torch.cat([v, new_v], -2)
    first = attend(q, k, v)
    k, v = torch.cat([k, new_k * 2], -2), torch.cat([v, new_v * 2], -2)
    return first + attend(q, k, v)


def multi_head(x, y, in_weight, in_bias, out_weight, out_bias, bias_k=None, bias_v=None, **options):
    """Run the function of nn.MultiheadAttention on tokens (length, batch, width), with two heads."""
    out, weights = F.multi_head_attention_forward(
        *(x, y, y, x.shape[-1], 2, in_weight, in_bias, bias_k, bias_v),
        *(options.pop("add_zero_attn", False), 0.0, out_weight, out_bias),
        training=False,
        **options,
    )
    return out if weights is None else (out, weights)


def multi_head_operands(*extra):
    return T(7, 2, 6), T(9, 2, 6), T(18, 6), T(18), T(6, 6), T(6), *extra


CASES = [
    case(attend, *qkv(2, 4), options={"layouts": 12}),
    case(sliding_window, *qkv(2, 3), options=SOME),
    case(alibi, *qkv(2, 4), options=SOME),
    case(linear_attention, *qkv(2, 3, rows=7, columns=5), options=SOME),
    case(causal_linear_attention, *qkv(2, 3), options=SOME),
    case(slice_attention, T(2, 9, 4), T(4, 3), options=SOME),
    case(attend, T(2, 4, 6, 4), T(2, 1, 7, 4), T(2, 1, 7, 4), enable_gqa=True, options=SOME),
    case(attend_then_write, *qkv(2), options=SOME),
    case(attend_then_write_view, *qkv(3, rows=5), options=SOME | {"may_refuse": True}),
    # the order of the result in memory
    *(
        case(fn, *[T(*shape, grad=False)] * 3, is_causal=causal, options=SOME | {"may_refuse": True})
        for fn, shape in [(write_contiguous, (2, 3, 8, 4)), (write_contiguous_of_transposed, (2, 8, 3, 4))]
        for causal in (False, True)
    ),
    case(write_contiguous, *[T(3, 8, 4, grad=False)] * 3, options=FEW | {"may_refuse": True}),
    case(
        write_contiguous,
        *[T(2, 3, 8, 4, grad=False)] * 2,
        T(2, 3, 8, 5, grad=False),
        options=FEW | {"may_refuse": True, "name": "write contiguous, wider values"},
    ),
    case(
        write_contiguous_of_transposed,
        *[T(2, 8, 3, 4, grad=False)] * 2,
        T(2, 8, 3, 5, grad=False),
        options=FEW | {"may_refuse": True, "name": "write contiguous of transposed, wider values"},
    ),
    case(write_contiguous, *qkv(2, 3, rows=8), T(8, 8), options=SOME | {"may_refuse": True}),
    case(write_contiguous_of_transposed, *[T(2, 8, 3, 4)] * 3, T(8, 8), options=SOME | {"may_refuse": True}),
    case(write_contiguous_math, *qkv(2, 3, rows=8), is_causal=True, options=SOME | {"may_refuse": True}),
    case(attend, *qkv(2, 3, rows=5, columns=9), options=SOME),
    case(attend, *qkv(4, rows=9, columns=3), options=SOME),
    case(attend, *qkv(rows=6), options=SOME),
    case(attend, *qkv(2, 2, 3, rows=4, columns=5), options=FEW),
    case(attend, T(2, 3, 6, 4), T(2, 1, 5, 4), T(1, 3, 5, 3), options=SOME),
    case(attend, T(6, 4), T(2, 3, 5, 4), T(2, 3, 5, 4), options=FEW),
    case(attend, *qkv(2, 3), scale=0.3, options=FEW),
    case(attend, *qkv(2, 4), is_causal=True, options={"layouts": 12}),
    case(attend, *qkv(3, rows=9, columns=5), is_causal=True, options=SOME),
    case(attend, *qkv(3, rows=5, columns=9), is_causal=True, options=SOME),
    case(attend, *qkv(2, rows=1, columns=8), options=SOME),
    case(attend, *qkv(2, rows=8, columns=1), options=FEW),
    case(attend, *qkv(2, 2, rows=3, columns=0), options=FEW),
    case(attend, *qkv(2, 2, rows=0, columns=3), options=FEW),
    case(attend, T(2, 4, 6, 4), T(2, 2, 7, 4), T(2, 2, 7, 4), enable_gqa=True, options=SOME),
    case(attend, T(1, 4, 8, 4), T(1, 2, 8, 4), T(1, 2, 8, 4), enable_gqa=True, is_causal=True, options=SOME),
    case(attend, T(6, 6, 4), T(3, 7, 4), T(3, 7, 4), enable_gqa=True, options=FEW),
    # features that are not contiguous
    case(
        lambda q, k, v: attend(q.mT, k.mT, v.mT),
        T(2, 3, 4, 7),
        T(2, 3, 4, 5),
        T(2, 3, 4, 5),
        options=SOME | {"name": "attention of patches, channels first"},
    ),
    case(
        lambda x: attend(*[x.flatten(2).mT.unsqueeze(1)] * 3),
        T(2, 3, 4, 3),
        options=SOME | {"name": "attention of a field's patches"},
    ),
    # tokens of a field that is sharded in tiles
    case(attend_field, T(1, 4, 5, 6), T(1, 4, 5, 6), T(1, 4, 5, 6), options={"layouts": 12}),
    case(lambda x: attend_field(x, x * 2, x + 1), T(2, 4, 5, 4), options=SOME | {"name": "of one field"}),
    case(lambda x, k: attend_field(x, k, k), T(1, 4, 5, 4), T(1, 4, 2, 3), options=SOME | {"name": "of two fields"}),
    case(lambda x: attend_field(x, x, x, is_causal=True), T(1, 4, 5, 4), options=SOME | {"name": "causal"}),
    case(
        lambda x, m: attend_field(x, x, x, attn_mask=m),
        T(1, 4, 3, 4),
        T(12, 12),
        options=SOME | {"name": "biased"},
    ),
    # no heads, samples or features, and a single feature
    case(attend, *qkv(2, 0), options=FEW | {"name": "no heads"}),
    case(attend, *qkv(0, 3), is_causal=True, options=FEW | {"name": "no samples"}),
    case(attend, *qkv(2, 3, features=0)[:2], T(2, 3, 7, 4), options=FEW | {"name": "no features"}),
    case(attend, *qkv(2, 3, features=1)[:2], T(2, 3, 7, 5), options=FEW | {"name": "one feature"}),
    case(attend, *qkv(2, 3), scale=0.0, options=FEW | {"name": "equal weights"}),
    case(attend, *qkv(2, 3), scale=-1.5, options=FEW | {"name": "negative scale"}),
    case(
        lambda q, k, v: attend(q.expand(2, 3, -1, -1), k, v),
        *[T(7, 4), T(2, 3, 7, 4), T(2, 3, 7, 4)],
        options=FEW | {"name": "expanded queries"},
    ),
    case(lambda x: attend(x, x, x, is_causal=True), T(2, 3, 7, 4), options=FEW | {"name": "one operand"}),
    case(
        lambda q, k, v: attend(q.detach(), k, v.detach()), *qkv(2, 3), options=FEW | {"name": "gradients of keys only"}
    ),
    case(attend, *qkv(2, 3, rows=3, columns=11), T(3, 11, fill=lower_triangle), options=FEW | {"name": "last chunk"}),
    case(attend, *qkv(2, 3, columns=5), T(7, 5, fill=all_hidden), options=FEW | {"name": "all hidden"}),
    case(explicit_causal, *qkv(2, 3), options=FEW),
    case(learned_alibi, *qkv(2, 3), T(3), options=FEW),
    case(relative_table, *qkv(2, 3), T(13, 3), options=FEW),
    case(grow_cache, *qkv(2, 3, rows=1, columns=7), *qkv(2, 3, rows=1)[1:], options=SOME),
    # the function of nn.MultiheadAttention
    case(multi_head, *multi_head_operands(), need_weights=False, options=FEW),
    case(multi_head, *multi_head_operands(), options=FEW | {"name": "multi_head, weights"}),
    case(
        multi_head,
        *multi_head_operands(T(1, 1, 6), T(1, 1, 6)),
        add_zero_attn=True,
        need_weights=False,
        options=FEW | {"name": "multi_head, more keys"},
    ),
    case(
        lambda x, y, hidden, *weights: multi_head(x, y, *weights, need_weights=False, key_padding_mask=hidden),
        *multi_head_operands()[:2],
        T(2, 9, fill=padding),
        *multi_head_operands()[2:],
        options=FEW | {"name": "multi_head, padding"},
    ),
    # groups of two sizes: no rule
    case(attend, T(4, 6, 4), T(2, 7, 4), T(4, 7, 4), enable_gqa=True, options=FEW | {"may_gather": True}),
    case(attend, *qkv(2, 3), T(7, 7, fill=hidden), options=SOME),
    case(attend, *qkv(2, 3, columns=5), T(2, 1, 1, 5, fill="bool"), options=SOME),
    case(attend, *qkv(2, 3, columns=5), T(2, 3, 7, 5, fill=minus_inf), options={"layouts": 12}),
    case(attend, *qkv(2, 3, columns=5), T(1, 3, 7, 5), options=SOME),
    case(attend, *qkv(2, 3, columns=5), T(3, 7, 1), options=FEW),
    case(attend, *qkv(2, 3, columns=5), T(1, 5, grad=False), options=FEW),
    case(attend, *qkv(2, 2, 3, rows=4, columns=5), T(2, 1, 3, 4, 5), options=FEW),
    *[
        case(attend, *qkv(2, 3), T(7, 7, fill=hidden), is_causal=True, options=FEW)
        for _ in range(torch.__version__ < "2.15")  # torch 2.15 refuses a mask beside is_causal
    ],
    case(attend, *qkv(2, 3, columns=5), T(7, 4), options=FEW | raises(RuntimeError, "must match the size of tensor b")),
    case(attend, *qkv(2, 3, dtype=torch.float32), T(7, 7, dtype=torch.float32), options=FEW | {"tolerance": 1e-5}),
    case(attend, *qkv(2, 4, dtype=torch.bfloat16), options=FEW | {"tolerance": 3e-2}),
    case(attend, *qkv(2, 4, dtype=torch.float16), is_causal=True, options=FEW | {"tolerance": 4e-3}),
    case(
        attend,
        *qkv(2, 3),
        T(7, 7, fill="ints"),
        options=FEW | raises(RuntimeError, "Expected attn_mask dtype to be bool or float"),
    ),
    case(
        attend,
        T(2, 3, 7, 4),
        T(2, 2, 7, 4),
        T(2, 2, 7, 4),
        enable_gqa=True,
        options=FEW | raises(RuntimeError, "Number of heads in key and value must divide"),
    ),
    case(
        attend,
        *qkv(2, 3),
        dropout_p=1.5,
        options=FEW | raises(RuntimeError, "dropout probability has to be between 0 and 1"),
    ),
    case(torch._nested_tensor_from_mask_left_aligned, T(3, 5, 2), T(3, 5, fill=padded), options=FEW),
    case(torch._nested_tensor_from_mask_left_aligned, T(3, 5, 2), T(3, 5, fill="bool"), options=FEW),
]
