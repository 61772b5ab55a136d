"""Products of a sparse matrix and a sharded dense tensor.

The sparse matrix (a stencil, an interpolation) is replicated. If the contracted dim of the dense operand is unsharded,
the product is local. Else rows of the dense operand are gathered to the entries of the matrix and the products are
added to the rows of the result, as along the edges of a graph: only rows near shard boundaries are sent. A matrix that
requires grad takes the same path; the gradient of an entry is a sum over the ranks. So does a matrix whose entries are
sharded (`sparse_entries.py`), of which each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...dispatch.executor import Handler
from ...dispatch.fallback import gather_fallback
from ...dispatch.registry import handler
from ...tensor import ShardTensor
from .sparse_entries import COO, CSC, CSR, SparseMatrix, as_matrix, is_sparse, product, sparse_matrix, wrapped

LAYOUTS = (COO, CSR, CSC)


def sparse_matmul(left: Any, right: Any) -> Any:
    """Return `left @ right`, one of which is sparse.

    NotImplemented: the product is local and the rule of the dense product runs. None: fall back to a gather.
    """
    sparse_right = not is_sparse(left)
    matrix, dense = (right, left) if sparse_right else (left, right)
    sharded = [found for found in map(sparse_matrix, (left, right)) if found is not None and found.sharding]
    if is_sparse(dense):
        # torch has no second derivative of its sparse product, also of matrices that all ranks have
        by_entries = sharded or (
            sparse_matrix(left) and sparse_matrix(right) and (left.requires_grad or right.requires_grad)
        )
        return multiply(left, right, sharded[0].sharding if sharded else None) if by_entries else None
    if not sharded:
        matrix = matrix._local_tensor if matrix.__class__ is ShardTensor else matrix
    if not (sharded or isinstance(dense, ShardTensor)) or matrix.layout not in LAYOUTS or matrix.ndim != 2:
        return None
    dim = dense.ndim - 1 if sparse_right else 0
    if not dense.ndim or (dense.ndim > 2 and not sparse_right) or matrix.dense_dim():
        return None
    if matrix.shape[1 - sparse_right] != dense.shape[dim]:
        shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
        raise RuntimeError(f"sparse matrix product: shapes {shapes} cannot be multiplied")
    if matrix.dtype != dense.dtype:
        if torch.is_autocast_enabled(dense.device.type):
            return None
        raise RuntimeError(f"sparse matrix product: dtypes {left.dtype} and {right.dtype} differ")
    if sharded:
        rows, columns, values = sharded[0].entries()
    else:
        if dense.ndim < 3 and not (matrix.requires_grad or dense._layout.is_sharded(dim) or dense._layout.partial):
            return NotImplemented  # (with more dims, torch multiplies or refuses depending on strides)
        entries = matrix.to_sparse_coo().coalesce()
        (rows, columns), values = entries.indices(), entries.values()
    if sparse_right:
        rows, columns = columns, rows
    products = dense.index_select(dim, columns) * values.view([-1] + [1] * (dense.ndim - 1 - dim))
    shape = list(dense.shape)
    shape[dim] = matrix.shape[int(sparse_right)]
    return dense.new_zeros(shape).index_add(dim, rows, products)


def multiply(left: Any, right: Any, like: Any) -> ShardTensor | None:
    """Return the product of two sparse matrices in COO or CSR form; None for others."""
    a, b = as_matrix(left, like), as_matrix(right, like)
    if a is None or b is None or left.layout is not right.layout or left.layout is CSC:
        return None
    if a.layout.shape[1] != b.layout.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({'x'.join(map(str, left.shape))} and "
            f"{'x'.join(map(str, right.shape))})"
        )
    if left.dtype != right.dtype:
        raise RuntimeError(f"sparse matrix product: dtypes {left.dtype} and {right.dtype} differ")
    found = product(a, b)
    return wrapped(found if left.layout is COO else found.compressed())


def sparse_addmm(input: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Return `beta * input + alpha * (left @ right)`; NotImplemented and None as `sparse_matmul`."""
    sharded = isinstance(left, ShardTensor) or isinstance(right, ShardTensor)
    out = sparse_matmul(left, right) if sharded else torch.mm(left, right) if right.ndim == 2 else torch.mv(left, right)
    return out if out is None or out is NotImplemented else input * beta + out * alpha


def sparse_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Return `input @ weight.t() + bias` with a sparse weight; NotImplemented and None as `sparse_matmul`."""
    if not is_sparse(weight) or weight.ndim != 2:
        return None
    out = sparse_matmul(input, weight.t())
    return out if out is None or out is NotImplemented or bias is None else out + bias


def route_sparse(body: Callable, dense_handler: Handler) -> Handler:
    """Return a handler that runs `body` for calls with a sparse operand and `dense_handler` for all others."""

    def run(func, types, args, kwargs):
        for value in args:  # `is_sparse` written out: it is called for each operand of every product
            if value.__class__ is ShardTensor:
                if value._deferred.__class__ is SparseMatrix:
                    break
                value = value.__dict__.get("_local_tensor")
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                break
        else:
            return dense_handler(func, types, args, kwargs)
        out = body(*args, **kwargs)
        if out is NotImplemented:
            return dense_handler(func, types, args, kwargs)
        return gather_fallback(func, types, args, kwargs) if out is None else out

    return run


# name of a product -> the `around=` of its rule
AROUND_SPARSE: Mapping[str, Callable[[Handler], Handler]] = MappingProxyType(
    {name: partial(route_sparse, sparse_matmul) for name in ("mm", "mv", "matmul")}
    | {name: partial(route_sparse, sparse_addmm) for name in ("addmm", "addmv")}
    | {"linear": partial(route_sparse, sparse_linear)}
)


@handler(torch.sparse.mm, torch.sparse.addmm)
def torch_sparse_mm(func, types, args, kwargs):
    """Run torch.sparse's names of the products; with `reduce`, which is not a sum, fall back to a gather."""
    plain = torch.mm if func is torch.sparse.mm else torch.addmm
    reduced = len(args) > (2 if plain is torch.mm else 3) or "reduce" in kwargs
    return gather_fallback(func, types, args, kwargs) if reduced else plain(*args, **kwargs)
