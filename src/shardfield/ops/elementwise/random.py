"""Random numbers that depend on the global index, not on the rank.

Each call draws one key from the default generator of the first rank's device and broadcasts it, so that ranks may have
different seeds, and a CUDA graph draws another key in each launch. The number at a global index is a hash of (key,
index). Replicas therefore agree, shards differ, and a `torch.manual_seed` gives the same global tensor for every
sharding and every number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...comm import collectives
from ...dispatch.plan import process_groups
from ...dispatch.registry import gather_fallback, handler, mesh_of
from ...errors import ShardingError
from ...layout import DimSharding, Layout, starts
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .._common.blockwise import move_shard_off, nested_balanced
from .._common.probe import meta_tensor
from .._common.value_checks import raise_if_any_rank

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants, as signed 64-bit numbers
_INVERSE = pow(_GOLDEN, -1, 1 << 64) - (1 << 64)  # inverse of _GOLDEN modulo 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def draw_key(mesh: Any, generator: torch.Generator | None = None) -> Tensor:
    """Return a 62-bit key for one call, equal on all ranks of the mesh, as a tensor of one element on its device."""
    device = collectives.device_of(mesh)
    where = device if generator is None else generator.device
    if generator is None and runtime.active.tracer is not None:
        key = runtime.active.tracer.random_key(device)
    else:
        key = torch.randint(1 << 62, (1,), generator=generator, device=where).to(device)
    return collectives.broadcast_over(key, mesh, 0)


def global_index(layout: Layout, device: torch.device) -> Tensor:
    """Return the row-major global index of every element of this rank's shard."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for factor in (f for d in layout.dims for f in d):
        position = layout.index(factor.axes) if factor.axes else 0
        start = starts(factor.shard_sizes)[position] if factor.axes else 0
        local_index = torch.arange(start, start + layout.local_size_of(factor), device=device)
        index = index.unsqueeze(-1) * factor.size + local_index
    return index.reshape(layout.local_shape)


def random_bits(key: Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits for each index, by splitmix64 (its state after `index` steps is a product)."""

    def shifted(x: Tensor, n: int) -> Tensor:
        return (x >> n) & ((1 << (64 - n)) - 1)  # a logical shift; torch's is arithmetic

    # This is key + (index + 1) * _GOLDEN. Inductor would treat the product of an index and a constant as a memory
    # offset of unbounded range, which does not fit in 64 bits; with the key inside the product it does not.
    z = (key * _INVERSE + index + 1) * _GOLDEN
    z = (z ^ shifted(z, 30)) * _MIX1
    z = (z ^ shifted(z, 27)) * _MIX2
    return z ^ shifted(z, 31)


def uniform(layout: Layout, device: torch.device, key: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1) for this rank's shard."""
    return uniform_at(key, global_index(layout, device))


def uniform_at(key: Tensor, index: Tensor) -> Tensor:
    """Return the uniform number in [0, 1) of each global index, with 53 random bits."""
    return ((random_bits(key, index) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def normal(layout: Layout, device: torch.device, key: Tensor) -> Tensor:
    """Return standard normal numbers for this rank's shard, by the Box-Muller transform."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(layout, device, key)))
    return radius * torch.cos(2 * math.pi * uniform(layout, device, key ^ _MIX1))


def _noise(x: ShardTensor, kind: str, generator: Any, *parameters: float) -> Tensor:
    """Return this rank's shard of a random tensor with x's layout, in float64."""
    key = draw_key(x._layout.mesh, generator)
    layout, device = x._layout, x._local_tensor.device
    if kind == "normal":
        mean, std = parameters
        return normal(layout, device, key) * std + mean
    u = uniform(layout, device, key)
    if kind == "uniform":
        low, high = parameters
        return u * (high - low) + low
    if kind == "exponential":
        return -torch.log1p(-u) / parameters[0]
    if kind == "cauchy":
        median, sigma = parameters
        return median + sigma * torch.tan(math.pi * (u - 0.5))
    if kind == "geometric":
        return torch.ceil(torch.log1p(-u) / math.log1p(-parameters[0])).clamp_min(1)
    if kind == "log_normal":
        mean, std = parameters
        return torch.exp(normal(layout, device, key) * std + mean)
    assert kind == "bernoulli"
    return (u < parameters[0]).to(torch.float64)


# ---------------------------------------------------------------------- filling in place

FILLS = {
    "uniform_": ("uniform", ("from", "to"), (0.0, 1.0)),
    "normal_": ("normal", ("mean", "std"), (0.0, 1.0)),
    "exponential_": ("exponential", ("lambd",), (1.0,)),
    "cauchy_": ("cauchy", ("median", "sigma"), (0.0, 1.0)),
    "geometric_": ("geometric", ("p",), (None,)),
    "log_normal_": ("log_normal", ("mean", "std"), (1.0, 2.0)),
}


@handler(*FILLS)
def fill_random(func, types, args, kwargs):
    kind, names, defaults = FILLS[func.__name__]
    target, *positional = args
    named = dict(kwargs)
    generator = named.pop("generator", None)
    parameters = dict(zip(names, defaults, strict=True)) | dict(zip(names, positional, strict=False)) | named
    _prepare_fill(target, func.__name__)
    values = _noise(target, kind, generator, *(parameters[n] for n in names))
    if target.is_complex():
        second = _noise(target, kind, generator, *(parameters[n] for n in names))
        values = torch.complex(values, second) * math.sqrt(0.5)
    target._local_tensor.copy_(_cast(values, target.dtype))
    return target


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a narrower dtype."""
    return values.to(dtype)


def _prepare_fill(target: Any, name: str) -> None:
    if not isinstance(target, ShardTensor):
        raise ShardingError(f"{name}: the tensor to fill must be a ShardTensor if any argument is one")
    target._check_writable()
    if target._layout.partial:
        target._local_tensor, target._layout = target._local_tensor.clone(), target._layout.with_partial(())


@handler("random_")
def random_(func, types, args, kwargs):
    target, *bounds = args
    named = dict(kwargs)
    generator = named.pop("generator", None)
    bounds += [named[k] for k in ("from", "to") if k in named]
    limit = (
        2**24
        if target.dtype == torch.float32
        else 2**53
        if target.is_floating_point()
        else torch.iinfo(target.dtype).max
    )
    low, high = (0, limit) if not bounds else (0, bounds[0]) if len(bounds) == 1 else bounds
    high = limit if high is None else high
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    _prepare_fill(target, "random_")
    target._local_tensor.copy_(_integers(target, low, high, generator).to(target.dtype))
    return target


def _integers(x: ShardTensor, low: int, high: int, generator: Any) -> Tensor:
    key = draw_key(x._layout.mesh, generator)
    raw = random_bits(key, global_index(x._layout, x._local_tensor.device))
    return ((raw >> 1) & ((1 << 62) - 1)) % (high - low) + low


@handler("bernoulli_")
def bernoulli_(func, types, args, kwargs):
    target, *rest = args
    p = rest[0] if rest else kwargs.get("p", 0.5)
    _prepare_fill(target, "bernoulli_")
    if isinstance(p, Tensor):
        return target.copy_(torch.bernoulli(p.expand_as(target), generator=kwargs.get("generator")))
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    target._local_tensor.copy_(_noise(target, "bernoulli", kwargs.get("generator"), p).to(target.dtype))
    return target


@handler("bernoulli")
def bernoulli(func, types, args, kwargs):
    x, *rest = args
    x = x._reduced_value()
    p = rest[0] if rest else kwargs.get("p")
    if p is not None:
        return torch.zeros_like(x).bernoulli_(p, generator=kwargs.get("generator"))
    _raise_if_any(
        ~((x.detach() >= 0) & (x.detach() <= 1)), "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
    )
    u = uniform(x._layout, x._local_tensor.device, draw_key(x._layout.mesh, kwargs.get("generator")))
    out = wrap((u < x._local_tensor.detach()).to(x.dtype), x._layout)
    return out if "out" not in kwargs else kwargs["out"]._write(out)


# ---------------------------------------------------------------------- rand_like, randn_like, randint_like


@handler(torch.rand_like, torch.randn_like, torch.randint_like)
def random_like(func, types, args, kwargs):
    named = dict(kwargs)
    generator = named.pop("generator", None)
    out = torch.empty_like(args[0], **{k: v for k, v in named.items() if k not in ("low", "high")})
    if func is torch.rand_like:
        filled = out.detach().uniform_(generator=generator)
    elif func is torch.randn_like:
        filled = out.detach().normal_(generator=generator)
    else:
        bounds = list(args[1:]) + [named[k] for k in ("low", "high") if k in named]
        filled = out.detach().random_(*([0, *bounds] if len(bounds) == 1 else bounds), generator=generator)
    return filled.requires_grad_(named.get("requires_grad", False))


# ---------------------------------------------------------------------- dropout


def _dropout_mask(x: ShardTensor, p: float, per_channel: bool) -> ShardTensor:
    """Return the mask of kept elements (or of kept channels of an (N, C, ...) tensor)."""
    layout = x._layout
    if per_channel:
        if layout.ndim < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        batch_and_channel = [layout.dims[0], layout.dims[1]]
        layout = Layout.make(
            layout.mesh, [*batch_and_channel, *(Layout.replicate(layout.mesh, (1,)).dims[0] for _ in layout.dims[2:])]
        )
    u = uniform(layout, x._local_tensor.device, draw_key(layout.mesh))
    return wrap(u >= p, layout)


def _keeps_all(p: float, train: bool, training: bool | None) -> bool:
    """Return whether dropout keeps every element; raise for an invalid probability. F calls `train` `training`."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p == 0 or not (train if training is None else training)


@handler("dropout", "dropout_", "feature_dropout", "feature_dropout_")
def dropout(func, types, args, kwargs):
    return _dropout(func.__name__, *args, **kwargs)


def _dropout(name, input, p=0.5, train=True, inplace=False, *, training=None):
    """Run torch.dropout(input, p, train) or F.dropout(input, p, training, inplace), per element or per channel."""
    if _keeps_all(p, train, training):
        return input  # torch returns the input itself too, so a write into the result reaches the input
    in_place = inplace or name.endswith("_")
    source = input._reduced_value()
    factor = 0.0 if p == 1 else 1 / (1 - p)
    noise = _dropout_mask(source, p, name.startswith("feature")).to(source.dtype) * factor
    return input.mul_(noise) if in_place else source * noise


@handler("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")
def alpha_dropout(func, types, args, kwargs):
    return _alpha_dropout(func.__name__, *args, **kwargs)


def _alpha_dropout(name, input, p=0.5, train=False, inplace=False, *, training=None):
    if _keeps_all(p, train, training):
        return input
    in_place = inplace or name.endswith("_")
    if p == 1:
        return input.mul_(0) if in_place else input * 0
    alpha = 1.7580993408473766
    a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    keep = _dropout_mask(input._reduced_value(), p, name.startswith("feature")).to(input.dtype)
    shift = (keep - 1) * (alpha * a) + alpha * a * p
    return input.mul_(keep * a).add_(shift) if in_place else input * (keep * a) + shift


# ---------------------------------------------------------------------- normal and multinomial


@handler("normal")
def normal_of(func, types, args, kwargs):
    """Draw normal numbers with the mean and standard deviation of each element; local where both have one layout."""
    return _normal(*args, **kwargs)


def _normal(mean, std=1.0, *, generator=None, out=None):
    result = torch.normal(*(meta_tensor(v) if isinstance(v, Tensor) else v for v in (mean, std)))
    if not (result.is_floating_point() or result.is_complex()):
        raise NotImplementedError(f"normal: not implemented for {result.dtype}")
    center, spread = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    layout = torch.add(center, spread)._reduced_value()._layout
    if isinstance(spread, ShardTensor):
        _raise_if_any(spread.lt(0), "normal expects all elements of std >= 0.0")
    elif isinstance(spread, Tensor) and spread.device.type == "cpu" and bool((spread < 0).any()):
        raise RuntimeError("normal expects all elements of std >= 0.0")
    key, device = draw_key(layout.mesh, generator), collectives.device_of(layout.mesh)
    noise = normal(layout, device, key)
    if result.is_complex():
        noise = torch.complex(noise, normal(layout, device, key ^ _MIX2)) * math.sqrt(0.5)
    drawn = (wrap(_cast(noise, result.dtype), layout) * spread + center).to(result.dtype)
    for source in (mean, std):  # torch's result is in the graph, with gradients of zero
        if isinstance(source, Tensor) and source.requires_grad:
            drawn = torch.where(torch.zeros_like(drawn, dtype=torch.bool), source.to(drawn.dtype), drawn)
    return drawn if out is None else out._write(drawn)


def _raise_if_any(flags: Any, why: str) -> None:
    flags = flags._reduced_value()
    raise_if_any_rank(flags._local_tensor, process_groups(flags._layout, flags._layout.shard_axes), RuntimeError, why)


@handler("multinomial")
def multinomial(func, types, args, kwargs):
    """Draw categories. The numbers are those of each category's global index, so every sharding draws the same."""
    return _multinomial(*args, **kwargs)


def _multinomial(input, num_samples, replacement=False, *, generator=None, out=None):
    p = input.detach()._reduced_value()
    if p.ndim not in (1, 2) or not p.is_floating_point():
        raise RuntimeError(f"multinomial: the probabilities must be floats of 1 or 2 dims, not {p.ndim} of {p.dtype}")
    rows = move_shard_off(p._layout, 1) if p.ndim == 2 and p._layout.is_sharded(1) else None
    if rows is not None:  # the samples of a row are drawn on one rank
        p = wrap(redistribute(p._local_tensor, p._layout, rows), rows)
    size = p.shape[-1]
    if num_samples <= 0 or size == 0 or (not replacement and num_samples > size):
        raise RuntimeError(f"multinomial: cannot draw {num_samples} of {size} categories, replacement={replacement}")
    _raise_if_any((p < 0) | ~p.isfinite(), "probability tensor contains either `inf`, `nan` or element < 0")
    _raise_if_any(p.sum(-1) <= 0, "invalid multinomial distribution (sum of probabilities <= 0)")
    layout, device, p = p._layout, p._local_tensor.device, p.double()
    key = draw_key(layout.mesh, generator)
    if not replacement:
        # the largest of p / e, with e exponentially distributed, are categories drawn one after the other
        e = wrap(torch.log1p(-uniform(layout, device, key)).neg().clamp_min(2.0**-60), layout)
        drawn = (p / e).topk(num_samples, -1).indices
    else:
        axes = layout.axes_of(p.ndim - 1)
        sizes = nested_balanced(num_samples, [layout.mesh.size(a) for a in axes])
        layout = layout.with_dim(p.ndim - 1, DimSharding(num_samples, axes, tuple(sizes) if axes else ()))
        total = p.cumsum(-1)
        u = wrap(uniform(layout, device, key), layout) * total.narrow(-1, size - 1, 1)
        drawn = torch.searchsorted(total, u, right=True).clamp_max(size - 1)
    return drawn if out is None else out._write(drawn)


# ---------------------------------------------------------------------- functions without a rule


@handler("poisson", "binomial", "rrelu", "rrelu_", "rrelu_with_noise", torch.native_dropout)
def draw_replicated(func, types, args, kwargs):
    """Gather the operands and draw the full result on every rank from the same key, so that ranks agree."""
    key = draw_key(mesh_of(args, kwargs), kwargs.get("generator"))
    kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
    with torch.random.fork_rng(devices=[key.device] if key.device.type != "cpu" else []):
        torch.manual_seed(int(key))
        return gather_fallback(func, types, args, kwargs)
