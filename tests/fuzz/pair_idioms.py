"""Idioms of users' models on two values of one shape with layouts of their own: indices, masks, products, losses.

Indices are computed from the values, so that they are sharded as the values are, and have equal and missing numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .idioms import put, written
from .ops import op


def index(y: Any, n: int) -> Any:
    """Return integers below n, computed from the values of y."""
    return (y.detach() * 3.1 + 0.07).round().long() % n


PAIRS: dict[str, Callable] = {
    "where": lambda x, y, d, e, k: torch.where(x > y, x, y * k),
    "mask_write": lambda x, y, d, e, k: put(x, y > 0, x[y > 0] * 2),
    "mask_rows": lambda x, y, d, e, k: put(x, y.select(-1, 0) > 0, 0.5),
    "mask_read": lambda x, y, d, e, k: x[y > x].square(),
    "masked_scatter": lambda x, y, d, e, k: x.masked_scatter(y > 0, y.flip(d)),
    "copy_part": lambda x, y, d, e, k: written(x, lambda t: t.narrow(d, 0, k).copy_(y.narrow(d, -k, k))),
    "add_transposed": lambda x, y, d, e, k: written(x, lambda t: t.transpose(d, e).add_(y.transpose(d, e), alpha=k)),
    "swap": lambda x, y, d, e, k: written(x, lambda t: t.select(d, 0).copy_(y.select(d, -1))),
    "gather": lambda x, y, d, e, k: x.gather(d, index(y, x.shape[d])),
    "gather_sorted": lambda x, y, d, e, k: x.gather(d, y.argsort(d)),
    "scatter_add": lambda x, y, d, e, k: torch.zeros_like(x).scatter_add(d, index(y, x.shape[d]), x),
    "scatter_reduce": lambda x, y, d, e, k: x.scatter_reduce(
        d, index(y, x.shape[d]), y, ["sum", "amax", "mean"][k - 1]
    ),
    "scatter_sorted": lambda x, y, d, e, k: x.scatter(d, y.argsort(d), y),
    "index_add": lambda x, y, d, e, k: x.index_add(d, index(y, x.shape[d]).flatten()[: x.shape[d]], y),
    "index_put": lambda x, y, d, e, k: x.index_put((index(y, len(x)).flatten(),), y[0] * 0.1, accumulate=True),
    "take": lambda x, y, d, e, k: torch.take(x, index(y, x.numel())),
    "rows": lambda x, y, d, e, k: x[index(y, len(x)).flatten()[:5]],
    "two_indices": lambda x, y, d, e, k: x[index(y, len(x)), index(x, x.shape[1])] if x.ndim == 2 else None,
    "pairs": lambda x, y, d, e, k: x[:, None] - y[None, :],
    "outer": lambda x, y, d, e, k: torch.einsum("...a,...b->...ab", x, y),
    "row_products": lambda x, y, d, e, k: torch.einsum("...a,...a->...", x, y),
    "gram": lambda x, y, d, e, k: torch.tensordot(x, y, ([d], [d])),
    "cdist": lambda x, y, d, e, k: torch.cdist(x, y + 5),
    "cosine": lambda x, y, d, e, k: F.cosine_similarity(x, y, d),
    "attention": lambda x, y, d, e, k: F.scaled_dot_product_attention(x, y, y * 0.5, is_causal=k > 1),
    "cross_attention": lambda x, y, d, e, k: (x @ y.mT).masked_fill(x.mean() > 0, 0.1).softmax(-1) @ y,
    "stack_max": lambda x, y, d, e, k: torch.stack([x, y], d).amax(d),
    "cat_split": lambda x, y, d, e, k: torch.cat([x, y], d).chunk(3, d)[1],
    "interleave": lambda x, y, d, e, k: torch.stack([x, y], -1).flatten(-2),
    "complex": lambda x, y, d, e, k: torch.complex(x, y) * torch.complex(y, x).conj(),
    "soft_targets": lambda x, y, d, e, k: F.cross_entropy(x, y.softmax(1)),
    "kl": lambda x, y, d, e, k: F.kl_div(x.log_softmax(d), y.log_softmax(d), reduction="batchmean", log_target=True),
    "bce": lambda x, y, d, e, k: F.binary_cross_entropy_with_logits(
        x, y.detach().sigmoid(), pos_weight=y.detach().exp()[0]
    ),
    "ranking": lambda x, y, d, e, k: F.margin_ranking_loss(x, y, torch.ones_like(x), margin=0.1),
    "searchsorted": lambda x, y, d, e, k: torch.searchsorted(x.detach().sort(-1)[0], y.detach().contiguous()),
    "segments": lambda x, y, d, e, k: x.cumsum(d) * (y.cumsum(d) > 0),
    "recurrence": lambda x, y, d, e, k: torch.stack(
        [x.select(d, i) * y.select(d, -i - 1) for i in range(x.shape[d])], d
    ),
    "normalized": lambda x, y, d, e, k: F.layer_norm(x, x.shape[-1:], y.reshape(-1, x.shape[-1])[0], eps=1e-2),
    "convolution": lambda x, y, d, e, k: F.conv1d(x, y[:, :, :k].movedim(0, 1)[: x.shape[1]].flip(0)),
    "fft_product": lambda x, y, d, e, k: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y).conj(), n=x.shape[-1]),
    "residual": lambda x, y, d, e, k: x + y.mean(d, keepdim=True).expand_as(x) * torch.sigmoid(y.sum(e, keepdim=True)),
    "lerp_write": lambda x, y, d, e, k: written(x, lambda t: t.lerp_(y, 0.1 * k).clamp_(max=1).select(d, 0).zero_()),
    "running_mean": lambda x, y, d, e, k: x.detach().mul(0.9).add_(y.detach(), alpha=0.1) + x,
    "out": lambda x, y, d, e, k: torch.add(x.detach(), y.detach(), out=torch.empty_like(x.detach())) * x,
}


def call(x: Any, y: Any, name: str, d: int, e: int, k: int) -> Any:
    """Run an idiom."""
    return PAIRS[name](x, y, d, e, k)


@op("idioms of pairs")
def pair_idiom(g, x):
    n = max(len(g.shape(x)), 1)
    args = g.pick(list(PAIRS)), g.int(-n, n - 1), g.int(-n, n - 1), g.int(1, 3)
    return "tests.fuzz.pair_idioms:call", (x, g.same_shape(x), *args)
