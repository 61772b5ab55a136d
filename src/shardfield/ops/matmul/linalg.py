"""Linear algebra on batches of matrices: matrix dims are unsharded, batch dims are sharded, and all work is local.

If a matrix dim is sharded, the sharding moves to a batch dim or to the columns of a right-hand side. If there is none,
the matrix would have to be gathered, which is left to the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import runtime
from ...comm import collectives
from ...dispatch.plan import process_groups
from ...dispatch.registry import as_operand, composed, gather_fallback, handler, map_tensors, mesh_of, write_out
from ...dispatch.torch_aliases import aliases, function_name
from ...layout import DimSharding, Layout
from ...tensor import wrap
from .._common.broadcast import Alignment, find_grad_reductions
from .._common.probe import probe, stand_in
from .contraction_strategy import Label, Term, plan_contraction
from .matmul import batch_labels

LA = torch.linalg

# The labels of each operand's matrix dims. The columns "k" of a right-hand side are independent of each other, so they
# may be sharded; the result has their sharding.
MATRIX_LABELS: dict[Any, str] = dict.fromkeys(
    [
        *"det logdet slogdet inverse pinverse cholesky cholesky_inverse qr svd lu geqrf".split(),
        *"matrix_exp matrix_power".split(),
        *(LA.det, LA.slogdet, LA.inv, LA.inv_ex, LA.pinv, LA.cholesky, LA.cholesky_ex, LA.qr, LA.svd, LA.svdvals),
        *(LA.eig, LA.eigvals, LA.eigh, LA.eigvalsh, LA.lu, LA.lu_factor, LA.lu_factor_ex, LA.ldl_factor),
        *(LA.ldl_factor_ex, LA.matrix_exp, LA.matrix_power, LA.matrix_rank, LA.cond),
    ],
    "mn",
) | {
    LA.solve: "nn nk",
    LA.solve_ex: "nn nk",
    LA.solve_triangular: "nn nk",
    LA.lu_solve: "nn n nk",
    LA.ldl_solve: "nn n nk",
    LA.lstsq: "mn mq",
    LA.householder_product: "mn q",
    "cholesky_solve": "nk nn",
    "triangular_solve": "nq nn",
    "lu_solve": "nk nn n",
    "orgqr": "mn q",
    "ormqr": "xy q mn",
    "lu_unpack": "mn q",
}

# These functions never fail because of values, so ranks need no consensus about failures.
NEVER_FAILS = set(
    "det logdet slogdet qr matrix_exp geqrf inv_ex cholesky_ex lu_factor_ex ldl_factor_ex solve_ex".split()
)

# Tensors passed by name are taken in the order of their positions in the signature.
ARGUMENT_ORDER = "input A LU LD LU_data pivots LU_pivots tau input2 input3 B".split()

TENSOR_SLOT = object()  # placeholder for a tensor in a cache key


class BatchPlan(NamedTuple):
    """The alignment of a call's operands, the layouts of its results, and the groups that agree on failures.

    placeholder_shapes: on a rank without matrices, the shape of the placeholder for each operand (None: none needed).
    """

    alignment: Alignment
    results: tuple[Layout, ...]
    failure_groups: tuple[ProcessGroup, ...]
    placeholder_shapes: tuple[torch.Size | None, ...] | None


def matrix_dims(name: str, rows: str, shapes: Sequence[torch.Size], left: bool) -> list[str]:
    """Return the labels of every operand's matrix dims. A right-hand side may be a vector; left=False: XA = B."""
    labels = rows.split() if left else rows.replace("nk", "qn").split()
    if name in ("solve", "solve_ex", "lstsq"):
        a, b = shapes
        if len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1]):
            labels[1] = labels[1][:1]
    # the remaining operands are tolerances: a number, or one number per matrix
    return labels + [""] * (len(shapes) - len(labels))


@runtime.memo
def plan_batch(
    func: Any,
    layouts: tuple[Layout, ...],
    kinds: tuple[tuple[torch.dtype, torch.device], ...],
    args: tuple,
    kwargs: tuple,
) -> BatchPlan | None:
    """Plan a call with sharded batch dims and unsharded matrix dims; None if a sharding axis has no batch dim."""
    name = function_name(func).removeprefix("linalg_")
    parts = matrix_dims(name, LABELS_BY_FUNCTION[func], [x.shape for x in layouts], dict(kwargs).get("left", True))
    counts = [x.ndim - len(core) for x, core in zip(layouts, parts, strict=True)]
    if min(counts) < 0:
        return None  # torch raises its own error
    has_columns = any(core.endswith("k") for core in parts)
    out_labels = batch_labels(max(counts))
    terms = [
        Term(x, (*batch_labels(n), *core), dtype.itemsize)
        for x, n, core, (dtype, _) in zip(layouts, counts, parts, kinds, strict=True)
    ]
    unsharded: set[Label] = {c for core in parts for c in core if c != "k"}
    plan = plan_contraction(
        terms,
        (*out_labels, "k") if has_columns else out_labels,
        unsharded=unsharded,
        linear=False,
        allow_partial=False,
        use_all_axes=True,
    )
    axes = {a for x in layouts if x.numel for a in x.nontrivial_axes(x.shard_axes)}
    if axes - set(plan.result.shard_axes):
        return None
    # run torch on an empty batch of two dims: the shapes of its results show which results have the batch dims
    empty = [
        torch.zeros((0, 0, *x.shape[n:]), dtype=dtype, device=device)
        for x, n, (dtype, device) in zip(layouts, counts, kinds, strict=True)
    ]
    results = []
    for out in _as_list(_call_with_tensors(func, args, kwargs, empty)):
        dims: list[tuple[DimSharding, ...]] = [(DimSharding(n),) for n in out.shape]
        if out.shape[:2] == (0, 0):
            dims[:2] = plan.result.dims[: len(out_labels)]
            if has_columns and out.ndim == 4:
                dims[-1] = plan.label_shardings["k"]
        results.append(Layout.make(plan.result.mesh, dims))
    failure_groups = () if name in NEVER_FAILS else process_groups(plan.result, sorted(axes))
    placeholder_shapes = None
    local_shape = plan.result.local_shape
    if 0 in local_shape:
        # False if there are matrices, but no columns of a right-hand side
        no_matrices = 0 in local_shape[: len(out_labels)]
        placeholder_shapes = tuple(
            torch.Size(1 if c == "k" else size for c, size in zip(core, x.shape[n:], strict=True))
            if no_matrices or "k" in core
            else None
            for x, n, core in zip(layouts, counts, parts, strict=True)
        )
    alignment = Alignment(plan.targets, find_grad_reductions(plan.result, plan.targets), plan.result)
    return BatchPlan(alignment, tuple(results), failure_groups, placeholder_shapes)


def _call_with_tensors(func: Any, args: tuple, kwargs: tuple, tensors: Sequence[Tensor]) -> Any:
    remaining = iter(tensors)
    filled = [next(remaining) if a is TENSOR_SLOT else a for a in args]
    return func(*filled, **{n: next(remaining) if v is TENSOR_SLOT else v for n, v in kwargs})


def _as_list(out: Any) -> Sequence[Tensor]:
    return [out] if isinstance(out, Tensor) else out


def run_batched(func, types, args, kwargs):
    """Redistribute the operands as planned, call torch on the local batch, and reach consensus on failures."""
    if kwargs.get("out") is not None:
        result = run_batched(func, types, args, {n: v for n, v in kwargs.items() if n != "out"})
        for target, value in zip(_as_list(kwargs["out"]), _as_list(result), strict=True):
            write_out(target, value)
        return kwargs["out"]
    kwargs = dict(
        sorted(
            kwargs.items(),
            key=lambda item: ARGUMENT_ORDER.index(item[0]) if item[0] in ARGUMENT_ORDER else len(ARGUMENT_ORDER),
        )
    )
    mesh = mesh_of(args, kwargs)
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    slots = tuple(TENSOR_SLOT if isinstance(v, Tensor) else v for v in args)
    named_slots = tuple((n, TENSOR_SLOT if isinstance(v, Tensor) else v) for n, v in kwargs.items())
    operands = [as_operand(t, mesh) for t in tensors]
    locals_, layouts = [t for t, _ in operands], tuple(x for _, x in operands)
    plan = plan_batch(func, layouts, tuple((t.dtype, t.device) for t in tensors), slots, named_slots)
    if plan is None:
        return gather_fallback(func, types, args, kwargs)
    tensors_in = plan.alignment.redistribute(locals_, layouts)
    if plan.placeholder_shapes is not None:
        tensors_in = [make_placeholder(t, shape) for t, shape in zip(tensors_in, plan.placeholder_shapes, strict=True)]
    out = run_or_fail_on_all(
        function_name(func),
        lambda: _call_with_tensors(func, slots, named_slots, tensors_in),
        plan.failure_groups,
        tensors_in[0].device,
    )
    layouts_out = iter(plan.results)
    if plan.placeholder_shapes is None:
        return map_tensors(out, lambda t: wrap(t, next(layouts_out)))
    return map_tensors(out, lambda t: wrap(empty_shard_of(t, layout := next(layouts_out)), layout))


def make_placeholder(operand: Tensor, shape: torch.Size | None) -> Tensor:
    """Return a regular matrix (or vector, or number) of `shape` in the graph of `operand`, for a rank without matrices.

    torch accepts empty batches, but some functions then leave the graph, and some derivatives raise. Such a rank would
    miss the collectives of the backward pass, and the other ranks would hang. With a placeholder, every rank runs the
    same graph.
    """
    if shape is None:
        return operand
    integers = not (operand.is_floating_point() or operand.is_complex())
    count = min(shape, default=1)
    # pivots are integers >= 1; other numbers are positive and distinct, so that every factorization exists
    diagonal = torch.arange(1, count + 1) if integers else torch.linspace(1, 2, count, dtype=torch.float64)
    diagonal = diagonal.to(operand.device, operand.dtype)
    out = operand.new_zeros(shape)
    (out.diagonal() if out.ndim == 2 else out.view(-1)).copy_(diagonal)
    out = out.view([1] * (operand.ndim - out.ndim) + list(shape))
    return out + operand.flatten()[:0].sum() if operand.requires_grad else out


def empty_shard_of(out: Tensor, layout: Layout) -> Tensor:
    """Return the empty shard of the result on a rank that computed with placeholders."""
    return out.flatten()[:0].reshape(layout.local_shape) if 0 in layout.local_shape else out


def run_or_fail_on_all(name: str, work: Callable[[], Any], groups: Sequence[ProcessGroup], device: torch.device) -> Any:
    """Run `work`. If it fails on one rank (a singular matrix), raise on all, since the others would hang."""
    if not groups:
        return work()
    if runtime.active.tracer is not None:
        raise NotImplementedError(
            f"{name}: a compiled graph cannot notify other ranks that it failed for a matrix on this rank"
        )
    failure, out = None, None
    try:
        out = work()
    except RuntimeError as error:
        failure = error
    failed = torch.tensor(int(failure is not None), dtype=torch.int32, device=device)
    for group in groups:
        failed = collectives.all_reduce(failed, group, "max")
    if failure is not None:
        raise failure
    if failed.item():
        raise LA.LinAlgError(f"{name}: failed for a matrix on another rank")
    return out


LABELS_BY_FUNCTION = {alias: rows for function, rows in MATRIX_LABELS.items() for alias in aliases(function)}
for _function in MATRIX_LABELS:
    handler(_function)(run_batched)


@handler("matrix_power", LA.matrix_power)
def matrix_power(func, types, args, kwargs):
    """Multiply a single sharded matrix by repeated squaring; powers of batches and inverses are local."""
    if len(args) != 2 or kwargs or args[0].ndim != 2 or args[0].shape[0] != args[0].shape[1] or args[1] < 1:
        return run_batched(func, types, args, kwargs)
    base, exponent = args
    power: Any = None
    while exponent:
        if exponent % 2:
            power = base if power is None else power @ base
        exponent //= 2
        if exponent:
            base = base @ base
    return power.clone()


@composed(LA.vander)
def vander(x, *, N=None):
    """Return powers along a new last dim."""
    probe(LA.vander, stand_in(x, [2] * x.ndim), N=N)
    return x.unsqueeze(-1) ** torch.arange(x.shape[-1] if N is None else N, device=x.device)


@composed("vander")
def vander_decreasing(x, N=None, increasing=False):
    """Return powers of a vector, the highest first."""
    probe(torch.vander, stand_in(x, [2] * x.ndim), N, increasing)
    powers = torch.arange(x.shape[0] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (powers if increasing else powers.flip(0))
