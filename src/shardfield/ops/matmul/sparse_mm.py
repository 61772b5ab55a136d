"""Products of a sparse matrix and a field: every entry takes the row it names to the row it stands in.

The matrix (a stencil, the edges of a graph, an interpolation) is whole on every rank. Where the dim that it sums over
is whole too, the product is local like any other. Where that dim is cut, rows of the field go to the entries and the
products to the rows of the result, as along the edges of a graph: what is sent are rows along the borders. It is the
same for a matrix that needs its gradient, which is for each entry a sum over the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch.fallback import gather_fallback
from ...dispatch.registry import HANDLERS, handler
from ...dispatch.torch_aliases import aliases
from ...tensor import ShardTensor

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor: a plain one, or one that was made of a ShardTensor, which is whole too."""
    if value.__class__ is ShardTensor:
        value = value.__dict__.get("_local_tensor")  # what waits for its data is not sparse, and may go on waiting
    return isinstance(value, Tensor) and value.layout is not torch.strided


def sparse_matmul(left: Any, right: Any) -> Any:
    """`left @ right`, one of which is sparse. NotImplemented where pieces can be multiplied; None for other kinds."""
    across = not is_sparse(left)
    matrix, field = (right, left) if across else (left, right)
    matrix = matrix._local_tensor if matrix.__class__ is ShardTensor else matrix
    if is_sparse(field) or not isinstance(field, ShardTensor) or matrix.layout not in LAYOUTS or matrix.ndim != 2:
        return None
    dim = field.ndim - 1 if across else 0
    if not field.ndim or (field.ndim > 2 and not across) or matrix.dense_dim():
        return None
    if matrix.shape[1 - across] != field.shape[dim]:
        shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
        raise RuntimeError(f"sparse matrix product: shapes {shapes} cannot be multiplied")
    if matrix.dtype != field.dtype:
        if torch.is_autocast_enabled(field.device.type):
            return None
        raise RuntimeError(f"sparse matrix product: dtypes {left.dtype} and {right.dtype} differ")
    if field.ndim < 3 and not (matrix.requires_grad or field._layout.is_sharded(dim) or field._layout.partial):
        return NotImplemented  # (of more dims, torch multiplies some and refuses others, by how they are stored)
    entries = matrix.to_sparse_coo().coalesce()
    to, of = entries.indices().flip(0) if across else entries.indices()
    taken = field.index_select(dim, of) * entries.values().view([-1] + [1] * (field.ndim - 1 - dim))
    shape = list(field.shape)
    shape[dim] = matrix.shape[int(across)]
    return field.new_zeros(shape).index_add(dim, to, taken)


def sparse_addmm(input: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    cut = isinstance(left, ShardTensor) or isinstance(right, ShardTensor)
    out = sparse_matmul(left, right) if cut else torch.mm(left, right) if right.ndim == 2 else torch.mv(left, right)
    return out if out is None or out is NotImplemented else input * beta + out * alpha


def sparse_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not is_sparse(weight) or weight.ndim != 2:
        return None
    out = sparse_matmul(input, weight.t())
    return out if out is None or out is NotImplemented or bias is None else out + bias


def route_sparse(found: Callable, body: Callable) -> Callable:
    """The handler `found` of a product, which leaves to `body` what has a sparse operand."""

    def run(func, types, args, kwargs):
        for value in args:
            if is_sparse(value):
                break
        else:
            return found(func, types, args, kwargs)
        out = body(*args, **kwargs)
        if out is NotImplemented:
            return found(func, types, args, kwargs)
        return gather_fallback(func, types, args, kwargs) if out is None else out

    return run


BODIES: dict[str, Callable] = dict.fromkeys(("mm", "mv", "spmm", "matmul"), sparse_matmul)
BODIES |= {"addmm": sparse_addmm, "addmv": sparse_addmm, "linear": sparse_linear}

for _name, _body in BODIES.items():
    for _alias in aliases(_name):
        if _alias in HANDLERS:
            HANDLERS[_alias] = route_sparse(HANDLERS[_alias], _body)


@handler(torch.sparse.mm, torch.sparse.addmm)
def torch_sparse_mm(func, types, args, kwargs):
    """The names that products of sparse matrices have of their own; `reduce` makes other things than sums."""
    plain = torch.mm if func is torch.sparse.mm else torch.addmm
    reduced = len(args) > (2 if plain is torch.mm else 3) or "reduce" in kwargs
    return gather_fallback(func, types, args, kwargs) if reduced else plain(*args, **kwargs)
