"""Products of vectors, matrices and batches of them.

Each function is a contraction: a table row or a rule gives the labels of its operands' dims, and `plan_contraction`
chooses the layouts. `probe` raises torch's errors about dims and dtypes on all ranks; `plan_contraction` finds sizes
that do not match. The local work is torch's function. Contracting a sharded label leaves a Partial result. The adjoint
redistributes the gradients back to the operands' layouts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import handler, rule, write_out
from ...layout import Layout
from ...redistribute import redistribute, without_partial
from .._common.autocast import under_autocast
from .._common.broadcast import broadcast_layout
from .._common.probe import probe, stand_in
from .contraction_strategy import Label, Term, plan_contraction
from .sparse_mm import AROUND_SPARSE


def make_term(operand: Operand, labels: Sequence[Label | None]) -> Term:
    """Return the operand as a term of a contraction."""
    return Term(operand.layout, tuple(labels), operand.dtype.itemsize)


def batch_labels(count: int) -> tuple[int, ...]:
    """Return labels for `count` batch dims, which match those of other operands from the right."""
    return tuple(range(-count, 0))


def with_signature(planner: Callable, *names: str, **defaults: Any) -> Callable:
    """Give a planner the parameter names that torch has for this function."""
    positional, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(n, positional) for n in names]
    parameters += [inspect.Parameter(n, by_name, default=v) for n, v in defaults.items()]
    signature = inspect.Signature([*parameters, inspect.Parameter("fn", by_name)])
    planner.__signature__ = signature  # type: ignore[attr-defined]
    return planner


# ---------------------------------------------------------------------- two operands of fixed ndim

PAIRS = {
    "mm": ("input", "mk", "mat2", "kn", "mn"),
    "bmm": ("input", "bmk", "mat2", "bkn", "bmn"),
    "mv": ("input", "mk", "vec", "k", "m"),
    "dot": ("input", "k", "tensor", "k", ""),
    "vdot": ("input", "k", "other", "k", ""),
    "outer": ("input", "m", "vec2", "n", "mn"),
    "ger": ("input", "m", "vec2", "n", "mn"),
}


def _pair_rule(first: str, left: str, second: str, right: str, out: str) -> Callable:
    def planner(a: Operand, b: Operand, *, fn: Callable) -> Plan:
        probe(fn, a, b)
        plan = plan_contraction([make_term(a, left), make_term(b, right)], out)
        targets = dict(zip((first, second), plan.targets, strict=True))
        return Plan(local=fn, takes=(first, second), operands=targets, layout=plan.result, saves_views=True)

    return with_signature(planner, first, second)


for _name, _row in PAIRS.items():
    rule(_name, partial=True, merged=True, around=AROUND_SPARSE.get(_name))(_pair_rule(*_row))


# ---------------------------------------------------------------------- a product added to an input

ADD_PRODUCTS: dict[str, tuple[str, str, str, str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "addmm": ("mat1", "mk", "mat2", "kn", "mn", torch.mm),
    "addmv": ("mat", "mk", "vec", "k", "m", torch.mv),
    "addr": ("vec1", "m", "vec2", "n", "mn", torch.outer),
    "baddbmm": ("batch1", "bmk", "batch2", "bkn", "bmn", torch.bmm),
    "addbmm": ("batch1", "bmk", "batch2", "bkn", "mn", lambda a, b: torch.bmm(a, b).sum(0)),
}


def _add_product_rule(first: str, left: str, second: str, right: str, out: str, multiply: Callable) -> Callable:
    def planner(input: Operand, a: Operand, b: Operand, *, beta: Any, alpha: Any, fn: Callable) -> Plan:
        probe(fn, input, a, b, beta=beta, alpha=alpha)
        terms = [make_term(a, left), make_term(b, right)]
        used = {x for t in terms for x in (*t.layout.shard_axes, *t.layout.partial_axes)}
        if not input.layout.partial and not used & set(input.layout.shard_axes):
            # the input's shards divide the product, whose operands are replicated over their axes
            terms.append(make_term(input, out[len(out) - input.ndim :]))
        plan = plan_contraction(terms, out, broadcast=True)
        result = _reduce_into_shards(plan.result, input.layout) if beta != 0 else plan.result

        def fused(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
            # expand: torch's addmv with a scalar input and an empty matrix resizes its result
            return fn(input.expand(result.local_shape), a, b, beta=beta, alpha=alpha)

        def product_then_add(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
            product = redistribute(multiply(a, b), plan.result, result)
            return (input * beta).to(product.dtype) + product * alpha

        return Plan(
            saves_views=True,
            local=fused if result is plan.result else product_then_add,
            takes=("input", first, second),
            operands={"input": addend_layout(result, input), first: plan.targets[0], second: plan.targets[1]},
            layout=result,
        )

    return with_signature(planner, "input", first, second, beta=1, alpha=1)


def addend_layout(result: Layout, operand: Operand) -> Layout:
    """Return the layout of an operand that is added to a product. On Partial axes of the product, one coord adds it."""
    return broadcast_layout(result, operand.shape, result.partial)


def _reduce_into_shards(result: Layout, input: Layout) -> Layout:
    """Return the product's layout with Partial axes reduced into the shards of the input that is added to it."""
    dims, partial = list(result.dims), dict(result.partial)
    for d in range(1, input.ndim + 1):
        axes = input.axes_of(-d)
        if axes and set(axes) <= set(partial) and input.shape[-d] == result.shape[-d] and not result.axes_of(-d):
            dims[-d] = input.dims[-d]
            partial = {a: op for a, op in partial.items() if a not in axes}
    return Layout.make(result.mesh, dims, partial.items())


def _add_product_inplace(func, types, args, kwargs):
    write_out(args[0], getattr(torch, func.__name__[:-1])(*args, **kwargs))
    return args[0]


for _name, _more in ADD_PRODUCTS.items():
    rule(_name, partial=True, merged=True, around=AROUND_SPARSE.get(_name))(_add_product_rule(*_more))
    handler(_name + "_")(_add_product_inplace)


# ---------------------------------------------------------------------- other products


@rule("linear", partial=True, merged=True, around=AROUND_SPARSE["linear"])
def linear(input: Operand, weight: Operand, bias: Operand | None = None, *, fn):
    """Run locally if features are unsharded; else the product is a partial sum, and one coord adds the bias."""
    if _is_local_linear(input, weight, bias):
        result = input.layout.with_dims([*input.layout.dims[:-1], weight.layout.dims[0]])
        return Plan(local=fn, takes=("input", "weight", "bias"), layout=result, saves_views=True)
    probe(fn, input, weight, bias)
    batch = batch_labels(input.ndim - 1)
    out = ("o",) if weight.ndim == 2 else ()
    plan = plan_contraction([make_term(input, (*batch, "c")), make_term(weight, (*out, "c"))], (*batch, *out))
    operands = {"input": plan.targets[0], "weight": plan.targets[1]}
    if bias is not None:
        operands["bias"] = addend_layout(plan.result, bias)
    return Plan(local=fn, takes=("input", "weight", "bias"), operands=operands, layout=plan.result, saves_views=True)


# Other dtypes may raise, on a rank with an empty shard perhaps not.
LINEAR_DTYPES = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def _is_local_linear(input: Operand, weight: Operand, bias: Operand | None) -> bool:
    """Return True if `linear` is valid and sends nothing: most calls, whose plan then needs no search and no probe."""
    params = [weight] if bias is None else [weight, bias]
    return (
        input.ndim > 1
        and weight.ndim == 2
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and not input.layout.partial
        and not input.layout.axes_of(-1)
        and len(input.layout.dims[-1]) == 1
        and not any(p.layout.partial or p.layout.shard_axes or p.layout.has_origins for p in params)
        and input.dtype in LINEAR_DTYPES
        and all(p.dtype is input.dtype and p.device == input.device for p in params)
        and not torch.is_autocast_enabled(input.device.type)
    )


@rule("bilinear", partial=True, merged=True)
def bilinear(input1: Operand, input2: Operand, weight: Operand, bias: Operand | None = None, *, fn):
    """Plan `bilinear` like `linear`, with two inputs."""
    probe(fn, input1, input2, weight, bias)
    batch = batch_labels(input1.ndim - 1)
    terms = [make_term(input1, (*batch, "i")), make_term(input2, (*batch, "j")), make_term(weight, "oij")]
    plan = plan_contraction(terms, (*batch, "o"))
    operands = dict(zip(("input1", "input2", "weight"), plan.targets, strict=True))
    if bias is not None:
        operands["bias"] = addend_layout(plan.result, bias)

    def local(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.numel():
            return fn(input1, input2, weight, bias)
        out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)  # torch's bilinear cannot view empty inputs
        return out if bias is None else out + bias

    return Plan(local=local, operands=operands, layout=plan.result, saves_views=True)


@rule("matmul", torch.linalg.matmul, partial=True, merged=True, around=AROUND_SPARSE["matmul"])
def matmul(input: Operand, other: Operand, *, fn):
    """Plan a matrix product with broadcast batch dims. A vector operand has no row or column dim."""
    probe(fn, input, other)
    left, right = batch_labels(max(input.ndim - 2, 0)), batch_labels(max(other.ndim - 2, 0))
    rows, columns = ("m",) if input.ndim > 1 else (), ("n",) if other.ndim > 1 else ()
    out = (*max(left, right, key=len), *rows, *columns)
    plan = plan_contraction([make_term(input, (*left, *rows, "k")), make_term(other, (*right, "k", *columns))], out)
    targets = dict(zip(("input", "other"), plan.targets, strict=True))
    return Plan(local=fn, takes=("input", "other"), operands=targets, layout=plan.result, saves_views=True)


@rule("inner", partial=True, merged=True)
def inner(input: Operand, other: Operand, *, fn):
    """Sum over the last dims of both operands; a scalar operand multiplies."""
    probe(fn, input, other)
    left, right = [f"m{d}" for d in range(input.ndim)], [f"n{d}" for d in range(other.ndim)]
    if input.ndim and other.ndim:
        left[-1] = right[-1] = "k"
    plan = plan_contraction([make_term(input, left), make_term(other, right)], [x for x in (*left, *right) if x != "k"])
    targets = dict(zip(("input", "other"), plan.targets, strict=True))
    return Plan(local=fn, takes=("input", "other"), operands=targets, layout=plan.result, saves_views=True)


@rule("vecdot", torch.linalg.vecdot, partial=True, merged=True)
def vecdot(x: Operand, y: Operand, *, dim=-1, fn):
    """Multiply with broadcasting and sum over one dim."""
    probe(fn, x, y, dim=dim)
    labels = batch_labels(max(x.ndim, y.ndim))
    summed = labels[dim]
    terms = [make_term(x, batch_labels(x.ndim)), make_term(y, batch_labels(y.ndim))]
    plan = plan_contraction(terms, [label for label in labels if label != summed])
    targets = dict(zip(("x", "y"), plan.targets, strict=True))
    return Plan(local=lambda x, y: fn(x, y, dim=dim), operands=targets, layout=plan.result, saves_views=True)


@rule("chain_matmul", partial=True, merged=True)
def chain_matmul(*matrices: Operand, fn):
    """Plan all factors as one contraction, whatever order torch multiplies them in."""
    return _plan_chain("matrices", matrices, lambda matrices: fn(*matrices))


@rule(torch.linalg.multi_dot, partial=True, merged=True)
def multi_dot(tensors: Sequence[Operand], *, fn):
    """Plan all factors as one contraction; the first and the last may be vectors."""
    return _plan_chain("tensors", tensors, fn)


def _plan_chain(name: str, factors: Sequence[Operand], local: Callable) -> Plan | None:
    if not all(isinstance(f, Operand) for f in factors):
        return None
    probe(local, list(factors))
    labels: list[tuple[int, ...]] = [(i, i + 1) for i in range(len(factors))]
    if factors[0].ndim == 1:
        labels[0] = (1,)
    if factors[-1].ndim == 1:
        labels[-1] = labels[-1][:1]
    out = (() if factors[0].ndim == 1 else (0,)) + (() if factors[-1].ndim == 1 else (len(factors),))
    plan = plan_contraction([make_term(f, row) for f, row in zip(factors, labels, strict=True)], out)
    return Plan(local=local, takes=(name,), operands={name: plan.targets}, layout=plan.result, saves_views=True)


@rule("kron", partial=True, merged=True)
def kron(input: Operand, other: Operand, *, fn):
    """Merge one dim of each operand, with their shardings, into every dim of the result."""
    probe(fn, input, other)
    left, right = {d: f"m{d}" for d in batch_labels(input.ndim)}, {d: f"n{d}" for d in batch_labels(other.ndim)}
    out = [tuple(x[d] for x in (left, right) if d in x) for d in batch_labels(max(input.ndim, other.ndim))]
    plan = plan_contraction([make_term(input, tuple(left.values())), make_term(other, tuple(right.values()))], out)
    targets = dict(zip(("input", "other"), plan.targets, strict=True))

    def local(input, other):
        return fn(input.contiguous(), other.contiguous())  # torch's kron fails for some strided blocks

    return Plan(local=local, operands=targets, layout=plan.result, saves_views=True)


@rule("trace", partial=True, around=under_autocast(torch.trace, 1, 1))
def trace(input: Operand, *, fn):
    """Sum the diagonal of the local block at the block's offset; the result is a partial sum."""
    probe(fn, input)
    layout = input.layout if all(op == "sum" for _, op in input.layout.partial) else without_partial(input.layout)
    rows, columns = layout.span(0), layout.span(1)
    partial = [(a, "sum") for a in (*layout.shard_axes, *layout.partial_axes)]
    return Plan(
        saves_views=True,
        local=lambda input: input.diagonal(rows.start - columns.start).sum(),
        operands={"input": layout},
        layout=Layout.make(layout.mesh, (), partial),
    )


@rule("cross", torch.linalg.cross)
def cross(input: Operand, other: Operand, dim: int | None = None, *, fn):
    """Unshard the dim of size 3; its sharding moves to the largest other dim."""
    if dim is None and fn is torch.linalg.cross:
        dim = -1
    probe(fn, *(stand_in(x, [min(n, 4) for n in x.shape]) for x in (input, other)), dim=dim)
    shape = torch.broadcast_shapes(input.shape, other.shape)
    dim = input.shape.index(3) if dim is None else dim  # torch.cross takes the first dim of three of its first operand
    labels = batch_labels(len(shape))
    three = labels[dim]
    terms = [make_term(input, batch_labels(input.ndim)), make_term(other, batch_labels(other.ndim))]
    plan = plan_contraction(terms, labels, unsharded={three}, linear=False, allow_partial=False)
    return Plan(
        saves_views=True,
        local=lambda input, other: fn(input, other, dim=dim),
        operands=dict(zip(("input", "other"), plan.targets, strict=True)),
        layout=plan.result,
    )
