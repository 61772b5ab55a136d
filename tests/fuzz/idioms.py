"""Idioms of users' models that read and write parts: views of views, None and ellipsis, masks, loops over slices.

An idiom is a function of a value, two dims (they may be negative) and a small number. Those that one device cannot run
on a drawn shape are rejected by the generator, so that an idiom may assume a shape without checking it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def mod(x: Any, n: int) -> Any:
    """Return integers below n with the shape of x, in a pattern that has equal and missing numbers."""
    return ((torch.arange(x.numel()).view(x.shape) * 7 + 3) // 2 % max(n, 1)).long()


def rows(x: Any, d: int) -> Any:
    """Return distinct indices along a dim, in another order."""
    return torch.arange(x.shape[d] - 1, -1, -1)[: max(1, x.shape[d] // 2 + 1)]


def put(x: Any, key: Any, value: Any) -> Any:
    """Return a copy of x with `value` written to x[key]."""
    y = x.clone()
    y[key] = value
    return y


def written(x: Any, write: Callable) -> Any:
    """Return a copy of x into which `write` has written."""
    y = x * 1
    write(y)
    return y


def at(x: Any, d: int, *index: Any) -> tuple[Any, ...]:
    """Return a key with `index` from dim d on."""
    return (slice(None),) * (d % x.ndim) + index


def filled(x: Any, d: int, body: Callable) -> Any:
    """Write what `body` returns for each slice of x into an empty tensor, as a loop over time steps does."""
    out = torch.empty_like(x)
    state = 0
    for i in range(x.shape[d]):
        state = body(x.select(d, i), state)
        out.select(d, i).copy_(state)
    return out


def out_of(x: Any, fn: Callable) -> Any:
    """Return what a function writes into `out=`, without a graph."""
    with torch.no_grad():
        out = torch.empty_like(x)
        fn(x, out)
    return out + x


def windows(x: Any, k: int) -> Any:
    """Partition the last two dims into windows of k x k, take a softmax in each, and merge them again."""
    *lead, h, w = x.shape
    y = x.reshape(*lead, h // k, k, w // k, k).transpose(-3, -2).flatten(-2)
    return y.softmax(-1).unflatten(-1, (k, k)).transpose(-3, -2).reshape(x.shape)


VIEWS: dict[str, Callable] = {
    "none_ellipsis": lambda x, d, e, k: x[None, ..., None, :1],
    "ellipsis_last": lambda x, d, e, k: x[..., -1],
    "reversed_step": lambda x, d, e, k: x.flip(d)[at(x, d, slice(None, None, 2))],
    "mixed_index": lambda x, d, e, k: x[0, ..., torch.tensor([0, -1, 0])],
    "two_lists": lambda x, d, e, k: x[[0, -1], ..., [0, 0]],
    "list_column": lambda x, d, e, k: x[torch.tensor([[0], [-1]]), torch.tensor([0, -1, 0])],
    "bool_scalar": lambda x, d, e, k: x[True],
    "empty_slice": lambda x, d, e, k: torch.cat([x.narrow(d, 0, 0), x, x.narrow(d, k, 0)], d),
    "movedim": lambda x, d, e, k: torch.movedim(x, d, e),
    "unflatten": lambda x, d, e, k: x.unflatten(d, (-1, k)),
    "unflatten_view": lambda x, d, e, k: x.unflatten(d, (k, -1)).transpose(0, -1),
    "unbind_stack": lambda x, d, e, k: torch.stack([r * (i + 1) for i, r in enumerate(x.unbind(d))], e),
    "iterate": lambda x, d, e, k: sum(r * r for r in x),
    "chunk_swap": lambda x, d, e, k: torch.cat(x.chunk(k, d)[::-1], d),
    "tensor_split": lambda x, d, e, k: torch.cat(torch.tensor_split(x, (1, 1, -1), d)[1:], d),
    "hsplit": lambda x, d, e, k: torch.hstack(torch.hsplit(x, [k])),
    "roll_two": lambda x, d, e, k: torch.roll(x, (k, -1), (d, e)),
    "roll_flat": lambda x, d, e, k: torch.roll(x, k),
    "rot90": lambda x, d, e, k: torch.rot90(x, k, (d, e)),
    "unfold_sum": lambda x, d, e, k: x.unfold(d, k, 1).sum(-1),
    "unfold_unfold": lambda x, d, e, k: x.unfold(-1, k, k).unfold(-2, 1, 1),
    "strided_diagonal": lambda x, d, e, k: x.diagonal(k - 1, d, e).clone(),
    "diag_embed": lambda x, d, e, k: torch.diag_embed(x, k - 1),
    "expand_reshape": lambda x, d, e, k: (
        x.unsqueeze(d).expand(*x.shape[: d % (x.ndim + 1)], k, *x.shape[d % (x.ndim + 1) :]).reshape(-1)
    ),
    "view_minus_one": lambda x, d, e, k: x.contiguous().view(-1, x.shape[-1]).t(),
    "swap_view": lambda x, d, e, k: x.mT.contiguous().view(x.shape),
    "windows": lambda x, d, e, k: windows(x, k),
    "patches": lambda x, d, e, k: x.unfold(-2, k, k).unfold(-2, k, k).flatten(-2).mean(-1, keepdim=True),
    "repeat": lambda x, d, e, k: x.repeat(k, *[1] * x.ndim),
    "repeat_uneven": lambda x, d, e, k: x.repeat_interleave(torch.arange(x.shape[d]) % 3, d),
    "tril_pairs": lambda x, d, e, k: x[..., torch.tril_indices(x.shape[-1], x.shape[-1])[0]],
    "squeeze_dim": lambda x, d, e, k: x.narrow(d, 0, 1).squeeze(d),
    "as_strided": lambda x, d, e, k: x.contiguous().as_strided((x.numel() // 2, 2), (1, x.numel() // 2)),
    "view_as_complex": lambda x, d, e, k: torch.view_as_complex(torch.stack([x, x * 2], -1)),
    "grid": lambda x, d, e, k: (
        x + sum(torch.meshgrid(*(torch.linspace(0, 1, n).double() for n in x.shape), indexing="ij"))
    ),
    "arange_weight": lambda x, d, e, k: x * torch.arange(x.shape[-1]),
    "checkerboard": lambda x, d, e, k: torch.where(mod(x, 2) == 0, x, -x),
    "pad_negative": lambda x, d, e, k: F.pad(x, (k, -1, -1, k)),
    "pad_pad": lambda x, d, e, k: F.pad(F.pad(x, (1, 1), mode="circular"), (0, k), value=0.5),
}

WRITES: dict[str, Callable] = {
    "view_of_view": lambda x, d, e, k: written(x, lambda y: y.transpose(d, e)[..., ::2].mul_(2)),
    "add_slice": lambda x, d, e, k: written(
        x, lambda y: y[at(y, d, slice(1, None))].add_(x[at(x, d, slice(None, -1))])
    ),
    "overlap": lambda x, d, e, k: written(
        x, lambda y: y[at(y, d, slice(1, None))].copy_(y[at(y, d, slice(None, -1))].clone())
    ),
    "swap_rows": lambda x, d, e, k: put(x, at(x, d, [0, -1]), x[at(x, d, [-1, 0])]),
    "mask_tensor": lambda x, d, e, k: put(x, x > 0.2, x[x > 0.2] * 2),
    "mask_row": lambda x, d, e, k: put(x, mod(x[..., 0], 2) == 0, x.mean()),
    "mask_scalar_tensor": lambda x, d, e, k: put(x, x < 0, torch.tensor(0.5, dtype=torch.float64)),
    "mask_int": lambda x, d, e, k: put(x, x < 0, 1),
    "augmented": lambda x, d, e, k: written(x, lambda y: y[..., :1].__iadd__(y[..., -1:])),
    "boundaries": lambda x, d, e, k: put(put(x, at(x, d, 0), 0.0), at(x, d, -1), x.select(d, 0)),
    "none_write": lambda x, d, e, k: put(x, (None, ..., slice(0, k)), 0.5),
    "list_write": lambda x, d, e, k: put(x, at(x, d, rows(x, d)), x.sum(d, keepdim=True) * 0.1),
    "two_list_write": lambda x, d, e, k: put(x, ([0, -1], [0, -1]) if min(x.shape[:2]) > 1 else 0, 0.75),
    "accumulate": lambda x, d, e, k: x.index_put(
        (mod(x.select(-1, 0), x.shape[0]).flatten(),), x[:1] * 0.1, accumulate=True
    ),
    "index_add": lambda x, d, e, k: torch.zeros_like(x).index_add(
        d, mod(x, x.shape[d]).flatten()[: x.shape[d]], x, alpha=k
    ),
    "index_copy": lambda x, d, e, k: x.index_copy(d, rows(x, d), x.narrow(d, 0, len(rows(x, d))) * 3),
    "index_fill": lambda x, d, e, k: x.index_fill(d, rows(x, d), 0.3),
    "index_reduce": lambda x, d, e, k: x.index_reduce(
        d, torch.zeros(x.shape[d]).long(), x * 2, ["amax", "amin", "mean"][k - 1]
    ),
    "scatter_add": lambda x, d, e, k: torch.zeros_like(x).scatter_add(d, mod(x, x.shape[d]), x),
    "scatter_reduce": lambda x, d, e, k: x.scatter_reduce(
        d, mod(x, x.shape[d]), x * 2, ["sum", "amax", "mean"][k - 1], include_self=k > 2
    ),
    "scatter_scalar": lambda x, d, e, k: x.scatter(d, mod(x, x.shape[d]), 0.4),
    "bins": lambda x, d, e, k: x.new_zeros(4, *x.shape[1:]).index_add_(0, mod(x.flatten()[: x.shape[0]], 4), x),
    "select_scatter": lambda x, d, e, k: x.contiguous().select_scatter(x.mean(d), d, -1),
    "slice_scatter": lambda x, d, e, k: x.contiguous().slice_scatter(x.narrow(d, 0, 1) * 2, d, 0, 1),
    "diagonal_scatter": lambda x, d, e, k: x.contiguous().diagonal_scatter(x.diagonal(0, d, e) * 3, 0, d, e),
    "diagonal_write": lambda x, d, e, k: written(x, lambda y: y.diagonal(0, d, e).add_(1)),
    "fill_diagonal": lambda x, d, e, k: written(x, lambda y: y.fill_diagonal_(2.0)),
    "masked_scatter": lambda x, d, e, k: x.masked_scatter(mod(x, 3) == 1, x.flip(0) * 2),
    "loop": lambda x, d, e, k: filled(x, d, lambda row, state: row * 0.5 + state),
    "columns": lambda x, d, e, k: filled(x, -1, lambda column, state: torch.tanh(column - state)),
    "detached_write": lambda x, d, e, k: written(x, lambda y: y.narrow(d, 0, 1).copy_(x.narrow(d, 0, 1).detach())),
    "out_add": lambda x, d, e, k: out_of(x, lambda v, out: torch.add(v, v, alpha=2, out=out)),
    "out_view": lambda x, d, e, k: out_of(
        x, lambda v, out: (out.zero_(), torch.mul(v.narrow(d, 0, 1), 2, out=out.narrow(d, 0, 1)))
    ),
    "out_cumsum": lambda x, d, e, k: out_of(x, lambda v, out: torch.cumsum(v, d, out=out)),
    "unbind_write": lambda x, d, e, k: written(x, lambda y: y.select(d, 0).unsqueeze(0).mul_(3)),
    "chunk_write": lambda x, d, e, k: written(x, lambda y: torch.chunk(y.detach(), 2, d)[0].mul_(1)),
    "addcmul": lambda x, d, e, k: written(
        x, lambda y: y.select(d, 0).addcmul_(x.select(d, -1), x.select(d, -1), value=0.5)
    ),
    "expanded_source": lambda x, d, e, k: written(x, lambda y: y.copy_(x.narrow(d, 0, 1).expand_as(x))),
    "real_write": lambda x, d, e, k: written(torch.complex(x, x * 2), lambda y: torch.view_as_real(y)[..., 0].mul_(3)),
    "conj_write": lambda x, d, e, k: put(
        torch.complex(x, x * 2), at(x, d, 0), torch.complex(x, x).conj().select(d, -1)
    ),
}
