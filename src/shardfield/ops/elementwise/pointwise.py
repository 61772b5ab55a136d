"""Elementwise functions: operands are aligned by broadcasting rules, then torch's function runs on the local tensors.

One handler (`pointwise`) serves all functions of the tables below. Functions that are linear keep Partial operands
partial. The adjoint of the alignment sums gradients over the axes along which an operand was broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ... import runtime
from ...dispatch.copied_views import of_copied_view, write_through
from ...dispatch.registry import (
    as_operand,
    composed,
    gather_fallback,
    handler,
    map_tensors,
    mark_consumed,
    mesh_of,
    to_full_tensor,
    write_out,
)
from ...layout import Layout
from ...tensor import ShardTensor, wrap
from ...trace_state import same_memory
from .._common.broadcast import Alignment, align, align_to
from ..indexing.buffers import is_buffer_for, shard_buffer
from .integer_division import raise_for_zero_divisors

UNARY = """
abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 isfinite isinf isnan
isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit mvlgamma nan_to_num polygamma rad2deg
reciprocal relu relu6 round rsqrt selu celu elu gelu leaky_relu hardshrink hardsigmoid hardswish hardtanh
logsigmoid mish sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh
tanhshrink threshold trunc special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
special_logit special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_sinc
special_spherical_bessel_j0 clamp clamp_max clamp_min clip
float double half bfloat16 int long short char byte bool cfloat cdouble chalf
""".split()

BINARY = """
add atan2 arctan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div divide eq
float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot igamma igammac isclose lcm
ldexp le less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne
nextafter not_equal polar pow remainder rsub special_chebyshev_polynomial_t special_chebyshev_polynomial_u
special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_gammainc special_gammaincc
special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_xlog1py
special_xlogy special_zeta sub subtract true_divide xlogy complex
fake_quantize_per_tensor_affine
""".split()

TERNARY = "addcdiv addcmul lerp masked_fill".split()

# Linear in all operands together ("sum": all must have the same Partial) or in one operand ("product"; for div, the
# first).
LINEAR = dict.fromkeys(
    "neg negative positive clone detach conj resolve_conj resolve_neg alias add sub subtract __add__ "
    "__radd__ __sub__ __neg__ __pos__ add_ sub_ __iadd__ __isub__ neg_ complex".split(),
    "sum",
) | dict.fromkeys(
    "mul multiply div divide true_divide __mul__ __rmul__ __truediv__ mul_ div_ __imul__ __itruediv__".split(),
    "product",
)
QUOTIENT = {"div", "divide", "true_divide", "__truediv__", "div_", "__itruediv__"}


def linear_partials(
    name: str, tensors: Sequence[Tensor], layouts: tuple[Layout, ...], args: Any, kwargs: Any
) -> tuple[int, ...]:
    """Return the positions of operands that may stay Partial, because the op is linear in them."""
    partials = [i for i, x in enumerate(layouts) if x.partial]
    if not partials or _rounds_integers(name, [tensors[i] for i in partials], tensors, args):
        return ()
    kind = None if kwargs.get("rounding_mode") else LINEAR.get(name)
    scalars = any(isinstance(v, (int, float, complex)) for v in args)
    if kind is None or any(op != "sum" for i in partials for _, op in layouts[i].partial):
        return ()
    if kind == "sum":
        equal = len({layouts[i].partial for i in partials}) == 1
        return tuple(partials) if equal and len(partials) == len(layouts) and not scalars else ()
    if len(partials) != 1 or (name in QUOTIENT and partials[0] != 0):
        return ()
    axes = set(layouts[partials[0]].partial_axes)
    conflict = any(axes & set(x.shard_axes) for x in layouts)
    return () if conflict else (partials[0],)


def _rounds_integers(name: str, partials: list[Tensor], tensors: Sequence[Tensor], args: Any) -> bool:
    """Return whether the op would round partial sums of integers to floating point.

    A sum of integers is exact on one device: rounded partial sums that cancel would lose all of its digits.
    """
    if all(t.is_floating_point() or t.is_complex() for t in partials):
        return False
    inexact = any(t.is_floating_point() or t.is_complex() for t in tensors)
    return inexact or name in QUOTIENT or any(isinstance(v, (float, complex)) for v in args)


def pointwise(func, types, args, kwargs):
    first = args[0] if args and not kwargs else None
    if first.__class__ is ShardTensor and not first._layout.partial:  # fast path: layouts are equal
        layout, count, out = first._layout, len(args), None
        if count == 2:
            second = args[1]
            if second.__class__ is ShardTensor:
                if second._layout is layout:
                    out = func(first._local_tensor, second._local_tensor)
            elif second.__class__ in STATIC_TYPES:
                out = func(first._local_tensor, second)
        elif count == 3 and args[1].__class__ is args[2].__class__ is ShardTensor:
            if args[1]._layout is args[2]._layout is layout:
                out = func(first._local_tensor, args[1]._local_tensor, args[2]._local_tensor)
        if out.__class__ is Tensor:
            return wrap(out, layout)
        if out is not None:
            return wrap_results(out, layout)
    elif kwargs:
        if kwargs.get("inplace"):  # F.relu(x, inplace=True)
            return pointwise_inplace(func, types, args, kwargs)
        if kwargs.get("rounding_mode"):
            raise_for_zero_divisors(args, kwargs)
    key, values = call_key(BROADCAST, args, kwargs)
    plan = runtime.active.plans[key] or plan_broadcast(key, align)
    if plan is None or not plan.no_redistribute:  # else every rank saves the operands themselves
        mark_consumed((args, kwargs))
    if plan is not None:
        return wrap_results(func(*plan.redistribute(values), **kwargs), plan.result)
    if "out" in kwargs:
        out = kwargs["out"]
        result = pointwise(func, types, args, {k: v for k, v in kwargs.items() if k != "out"})
        for target, value in zip(out, result, strict=True) if isinstance(out, (tuple, list)) else [(out, result)]:
            write_out(target, value)
        return out
    # A write into a Partial tensor replaces its memory, so that a second ShardTensor of that memory would not see it.
    if func.__name__ in NO_OPS and first.__class__ is ShardTensor and len(args) == 1:
        if func(first._local_tensor) is first._local_tensor:
            return first
    locals_, layouts, put_back = collect_tensors(args, kwargs)
    keep = linear_partials(func.__name__, locals_, layouts, args, kwargs)
    alignment = align(layouts, keep)
    args, kwargs = put_back(alignment.redistribute(locals_, layouts))
    return wrap_results(func(*args, **kwargs), alignment.result)


def pointwise_inplace(func, types, args, kwargs):
    target = args[0]
    if kwargs and kwargs.get("rounding_mode"):
        raise_for_zero_divisors(args, kwargs)
    buffered = is_buffer_for(target, args[1:]) and not shard_buffer(target, args[1:])
    if target.__class__ is not ShardTensor:  # a plain target takes the full values of ShardTensors
        if buffered:
            gather_fallback(func, types, args, kwargs)
            return target
        full = map_tensors((args[1:], kwargs), lambda t: to_full_tensor(t) if isinstance(t, ShardTensor) else t)
        return func(target, *full[0], **full[1])
    if target._copied_view and write_through(target, lambda x: pointwise_inplace(func, types, (x, *args[1:]), kwargs)):
        return target
    target._check_writable()
    key, values = call_key(INPLACE, args, kwargs)
    plan = runtime.active.plans[key] or plan_broadcast(key, lambda layouts: align_to(layouts[0], layouts))
    if plan is not None:
        func(*_without_overlaps(plan.redistribute(values)), **kwargs)
        return target
    locals_, layouts, put_back = collect_tensors(args, kwargs)
    keep = linear_partials(func.__name__, locals_, layouts, args, kwargs)
    if target._layout.partial and 0 not in keep:
        if target.is_leaf and target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        reduce_in_place(target)
        locals_[0], layouts = target._local_tensor, (target._layout, *layouts[1:])
    alignment = align_to(target._layout, layouts, keep)
    redistributed = alignment.redistribute(locals_, layouts)
    redistributed[0] = target._local_tensor
    args, kwargs = put_back(_without_overlaps(redistributed))
    func(*args, **kwargs)
    return target


def reduce_in_place(target: ShardTensor) -> None:
    """Replace the memory of a Partial by its reduced value."""
    # no_grad applies to the call alone, not to the reduction
    with torch.set_grad_enabled(torch.is_grad_enabled() or not target.is_leaf):
        reduced = target._reduced_value()
    target._local_tensor, target._layout, target._reduced_cache = reduced._local_tensor, reduced._layout, None


def _without_overlaps(values: list[Any]) -> list[Any]:
    """Copy operands that share memory with the target, which comes first.

    torch refuses operands that overlap the target in part. Whether local tensors do depends on the rank: an empty shard
    overlaps nothing. With a copy all ranks read the operand before it is written, and none raises.
    """
    target = values[0]
    for i in range(1, len(values)):
        value = values[i]
        if isinstance(value, Tensor) and value is not target and same_memory(value, target):
            values[i] = value.clone()
    return values


# ---------------------------------------------------------------------- plans cached by the operands' layouts


class BroadcastPlan(NamedTuple):
    """The cached alignment of operands with these layouts.

    no_redistribute: the operands have their target layouts already. single_rank: the mesh has one rank.
    """

    layouts: tuple[Layout, ...]
    alignment: Alignment
    result: Layout
    no_redistribute: bool

    def redistribute(self, values: list[Any]) -> list[Any]:
        """Return the arguments of a call with its tensors redistributed."""
        if self.no_redistribute:
            return values
        positions = [i for i, v in enumerate(values) if v.__class__ not in STATIC_TYPES]
        tensors = self.alignment.redistribute([values[i] for i in positions], self.layouts)
        for i, tensor in zip(positions, tensors, strict=True):
            values[i] = tensor
        return values


# The key of a BroadcastPlan: one of these, then the layout of each ShardTensor and the shape of each plain tensor, in
# order. Other arguments do not affect the alignment as long as no operand is Partial. The operands of an in-place call
# align to the first.
BROADCAST, INPLACE = "broadcast", "broadcast in place"
STATIC_TYPES: frozenset[Any] = frozenset([int, float, bool, str, complex, type(None), torch.dtype, torch.memory_format])


def call_key(prefix: str, args: Any, kwargs: Any) -> tuple[tuple | None, list[Any]]:
    """Return the key of a call's BroadcastPlan, and its arguments with ShardTensors replaced by local tensors.

    The key is None if an argument is not a ShardTensor, a plain tensor, a parameter or of one of `STATIC_TYPES`.
    """
    key: list[Any] = [prefix]
    values: list[Any] = []
    for value in args:
        kind = value.__class__
        if kind is ShardTensor:
            key.append(value._layout)
            values.append(value._local_tensor)
        elif kind is Tensor or kind is Parameter:
            key.append(value.shape)
            values.append(value)
        elif kind in STATIC_TYPES:
            values.append(value)
        else:
            return None, values
    for value in kwargs.values() if kwargs else ():
        if value.__class__ not in STATIC_TYPES:
            return None, values
    return tuple(key), values


def plan_broadcast(key: tuple | None, find: Callable) -> BroadcastPlan | None:
    """Return the plan for `key` and cache it, or None if the plan depends on more than the key (Partial operands)."""
    mesh = next((x.mesh for x in key if x.__class__ is Layout), None) if key else None
    if key is None or mesh is None:
        return None
    layouts = tuple(x if x.__class__ is Layout else Layout.replicate(mesh, x) for x in key[1:])
    if any(x.partial or x.mesh is not mesh for x in layouts):
        return None
    alignment = find(layouts)
    no_redistribute = alignment.targets == layouts and not alignment.grad_reductions
    plan = runtime.active.plans[key] = BroadcastPlan(layouts, alignment, alignment.result, no_redistribute)
    return plan


def collect_tensors(args: Any, kwargs: Any):
    """Return the local tensors among the arguments, their layouts, and a function that replaces them in the call."""
    mesh = mesh_of(args, kwargs)
    locals_: list[Tensor] = []
    layouts: list[Layout] = []

    def collect(value: Tensor) -> None:
        local, layout = as_operand(value, mesh, partial=True, merged=True)
        locals_.append(local)
        layouts.append(layout)

    map_tensors((args, kwargs), collect)

    def put_back(tensors: list[Tensor]):
        remaining = iter(tensors)
        return map_tensors((args, kwargs), lambda _: next(remaining))

    return locals_, tuple(layouts), put_back


def wrap_results(out: Any, layout: Layout) -> Any:
    """Wrap the result, or each of several results."""
    return wrap(out, layout) if out.__class__ is Tensor else map_tensors(out, lambda t: wrap(t, layout))


CASTS = set("float double half bfloat16 int long short char byte bool cfloat cdouble chalf".split())
# Return their operand where there is nothing to do.
NO_OPS = CASTS | {"positive", "__pos__", "resolve_conj", "resolve_neg"}
LINEAR_UNARY = [
    "neg",
    "negative",
    "positive",
    "clone",
    "conj",
    "resolve_conj",
    "resolve_neg",
    "alias",
]

for _name in [*UNARY, *BINARY, *TERNARY, *LINEAR_UNARY]:
    handler(_name)(pointwise)
    if _name not in CASTS:  # some in-place forms, as leaky_relu_, are functions and not methods
        handler(_name + "_")(pointwise_inplace)
handler("copy_", "fill_", "zero_")(pointwise_inplace)
handler("fill")(pointwise)
handler(torch.where)(pointwise)
runtime.active.registry.elementwise = pointwise


def _divides_integers(run: Callable) -> Callable:
    def divide(func, types, args, kwargs):
        raise_for_zero_divisors(args, kwargs)
        return run(func, types, args, kwargs)

    return divide


for _name in ("floor_divide", "remainder", "fmod"):
    handler(_name)(_divides_integers(pointwise))
    handler(_name + "_")(_divides_integers(pointwise_inplace))


@handler("conj", "positive", "resolve_conj", "resolve_neg")
def itself_or_view(func, types, args, kwargs):
    """Return the tensor itself where torch does; a view of a copied view is a copied view too."""
    target = args[0] if args else kwargs["input"]
    if target._layout.partial:
        return pointwise(func, types, args, kwargs)
    local = target._local_tensor
    if func(local) is local:
        return target
    out = pointwise(func, types, args, kwargs)
    return of_copied_view(out, target, func) if same_memory(out._local_tensor, local) else out


handler("detach_")(pointwise_inplace)


@handler("frexp", "type")
def frexp_type(func, types, args, kwargs):
    """Run elementwise functions that return two tensors or a string."""
    return pointwise(func, types, args, kwargs)


@composed("prelu")
def prelu(input, weight):
    """Multiply negative elements by a slope, one per channel or one for all."""
    device = input.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (input.dtype, weight.dtype):
        input, weight = (t.to(torch.get_autocast_dtype(device)) for t in (input, weight))
    if input.dtype != weight.dtype:
        raise RuntimeError(f"prelu: input and weight should have one dtype, not {input.dtype} and {weight.dtype}")
    if weight.numel() == 1:
        weight = weight.reshape(())
    elif input.ndim > 1:
        weight = weight.reshape([-1] + [1] * (input.ndim - 2))
    return torch.where(input > 0, input, weight * input)


@composed("glu")
def glu(input, dim=-1):
    """Multiply the first half along `dim` by the sigmoid of the second."""
    if input.shape[dim] % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {input.shape[dim]}")
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()
