"""The ops of random programs: each function draws the arguments of one call on values that exist, or returns None."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# name of the op -> function of (draw, name of the operand), by family
FAMILIES: dict[str, dict[str, Callable]] = {}
Call = tuple[Any, ...]  # (function, args, kwargs, pick); kwargs and pick may be left out


def op(family: str) -> Callable:
    def register(fn: Callable) -> Callable:
        FAMILIES.setdefault(family, {})[fn.__name__] = fn
        return fn

    return register


# ---------------------------------------------------------------------- elementwise


@op("elementwise")
def unary(g, x):
    names = ["torch.sin", "torch.tanh", "torch.sigmoid", "F.gelu", "F.relu", "torch.neg", "torch.abs", "torch.square"]
    return g.pick([*names, "F.softplus", "torch.atan", "Tensor.clone", "Tensor.contiguous"]), (x,)


@op("elementwise")
def scalar(g, x):
    return g.pick(["torch.add", "torch.mul", "torch.sub", "torch.div"]), (x, g.pick([0.5, 2.0, -1.5]))


@op("elementwise")
def binary(g, x):
    fn = g.pick(["torch.add", "torch.mul", "torch.sub", "torch.maximum", "torch.hypot"])
    y = g.broadcastable(x)
    return fn, (x, y) if g.flag() else (y, x)


@op("elementwise")
def ternary(g, x):
    y, z = g.broadcastable(x), g.broadcastable(x)
    return g.pick([("torch.lerp", (x, y, z)), ("torch.addcmul", (x, y, z)), ("torch.clamp", (x, -0.7, 0.9))])


@op("elementwise")
def masked(g, x):
    mask = g.mask_for(x)
    if g.flag():
        return "torch.where", (mask, x, g.pick([0.25, g.broadcastable(x)]))
    return "torch.masked_fill", (x, mask, g.pick([0.0, -1.0]))


@op("elementwise")
def threshold_mask(g, x):
    return "greater", (x, g.pick([0.0, 0.3]))


# ---------------------------------------------------------------------- views


@op("views")
def reshape(g, x):
    return g.pick(["torch.reshape", "Tensor.view"]), (x, g.factors(math.prod(g.shape(x))))


@op("views")
def permute(g, x):
    return "torch.permute", (x, tuple(g.permutation(len(g.shape(x)))))


@op("views")
def transpose(g, x):
    return ("torch.transpose", (x, g.dim(x), g.dim(x))) if g.shape(x) else None


@op("views")
def flatten(g, x):
    n = len(g.shape(x))
    first = g.int(0, n - 1) if n else 0
    return "torch.flatten", (x, first, g.int(first, n - 1) if n else 0)


@op("views")
def unsqueeze(g, x):
    return "torch.unsqueeze", (x, g.int(0, len(g.shape(x))))


@op("views")
def squeeze(g, x):
    return "torch.squeeze", (x,)


@op("views")
def expand(g, x):
    shape = [g.int(2, 3) if n == 1 else -1 for n in g.shape(x)]
    return "Tensor.expand", (x, [*([2] if g.flag() else []), *shape])


@op("views")
def narrow(g, x):
    dim = g.dim(x)
    start = g.int(0, max(g.shape(x)[dim] - 1, 0))
    return "torch.narrow", (x, dim, start, g.int(0, g.shape(x)[dim] - start))


@op("views")
def select(g, x):
    dim = g.dim(x)
    return ("torch.select", (x, dim, g.int(0, g.shape(x)[dim] - 1))) if g.shape(x)[dim] else None


@op("views")
def chunk(g, x):
    parts = g.int(2, 3)
    return "torch.chunk", (x, parts, g.dim(x)), {}, g.int(0, parts - 1)


@op("views")
def split(g, x):
    dim = g.dim(x)
    size = g.shape(x)[dim]
    first = g.int(0, size)
    return "torch.split", (x, [first, size - first], dim), {}, g.int(0, 1)


@op("views")
def diagonal(g, x):
    return ("torch.diagonal", (x, g.int(-1, 1), 0, len(g.shape(x)) - 1)) if len(g.shape(x)) > 1 else None


@op("views")
def tensor_unfold(g, x):
    dim = g.dim(x)
    size = g.int(1, 3)
    return ("Tensor.unfold", (x, dim, size, g.int(1, 3))) if g.shape(x)[dim] >= size else None


@op("views")
def reshard(g, x):
    return "reshard", (x, g.sharding(g.shape(x), partial=False))


# ---------------------------------------------------------------------- indexing


@op("indexing")
def slices(g, x):
    return "getitem", (x, g.index(x))


@op("indexing")
def index_select(g, x):
    dim = g.dim(x)
    if not g.shape(x)[dim]:
        return None
    return "torch.index_select", (x, dim, g.input((g.int(0, 6),), f"index:{g.shape(x)[dim]}"))


@op("indexing")
def fancy(g, x):
    shape = g.shape(x)
    first = g.dim(x)
    if not shape[first]:
        return None
    length = (g.int(1, 4),) if g.flag() else (2, g.int(1, 3))
    key = [slice(None)] * first + [g.input(length, f"index:{shape[first]}")]
    if first + 1 < len(shape) and shape[first + 1] and g.flag():
        key.append(g.input(length[-1:], f"index:{shape[first + 1]}"))
    return "getitem", (x, tuple(key))


@op("indexing")
def gather(g, x):
    dim = g.dim(x)
    shape = list(g.shape(x))
    if not math.prod(shape):
        return None
    high, shape[dim] = shape[dim], g.int(1, 4)
    return g.pick(["torch.gather"]), (x, dim, g.input(tuple(shape), f"index:{high}"))


@op("indexing")
def masked_read(g, x):
    mask = g.input(g.shape(x)[: g.int(1, len(g.shape(x)))], "mask") if g.shape(x) else None
    return None if mask is None else ("getitem", (x, mask))


@op("indexing")
def embedding(g, x):
    if len(g.shape(x)) != 2 or not g.shape(x)[0]:
        return None
    return "F.embedding", (g.input((g.int(1, 3), g.int(1, 4)), f"index:{g.shape(x)[0]}"), x)


# ---------------------------------------------------------------------- in-place writes


@op("writes")
def write_scalar(g, x):
    return g.pick(
        [
            ("Tensor.mul_", (x, 0.5)),
            ("Tensor.add_", (x, 1.0)),
            ("Tensor.zero_", (x,)),
            ("Tensor.clamp_", (x, -1.0, 0.5)),
        ]
    )


@op("writes")
def write_tensor(g, x):
    return g.pick(["Tensor.add_", "Tensor.mul_", "Tensor.copy_", "Tensor.sub_"]), (x, g.expandable(x))


@op("writes")
def write_index(g, x):
    key = g.index(x)
    return "setitem", (x, key, g.pick([0.5, g.expandable(x, key)]))


@op("writes")
def write_mask(g, x):
    if g.flag():
        return "Tensor.masked_fill_", (x, g.mask_for(x), 0.25)
    return "setitem", (x, g.input(g.shape(x), "mask"), -0.5)


@op("writes")
def write_rows(g, x):
    dim = g.dim(x)
    shape = list(g.shape(x))
    if not shape[dim]:
        return None
    rows = g.int(1, 4)
    index = g.input((rows,), f"index:{shape[dim]}")
    shape[dim] = rows
    return g.pick(["Tensor.index_add_"]), (x, dim, index, g.input(tuple(shape)))


@op("writes")
def write_scatter(g, x):
    dim = g.dim(x)
    shape = list(g.shape(x))
    if not math.prod(shape):
        return None
    high, shape[dim] = shape[dim], g.int(1, 3)
    index = g.input(tuple(shape), f"index:{high}")
    return "Tensor.scatter_add_", (x, dim, index, g.input(tuple(shape)))


# ---------------------------------------------------------------------- reductions


@op("reductions")
def reduce(g, x):
    fn = g.pick(["torch.sum", "torch.mean", "torch.amax", "torch.amin", "torch.logsumexp"])
    return fn, (x,), {"dim": g.dims(x), "keepdim": g.flag()}


@op("reductions")
def variance(g, x):
    dims = g.dims(x)
    if math.prod(g.shape(x)[d] for d in dims) < 2:
        return None
    return g.pick(["torch.var", "torch.std"]), (x,), {"dim": dims, "keepdim": g.flag(), "correction": g.int(0, 1)}


@op("reductions")
def extreme(g, x):
    return g.pick(["torch.max", "torch.min", "median"]), (x,), {"dim": g.dim(x), "keepdim": g.flag()}, 0


@op("reductions")
def vector_norm(g, x):
    order = g.pick([1, 2, 3, float("inf")])
    return "torch.linalg.vector_norm", (x,), {"ord": order, "dim": g.dims(x), "keepdim": g.flag()}


@op("reductions")
def full_reduction(g, x):
    return g.pick(["torch.sum", "torch.mean", "Tensor.max"]), (x,)


@op("reductions")
def softmax(g, x):
    return g.pick(["torch.softmax", "torch.log_softmax"]), (x, g.dim(x))


@op("reductions")
def loss(g, x):
    y = g.same_shape(x)
    return g.pick(["F.mse_loss", "F.l1_loss", "F.smooth_l1_loss"]), (x, y), {"reduction": g.pick(["mean", "sum"])}


# ---------------------------------------------------------------------- stencils


def spatial(g, x) -> int | None:
    """Return the number of spatial dims of a field (N, C, ...), or None."""
    n = len(g.shape(x)) - 2
    return n if 1 <= n <= 3 and math.prod(g.shape(x)) else None


@op("stencils")
def conv(g, x):
    n = spatial(g, x)
    if n is None:
        return None
    shape = g.shape(x)
    groups = g.pick([1, shape[1]])
    kernel = [g.int(1, 3) for _ in range(n)]
    weight = g.input((groups * g.int(1, 2), shape[1] // groups, *kernel), plain=g.int(0, 3) < 3)
    bias = g.input((g.shape(weight)[0],), plain=True) if g.flag() else None
    options = {"stride": g.int(1, 2), "padding": g.int(0, 2), "dilation": g.int(1, 2), "groups": groups}
    return f"F.conv{n}d", (x, weight, bias), options


@op("stencils")
def conv_transpose(g, x):
    n = spatial(g, x)
    if n is None:
        return None
    weight = g.input((g.shape(x)[1], g.int(1, 2), *(g.int(1, 3) for _ in range(n))), plain=True)
    return f"F.conv_transpose{n}d", (x, weight), {"stride": g.int(1, 2), "padding": g.int(0, 1)}


@op("stencils")
def pool(g, x):
    n = spatial(g, x)
    if n is None:
        return None
    kernel = g.int(1, 3)
    options = {"stride": g.int(1, 3), "padding": g.int(0, kernel // 2), "ceil_mode": g.flag()}
    return f"F.{g.pick(['max', 'avg'])}_pool{n}d", (x, kernel), options


@op("stencils")
def adaptive_pool(g, x):
    n = spatial(g, x)
    return None if n is None else (f"F.adaptive_avg_pool{n}d", (x, g.int(1, 4)))


@op("stencils")
def pad(g, x):
    n = spatial(g, x)
    if n is None:
        return None
    mode = g.pick(["constant", "circular", "reflect", "replicate"])
    widths = [g.int(0, 2) for _ in range(2 * n)]
    return "F.pad", (x, widths), {"mode": mode}


@op("stencils")
def interpolate(g, x):
    n = spatial(g, x)
    if n is None:
        return None
    mode = g.pick(["nearest", ["linear", "bilinear", "trilinear"][n - 1]])
    options = {"mode": mode, "scale_factor": g.pick([2.0, 0.5, 1.5])}
    if mode != "nearest":
        options["align_corners"] = g.flag()
    return "F.interpolate", (x,), options


@op("stencils")
def shift(g, x):
    dim = g.dim(x)
    return g.pick(
        [("torch.roll", (x, g.int(-3, 3), dim)), ("torch.flip", (x, (dim,))), ("torch.diff", (x,), {"dim": dim})]
    )


@op("stencils")
def patches(g, x):
    if spatial(g, x) != 2:
        return None
    return "F.unfold", (x, g.int(1, 3)), {"stride": g.int(1, 2), "padding": g.int(0, 1)}


@op("stencils")
def shuffle(g, x):
    if len(g.shape(x)) != 4:
        return None
    return g.pick(["F.pixel_unshuffle", "F.pixel_shuffle"]), (x, 2)


# ---------------------------------------------------------------------- attention, products


@op("products")
def attend(g, x):
    shape = g.shape(x)
    if not 3 <= len(shape) <= 4 or not math.prod(shape):
        return None
    length = g.int(1, 6)
    k = g.pick([x, g.input((*shape[:-2], length, shape[-1]))])
    kind = g.int(0, 2)
    if kind == 1:
        return "attention", (x, k, g.same_shape(k)), {"causal": True}
    mask = g.input((shape[-2], g.shape(k)[-2])) if kind == 2 else None
    return "attention", (x, k, g.same_shape(k), mask)


@op("products")
def linear(g, x):
    size = g.shape(x)[-1] if g.shape(x) else 0
    if not size:
        return None
    weight = g.input((g.int(1, 4), size), plain=g.int(0, 3) < 3)
    return "F.linear", (x, weight, g.input((g.shape(weight)[0],), plain=True) if g.flag() else None)


@op("products")
def matmul(g, x):
    shape = g.shape(x)
    if not shape or not math.prod(shape):
        return None
    if len(shape) > 2 and g.flag():
        return "torch.matmul", (x, g.input((*shape[:-2], shape[-1], g.int(1, 3))))
    return "torch.matmul", (x, g.input((shape[-1], g.int(1, 3)) if g.flag() else (shape[-1],)))


@op("products")
def einsum(g, x):
    shape = g.shape(x)
    if not 2 <= len(shape) <= 4:
        return None
    names = "abcd"[: len(shape)]
    dim = g.int(0, len(shape) - 1)
    rest = names.replace(names[dim], "")
    weight = g.input((shape[dim], g.int(1, 3)))
    return "torch.einsum", (f"{names},{names[dim]}z->{g.pick([rest + 'z', 'z' + rest])}", x, weight)


# ---------------------------------------------------------------------- Fourier transforms


@op("spectral")
def spectrum(g, x):
    if not math.prod(g.shape(x)) or not g.shape(x):
        return None
    norm = g.pick(["ortho", "forward", "backward"])
    return g.pick(["torch.fft.rfft", "torch.fft.fft", "torch.fft.ihfft"]), (x,), {"dim": g.dim(x), "norm": norm}


@op("spectral")
def spectral_layer(g, x):
    shape = g.shape(x)
    if len(shape) < 2 or not math.prod(shape) or shape[-2] < 2:
        return None
    modes = g.int(1, shape[-2] // 2)
    return "truncated_spectrum", (x, modes, g.int(1, shape[-1] // 2 + 1), g.pick(["ortho", "forward"]))


@op("complex")
def complex_part(g, x):
    return g.pick(["torch.real", "torch.imag", "torch.view_as_real"]), (x,)


@op("complex")
def inverse(g, x):
    if not g.shape(x) or not math.prod(g.shape(x)):
        return None
    return g.pick(["torch.fft.irfft", "torch.fft.ifft"]), (x,), {"dim": g.dim(x), "norm": g.pick(["ortho", "forward"])}


@op("complex")
def complex_slice(g, x):
    return "getitem", (x, g.index(x))


@op("complex")
def complex_scale(g, x):
    return "torch.mul", (x, g.broadcastable(x))


# ---------------------------------------------------------------------- norms


@op("norms")
def layer_norm(g, x):
    shape = g.shape(x)
    dims = g.int(1, min(2, len(shape))) if shape else 0
    if not dims or math.prod(shape[-dims:]) < 2:
        return None
    kind = g.flag()
    weight = g.input(shape[-dims:], plain=True) if g.flag() else None
    if kind:
        return "F.layer_norm", (x, shape[-dims:], weight)
    return "F.rms_norm", (x, shape[-dims:], weight, 1e-5)  # by default, rounding errors of zeros are normalized too


@op("norms")
def channel_norm(g, x):
    shape = g.shape(x)
    if len(shape) < 3 or math.prod(shape[2:]) < 2 or not shape[0] * shape[1]:
        return None
    weight = g.input((shape[1],), plain=True) if g.flag() else None
    kind = g.int(0, 2)
    if kind == 0:
        return "F.group_norm", (x, g.pick([1, shape[1]]), weight)
    if kind == 1:
        return "F.instance_norm", (x, None, None, weight)
    return "batch_norm", (x, None, None, weight), {"training": True}


@op("norms")
def unit(g, x):
    return "F.normalize", (x,), {"dim": g.dim(x), "eps": 1e-3}


# ---------------------------------------------------------------------- cat, sort, scan


@op("joins")
def cat(g, x):
    dim = g.dim(x)
    parts = [x, g.same_shape(x), x][: g.int(2, 3)]
    return g.pick(["torch.cat", "torch.stack"]), (parts, dim)


@op("joins")
def repeat(g, x):
    if g.flag():
        return "torch.repeat_interleave", (x, 2, g.dim(x))
    return "torch.tile", (x, [g.int(1, 2) for _ in g.shape(x)])


@op("sorts")
def sort(g, x):
    return "torch.sort", (x,), {"dim": g.dim(x), "descending": g.flag(), "stable": True}, 0


@op("sorts")
def topk(g, x):
    dim = g.dim(x)
    return "torch.topk", (x, g.int(0, g.shape(x)[dim]), dim, g.flag()), {}, 0


@op("sorts")
def scan(g, x):
    return g.pick([("torch.cumsum", (x, g.dim(x))), ("torch.logcumsumexp", (x, g.dim(x)))])


@op("sorts")
def scan_extreme(g, x):
    return g.pick(["torch.cummax", "torch.cummin"]), (x, g.dim(x)), {}, 0


@op("sorts")
def triangle(g, x):
    return (g.pick(["torch.tril", "torch.triu"]), (x, g.int(-1, 1))) if len(g.shape(x)) > 1 else None
