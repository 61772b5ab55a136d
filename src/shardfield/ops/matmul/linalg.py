"""Linear algebra on batches of matrices: the matrices are whole, the batch is cut, and all work is local.

Cuts of a matrix move to a batch dim (or to the columns of a right-hand side). Where there is none the matrix would
have to be gathered, and there is no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ... import trace_state
from ...comm import collectives
from ...dispatch.plan import process_groups
from ...dispatch.registry import as_operand, composed, gather_fallback, handler, map_tensors, mesh_of, write_out
from ...dispatch.torch_aliases import aliases, function_name
from ...layout import DimSharding, Layout
from ...tensor import wrap
from .._common.broadcast import Alignment, find_grad_reductions
from .contraction_strategy import Label, Term, plan_contraction
from .matmul import batch_labels

LA = torch.linalg

# The dims of every operand that belong to a matrix. The columns "k" of a right-hand side do not see each other, so
# they may be cut, and lie in the result as in the operand.
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

# These find no fault with the numbers, so the ranks need not ask each other.
NEVER_FAILS = set(
    "det logdet slogdet qr matrix_exp geqrf inv_ex cholesky_ex lu_factor_ex ldl_factor_ex solve_ex".split()
)

# Tensors given by name are taken in this order, which is that of the positions they could have been given in.
ARGUMENT_ORDER = "input A LU LD LU_data pivots LU_pivots tau input2 input3 B".split()

TENSOR_SLOT = object()  # stands for a tensor among the arguments that are part of a key


class BatchPlan(NamedTuple):
    """A planned call: where operands go, the result's layouts, and whom to ask whether all went well.

    `placeholder_shapes`: on a rank that gets no matrices, the shapes of what it works on instead of each operand.
    """

    alignment: Alignment
    results: tuple[Layout, ...]
    failure_groups: tuple[ProcessGroup, ...]
    placeholder_shapes: tuple[torch.Size | None, ...] | None


def matrix_dims(name: str, rows: str, shapes: Sequence[torch.Size], left: bool) -> list[str]:
    """The matrix dims of every operand; a right-hand side may be a vector, as torch decides it, or stand left."""
    found = rows.split() if left else rows.replace("nk", "qn").split()
    if name in ("solve", "solve_ex", "lstsq"):
        a, b = shapes
        if len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1]):
            found[1] = found[1][:1]
    # what follows are tolerances: a number, or one number for each matrix
    return found + [""] * (len(shapes) - len(found))


@lru_cache(maxsize=4096)
def plan_batch(
    func: Any,
    layouts: tuple[Layout, ...],
    kinds: tuple[tuple[torch.dtype, torch.device], ...],
    args: tuple,
    kwargs: tuple,
) -> BatchPlan | None:
    """Batch dims are cut, matrix dims are not. None: an axis would be left with nothing to divide."""
    name = function_name(func).removeprefix("linalg_")
    parts = matrix_dims(name, LABELS_BY_FUNCTION[func], [x.shape for x in layouts], dict(kwargs).get("left", True))
    counts = [x.ndim - len(core) for x, core in zip(layouts, parts, strict=True)]
    if min(counts) < 0:
        return None  # torch's own error
    free = any(core.endswith("k") for core in parts)
    over = batch_labels(max(counts))
    terms = [
        Term(x, (*batch_labels(n), *core), dtype.itemsize)
        for x, n, core, (dtype, _) in zip(layouts, counts, parts, kinds, strict=True)
    ]
    whole: set[Label] = {c for core in parts for c in core if c != "k"}
    work = plan_contraction(
        terms, (*over, "k") if free else over, unsharded=whole, linear=False, allow_partial=False, use_all_axes=True
    )
    cut = {a for x in layouts if x.numel for a in x.nontrivial_axes(x.shard_axes)}
    if cut - set(work.result.shard_axes):
        return None
    # no matrices at all, in a batch of two dims: what comes back shows which results have the batch, and which not
    empty = [
        torch.zeros((0, 0, *x.shape[n:]), dtype=dtype, device=device)
        for x, n, (dtype, device) in zip(layouts, counts, kinds, strict=True)
    ]
    results = []
    for out in _as_list(_call_with_tensors(func, args, kwargs, empty)):
        dims: list[tuple[DimSharding, ...]] = [(DimSharding(n),) for n in out.shape]
        if out.shape[:2] == (0, 0):
            dims[:2] = work.result.dims[: len(over)]
            if free and out.ndim == 4:
                dims[-1] = work.label_shardings["k"]
        results.append(Layout.make(work.result.mesh, dims))
    asked = () if name in NEVER_FAILS else process_groups(work.result, sorted(cut))
    stand_ins = None
    here = work.result.local_shape
    if 0 in here:
        nothing = 0 in here[: len(over)]  # else there are matrices, and no columns of a right-hand side
        stand_ins = tuple(
            torch.Size(1 if c == "k" else size for c, size in zip(core, x.shape[n:], strict=True))
            if nothing or "k" in core
            else None
            for x, n, core in zip(layouts, counts, parts, strict=True)
        )
    how = Alignment(work.targets, find_grad_reductions(work.result, work.targets), work.result)
    return BatchPlan(how, tuple(results), asked, stand_ins)


def _call_with_tensors(func: Any, args: tuple, kwargs: tuple, tensors: Sequence[Tensor]) -> Any:
    left = iter(tensors)
    given = [next(left) if a is TENSOR_SLOT else a for a in args]
    return func(*given, **{n: next(left) if v is TENSOR_SLOT else v for n, v in kwargs})


def _as_list(out: Any) -> Sequence[Tensor]:
    return [out] if isinstance(out, Tensor) else out


def run_batched(func, types, args, kwargs):
    """Move the operands as planned, call torch on the pieces of the batch, and agree on failures."""
    if kwargs.get("out") is not None:
        result = run_batched(func, types, args, {n: v for n, v in kwargs.items() if n != "out"})
        for target, part in zip(_as_list(kwargs["out"]), _as_list(result), strict=True):
            write_out(target, part)
        return kwargs["out"]
    kwargs = dict(
        sorted(
            kwargs.items(),
            key=lambda given: ARGUMENT_ORDER.index(given[0]) if given[0] in ARGUMENT_ORDER else len(ARGUMENT_ORDER),
        )
    )
    mesh = mesh_of(args, kwargs)
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    given = tuple(TENSOR_SLOT if isinstance(v, Tensor) else v for v in args)
    named = tuple((n, TENSOR_SLOT if isinstance(v, Tensor) else v) for n, v in kwargs.items())
    admitted = [as_operand(t, mesh) for t in tensors]
    locals_, layouts = [t for t, _ in admitted], tuple(x for _, x in admitted)
    found = plan_batch(func, layouts, tuple((t.dtype, t.device) for t in tensors), given, named)
    if found is None:
        return gather_fallback(func, types, args, kwargs)
    moved = found.alignment.redistribute(locals_, layouts)
    if found.placeholder_shapes is not None:
        moved = [make_placeholder(t, shape) for t, shape in zip(moved, found.placeholder_shapes, strict=True)]
    out = run_or_fail_on_all(
        function_name(func),
        lambda: _call_with_tensors(func, given, named, moved),
        found.failure_groups,
        moved[0].device,
    )
    left = iter(found.results)
    if found.placeholder_shapes is None:
        return map_tensors(out, lambda t: wrap(t, next(left)))
    return map_tensors(out, lambda t: wrap(empty_shard_of(t, layout := next(left)), layout))


def make_placeholder(operand: Tensor, shape: torch.Size | None) -> Tensor:
    """A harmless matrix (or vector, or number) of `shape` in the graph of `operand`, for a rank that has none.

    torch's functions make results for no matrices, but some leave the graph, and the derivatives of some raise: such a
    rank would miss the moves of backward that the others wait in. With a matrix of its own it does what they do.
    """
    if shape is None:
        return operand
    integers = not (operand.is_floating_point() or operand.is_complex())
    count = min(shape, default=1)
    # pivots are integers from 1 on; other numbers are positive and distinct, so that every factorization exists
    numbers = torch.arange(1, count + 1) if integers else torch.linspace(1, 2, count, dtype=torch.float64)
    numbers = numbers.to(operand.device, operand.dtype)
    made = operand.new_zeros(shape)
    (made.diagonal() if made.ndim == 2 else made.view(-1)).copy_(numbers)
    made = made.view([1] * (operand.ndim - made.ndim) + list(shape))
    return made + operand.flatten()[:0].sum() if operand.requires_grad else made


def empty_shard_of(out: Tensor, layout: Layout) -> Tensor:
    """What a rank returns in place of the result of stand-ins."""
    return out.flatten()[:0].reshape(layout.local_shape) if 0 in layout.local_shape else out


def run_or_fail_on_all(name: str, work: Callable[[], Any], asked: Sequence[ProcessGroup], device: torch.device) -> Any:
    """Do the work; if it fails on some rank (a singular matrix), it fails on all: else the others would wait for it."""
    if not asked:
        return work()
    if trace_state.tracer is not None:
        raise NotImplementedError(f"{name} may fail for a matrix on one rank, and could not tell the others")
    failure, out = None, None
    try:
        out = work()
    except RuntimeError as error:
        failure = error
    told = torch.tensor(int(failure is not None), dtype=torch.int32, device=device)
    for group in asked:
        told = collectives.all_reduce(told, group, "max")
    if failure is not None:
        raise failure
    if told.item():
        raise LA.LinAlgError(f"{name}: failed for a matrix on another rank")
    return out


LABELS_BY_FUNCTION = {alias: rows for function, rows in MATRIX_LABELS.items() for alias in aliases(function)}
for _function in MATRIX_LABELS:
    handler(_function)(run_batched)


@handler("matrix_power", LA.matrix_power)
def matrix_power(func, types, args, kwargs):
    """One matrix in pieces is multiplied by itself as it lies, squares first; a batch, and an inverse, is local."""
    if len(args) != 2 or kwargs or args[0].ndim != 2 or args[0].shape[0] != args[0].shape[1] or args[1] < 1:
        return run_batched(func, types, args, kwargs)
    square, left = args
    power: Any = None
    while left:
        if left % 2:
            power = square if power is None else power @ square
        left //= 2
        if left:
            square = square @ square
    return power.clone()


@composed(LA.vander)
def vander(x, *, N=None):
    """Powers, along a new last dim."""
    LA.vander(torch.zeros(2), N=N)  # torch's own complaint about N
    return x.unsqueeze(-1) ** torch.arange(x.shape[-1] if N is None else N, device=x.device)


@composed("vander")
def vander_decreasing(x, N=None, increasing=False):
    """Powers of a vector's numbers, the highest first."""
    torch.vander(torch.zeros([2] * x.ndim), N, increasing)
    powers = torch.arange(x.shape[0] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (powers if increasing else powers.flip(0))
