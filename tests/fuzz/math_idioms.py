"""Idioms of users' models that compute: with integers, bools and 0-d tensors, masked softmax, sums, stencils.

An idiom is a function of a value, two dims (they may be negative) and a small number. Those that one device cannot run
on a drawn shape are rejected by the generator, so that an idiom may assume a shape without checking it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .idioms import at, mod, put

INF = float("inf")


def ints(x: Any) -> Any:
    return (x.detach() * 3.1 + 0.07).round().long()  # halves of round numbers would be decided by rounding errors


def distinct(x: Any) -> Any:
    """Return x without equal elements, of which topk may choose any."""
    return x.detach() + torch.linspace(0, 0.1, x.numel()).double().view(x.shape)


INTEGERS: dict[str, Callable] = {
    "int_scalar": lambda x, d, e, k: ints(x) * 0.5,
    "int_div": lambda x, d, e, k: ints(x) / 2,
    "int_plus_x": lambda x, d, e, k: ints(x) + x,
    "int_sum": lambda x, d, e, k: ints(x).sum((d,), keepdim=True),
    "int_cumsum": lambda x, d, e, k: ints(x).cumsum(d),
    "int_sort": lambda x, d, e, k: torch.sort(ints(x), dim=d, stable=True)[0],
    "int_argsort": lambda x, d, e, k: torch.argsort(ints(x), dim=d, stable=True),
    "int_mean": lambda x, d, e, k: ints(x).double().mean(d),
    "int_prod": lambda x, d, e, k: (ints(x) % 2 + 1).prod(d),
    "int_max": lambda x, d, e, k: ints(x).max(d)[0],
    "int_bits": lambda x, d, e, k: (ints(x) & 3) | (ints(x) % 2 << 1),
    "int_floor": lambda x, d, e, k: torch.div(ints(x), 2, rounding_mode="floor") - ints(x) // 3,
    "int8": lambda x, d, e, k: mod(x, 9).to(torch.int8) + mod(x, 5).to(torch.uint8),
    "int8_sum": lambda x, d, e, k: mod(x, 99).to(torch.uint8).sum(d),
    "int_matmul": lambda x, d, e, k: ints(x) @ ints(x).mT,
    "int_write": lambda x, d, e, k: put(ints(x), at(x, d, 0), 7),
    "int_unique": lambda x, d, e, k: torch.unique(ints(x)),
    "int_bincount": lambda x, d, e, k: torch.bincount(mod(x, 5).flatten(), minlength=k),
    "int_where": lambda x, d, e, k: torch.where(x > 0, ints(x), 0),
    "one_hot": lambda x, d, e, k: F.one_hot(mod(x, 3), 3) * x.unsqueeze(-1),
    "bool_sum": lambda x, d, e, k: (x > 0).sum(d),
    "bool_mean": lambda x, d, e, k: (x > 0).double().mean(d) * x.sum(d),
    "bool_any": lambda x, d, e, k: (x > 0.5).any(d, keepdim=True) & (x > -3).all(),
    "bool_logic": lambda x, d, e, k: ~(x > 0) ^ (x.select(d, 0).unsqueeze(d) > 0),
    "bool_cumsum": lambda x, d, e, k: (x > 0).cumsum(d) * x,
    "bool_times": lambda x, d, e, k: (x > 0) * (x < 1) * x,
    "bool_write": lambda x, d, e, k: put(x > 0, at(x, d, slice(0, 1)), True),
    "argmax": lambda x, d, e, k: x.argmax(d, keepdim=k > 1),
    "argmin_flat": lambda x, d, e, k: x.argmin(),
    "argsort_gather": lambda x, d, e, k: x.gather(d, x.argsort(d, descending=k > 1)),
    "topk_gather": lambda x, d, e, k: x.gather(d, distinct(x).topk(1, d)[1]),
    "take_along": lambda x, d, e, k: torch.take_along_dim(x, x.argmax(d, keepdim=True), d),
    "take": lambda x, d, e, k: torch.take(x, mod(x, x.numel())),
    "nonzero": lambda x, d, e, k: torch.nonzero(x > 0.3),
    "count_nonzero": lambda x, d, e, k: torch.count_nonzero(x > 0, d),
    "searchsorted": lambda x, d, e, k: torch.searchsorted(torch.linspace(-1, 1, 5).double(), x.detach()),
    "bucketize": lambda x, d, e, k: (
        x * torch.bucketize(x.detach(), torch.tensor([-0.5, 0.0, 0.7], dtype=torch.float64))
    ),
    "histogram": lambda x, d, e, k: torch.histc(x.detach(), 4, -2, 2),
    "scalar_tensor": lambda x, d, e, k: x + torch.tensor(2) * torch.tensor(0.5),
    "zero_dim_half": lambda x, d, e, k: x * torch.tensor(0.5, dtype=torch.float16),
    "float32_exact": lambda x, d, e, k: ints(x).float() + x.detach().round(),
    "embedding_bag": lambda x, d, e, k: F.embedding_bag(
        mod(x.new_empty(3, 2), x.shape[0]), x, mode=["sum", "mean", "max"][k - 1]
    ),
    "cross_entropy": lambda x, d, e, k: F.cross_entropy(
        x, mod(x.select(1, 0), x.shape[1]), label_smoothing=0.1 * (k - 1)
    ),
    "nll_none": lambda x, d, e, k: F.nll_loss(
        x.log_softmax(1), mod(x.select(1, 0), x.shape[1]), reduction="none", ignore_index=0
    ),
}

MATH: dict[str, Callable] = {
    "trace_letters": lambda x, d, e, k: torch.einsum(
        "...ii->...i", x[..., : x.shape[-1], : x.shape[-2]][..., : min(x.shape[-2:]), : min(x.shape[-2:])]
    ),
    "repeated": lambda x, d, e, k: torch.einsum("aab->b", torch.stack([x.flatten()[:4].view(2, 2)] * 2)),
    "three": lambda x, d, e, k: torch.einsum("...ab,...cb,...cd->...ad", x, x, x),
    "full_einsum": lambda x, d, e, k: torch.einsum("...a,...a->", x, x),
    "ellipsis_sum": lambda x, d, e, k: torch.einsum("a...->...", x),
    "outer": lambda x, d, e, k: x.unsqueeze(-1) * x.unsqueeze(-2),
    "tensordot": lambda x, d, e, k: torch.tensordot(x, x, ([d], [d])),
    "gram": lambda x, d, e, k: x.flatten(1) @ x.flatten(1).T,
    "kron": lambda x, d, e, k: torch.kron(x.flatten()[:6], x.flatten()[:3]),
    "cdist": lambda x, d, e, k: torch.cdist(x, x.detach() + 1),
    "cosine": lambda x, d, e, k: F.cosine_similarity(x, x.flip(d), d),
    "cross": lambda x, d, e, k: torch.linalg.cross(x.narrow(d, 0, 3), x.narrow(d, 0, 3).flip(d), dim=d),
    "masked_softmax": lambda x, d, e, k: x.masked_fill(mod(x, 2) == 0, -INF).softmax(d).nan_to_num(),
    "causal_softmax": lambda x, d, e, k: (x + torch.full(x.shape[-2:], -INF).triu(1)).softmax(-1),
    "all_masked": lambda x, d, e, k: torch.nan_to_num(
        torch.where(mod(x, x.shape[0] + 1) > 0, x, -INF).softmax(d), 0.25
    ),
    "logsumexp_dims": lambda x, d, e, k: (
        torch.logsumexp(x, (d, e), keepdim=True) if d % x.ndim != e % x.ndim else x.logsumexp(d)
    ),
    "keepdim_dims": lambda x, d, e, k: x - x.mean((0, -1), keepdim=True),
    "standardize": lambda x, d, e, k: (
        (x - x.mean(d, keepdim=True)) / (x.var(d, keepdim=True, unbiased=False) + 1).sqrt()
    ),
    "var_mean": lambda x, d, e, k: sum(torch.var_mean(x, (0, -1), keepdim=True, correction=0)),
    "aminmax": lambda x, d, e, k: torch.aminmax(x, dim=d).max - torch.aminmax(x, dim=d).min,
    "prod": lambda x, d, e, k: (x.tanh() + 1.5).prod(d),
    "cumprod": lambda x, d, e, k: (x.tanh() * 0.2 + 1).cumprod(d),
    "cumsum_flip": lambda x, d, e, k: x.flip(d).cumsum(d).flip(d),
    "double_cumsum": lambda x, d, e, k: x.cumsum(d).cumsum(e) * 0.1,
    "nanmean": lambda x, d, e, k: torch.where(x > 2, float("nan"), x).nanmean(d).nan_to_num(),
    "nansum": lambda x, d, e, k: torch.where(x > 1, float("nan"), x).nansum((d,), keepdim=True),
    "quantile": lambda x, d, e, k: torch.quantile(x, torch.tensor([0.2, 0.7], dtype=torch.float64), dim=d),
    "kthvalue": lambda x, d, e, k: x.kthvalue(1, d)[0],
    "mode_free_median": lambda x, d, e, k: x.median(),
    "diff_two": lambda x, d, e, k: torch.diff(x, k, d, prepend=x.narrow(d, 0, 1)),
    "gradient": lambda x, d, e, k: torch.gradient(x, spacing=0.5, dim=d)[0],
    "trapezoid": lambda x, d, e, k: torch.trapezoid(x, dx=0.5, dim=d),
    "laplacian": lambda x, d, e, k: torch.roll(x, 1, d) + torch.roll(x, -1, d) - 2 * x,
    "upwind": lambda x, d, e, k: torch.where(x > 0, x - torch.roll(x, 1, d), torch.roll(x, -1, d) - x),
    "glu": lambda x, d, e, k: F.glu(x, d),
    "maxout": lambda x, d, e, k: x.unflatten(d, (k, -1)).amax(d % x.ndim),
    "clamp_tensor": lambda x, d, e, k: torch.clamp(x, x.mean() - 0.5, x.amax(d, keepdim=True) - 0.1),
    "power": lambda x, d, e, k: 2.0 ** x.tanh() + x.abs().add(0.5) ** 1.5,
    "remainder": lambda x, d, e, k: torch.remainder(x, 0.7) - torch.fmod(x, 0.7),
    "where_zero_dim": lambda x, d, e, k: torch.where(x.sum() > 0.37, x, x.select(d, 0).unsqueeze(d)),
    "renorm": lambda x, d, e, k: torch.renorm(x, 2, d, 1.0),
    "softmax_einsum": lambda x, d, e, k: torch.einsum("...qk,...kd->...qd", (x @ x.mT).softmax(-1), x),
    "item": lambda x, d, e, k: x * x.detach().abs().max().item(),
    "python_branch": lambda x, d, e, k: x * 2 if (x.detach().sum() > 0.37).item() else x - 1,
    "reverse_scalar": lambda x, d, e, k: 1 - 2 / (1 + x.square()),
    "zeros_then_add": lambda x, d, e, k: torch.zeros_like(x).add_(x, alpha=0.5).mul_(x),
    "new_full": lambda x, d, e, k: x.new_full((x.shape[-1],), 0.5) * x + x.new_ones(()),
    "batch_outer": lambda x, d, e, k: torch.bmm(x.flatten(1).unsqueeze(2)[:, :5], x.flatten(1).unsqueeze(1)[..., :5]),
    "baddbmm": lambda x, d, e, k: torch.baddbmm(x.new_ones(1), x, x.mT, beta=0.5, alpha=2),
    "addmv": lambda x, d, e, k: torch.addmv(x[:, 0], x, x[0], alpha=0.5),
    "det": lambda x, d, e, k: torch.linalg.det(x[..., :2, :2] + 3 * torch.eye(2).double()),
    "inverse": lambda x, d, e, k: torch.linalg.inv(x[..., :2, :2] * 0.1 + 3 * torch.eye(2).double()),
    "solve": lambda x, d, e, k: torch.linalg.solve(x[..., :2, :2] * 0.1 + 3 * torch.eye(2).double(), x[..., :2, :1]),
    "complex_abs": lambda x, d, e, k: torch.complex(x, x.flip(d) + 2).abs(),
    "complex_product": lambda x, d, e, k: (torch.complex(x, x) @ torch.complex(x, -x).mH).imag,
    "complex_conj": lambda x, d, e, k: (torch.complex(x, x * 2).conj() * torch.complex(x, x.flip(d))).real,
    "fft_filter": lambda x, d, e, k: torch.fft.ifft(torch.fft.fft(x, dim=d) * (1j + 2), dim=d).imag,
    "fft_derivative": lambda x, d, e, k: torch.fft.irfft(
        1j * torch.fft.rfftfreq(x.shape[-1]).double() * torch.fft.rfft(x), n=x.shape[-1]
    ),
    "fftshift": lambda x, d, e, k: torch.fft.fftshift(torch.fft.fft2(x), (d, e)).abs().square() * 0.01,
    "pool_unpool": lambda x, d, e, k: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "same_conv": lambda x, d, e, k: F.conv1d(
        x.flatten(0, -2).unsqueeze(1), torch.ones(1, 1, k).double(), padding="same"
    ),
    "circular_conv": lambda x, d, e, k: F.conv2d(
        F.pad(x, (1, 1, 1, 1), mode="circular")[:, :1], torch.ones(1, 1, 3, 3).double(), stride=k
    ),
    "area": lambda x, d, e, k: F.interpolate(x, size=(k, k + 1), mode="area"),
    "bicubic": lambda x, d, e, k: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "adaptive_max": lambda x, d, e, k: F.adaptive_max_pool2d(x, (k, None)),
    "lp_pool": lambda x, d, e, k: F.lp_pool1d(x.abs() + 0.5, 2, k),
    "ceil_pool": lambda x, d, e, k: F.avg_pool2d(x, 2, k, 1, ceil_mode=True, count_include_pad=False),
    "fold": lambda x, d, e, k: F.fold(F.unfold(x, 2, stride=k), x.shape[-2:], 2, stride=k),
    "response_norm": lambda x, d, e, k: F.local_response_norm(x, k),
    "grid_sample": lambda x, d, e, k: F.grid_sample(
        x, x[:, :1].expand(-1, 2, -1, -1).movedim(1, -1).tanh() * 0.9, align_corners=k > 1
    ),
    "squeeze_excite": lambda x, d, e, k: x * torch.sigmoid(x.flatten(2).mean(-1))[:, :, None, None],
    "channel_gate": lambda x, d, e, k: x * x.mean(tuple(range(2, x.ndim)), keepdim=True).softmax(1),
    "heads": lambda x, d, e, k: (
        F.scaled_dot_product_attention(*(x.unflatten(-1, (k, -1)).transpose(-2, -3),) * 3).transpose(-2, -3).flatten(-2)
    ),
    "mask_all": lambda x, d, e, k: F.scaled_dot_product_attention(
        x, x, x, torch.ones(x.shape[-2], x.shape[-2]).bool().tril(k - 2)
    ).nan_to_num(),
    "graph_mean": lambda x, d, e, k: torch.zeros_like(x).index_add_(
        0, mod(x.flatten(1)[:, 0], x.shape[0]), x[mod(x.flatten(1)[:, 0], x.shape[0]).flip(0)]
    ),
}
