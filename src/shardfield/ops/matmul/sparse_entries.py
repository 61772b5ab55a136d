"""Sparse matrices whose entries are sharded: the adjacency matrices that graph models build from sharded edges.

`torch.sparse_coo_tensor` and `torch.sparse_csr_tensor` of ShardTensors return a deferred value that holds their
indices and values as they are. What reads entries (products, `coalesce`, a transpose, conversions) works on those; any
other call gathers them into one matrix, as a call without a rule.

Entries of a product of two such matrices stay with the entries of the left one. The entries of the right one that they
meet are selected by index, which exchanges them between ranks; `unique` then finds those of the result, in order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import runtime
from ..._compat import build_sparse_coo
from ...dispatch.executor import Handler
from ...dispatch.fallback import gather_fallback
from ...dispatch.registry import handler, mesh_of
from ...dispatch.torch_aliases import function_name
from ...errors import ShardingError
from ...layout import DimSharding, Layout, nested_chunk
from ...tensor import Deferred, ShardTensor, wrap, wrap_deferred

COO, CSR, CSC = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc


class Entries(NamedTuple):
    """The entries of a matrix: three tensors of one length, each sharded or plain."""

    rows: Any
    columns: Any
    values: Any


class SparseMatrix(Deferred):
    """A sparse matrix as the arguments that torch builds it from.

    `first` and `second` are rows and columns (COO), or offsets and the other indices (CSR, CSC).
    """

    def __init__(self, form: torch.layout, shape: Any, first: Any, second: Any, values: Any, ordered: bool, mesh: Any):
        self.form, self.first, self.second, self.values, self.ordered = form, first, second, values, ordered
        self.layout = Layout.replicate(mesh, shape)
        self.grad_enabled = torch.is_grad_enabled()

    @property
    def is_coalesced(self) -> bool:
        return self.form is COO and self.ordered

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and self.values.requires_grad

    def metadata_local(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty matrix of this form."""
        empty = torch.zeros((1, 1), dtype=dtype, device=device).to_sparse(layout=self.form)
        return empty._coalesced_(self.ordered) if self.form is COO else empty

    def materialize(self) -> ShardTensor:
        """Gather the entries and build the matrix. Communicates unless they are Replicate."""
        self.settle()
        made = torch.sparse_coo_tensor if self.form is COO else torch.sparse_compressed_tensor
        indices = (torch.stack([self.first, self.second]),) if self.form is COO else (full(self.first), self.second)
        options: dict[str, Any] = {"is_coalesced": self.ordered} if self.form is COO else {"layout": self.form}
        with torch.set_grad_enabled(self.grad_enabled), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            return gather_fallback(made, (), (*indices, self.values, self.layout.shape), options)

    def settle(self) -> SparseMatrix:
        """Reduce Partial arguments. Not done where the matrix is built: C++ calls that without a graph."""
        with torch.set_grad_enabled(self.grad_enabled):
            for name in ("first", "second", "values"):
                value = getattr(self, name)
                if isinstance(value, ShardTensor):
                    setattr(self, name, value._reduced_value())
        return self

    @property
    def sharding(self) -> Layout | None:
        """The layout of the entries; None if all ranks have all of them."""
        parts = (self.values, self.second) if self.form is not COO else (self.values, self.first, self.second)
        found = (t._layout for t in parts if isinstance(t, ShardTensor) and t._layout.shard_axes)
        return next(found, None)

    def entries(self) -> Entries:
        """Return rows, columns and values, each with the layout of the entries."""
        first = self.first if self.form is COO else expanded(self.first, self.second)
        found = (self.second, first) if self.form is CSC else (first, self.second)
        return Entries(*(shard_entries(t, self.sharding) for t in (*found, self.values)))

    def coalesced(self) -> SparseMatrix:
        """Return the matrix in COO form, its entries in order by row and column, each once. Communicates."""
        rows, columns, values = self.entries()
        if self.ordered and self.form is not CSC:
            return self.of(COO, rows, columns, values)
        width = self.layout.shape[1]
        keys, places = torch.unique(rows * width + columns, return_inverse=True)
        sums = torch.zeros_like(keys, dtype=values.dtype).index_add(0, places, values)
        return self.of(COO, keys // max(width, 1), keys % max(width, 1), sums).settle()

    def compressed(self) -> SparseMatrix:
        """Return the matrix in CSR form. Communicates."""
        if self.form is CSR:
            return self
        found = self.coalesced()
        return self.of(CSR, row_offsets(found.first, self.layout.shape[0]), found.second, found.values)

    def of(self, form: torch.layout, first: Any, second: Any, values: Any, ordered: bool = True, shape: Any = None):
        """Return a matrix with these indices and values, by default of this one's shape."""
        return SparseMatrix(form, shape or self.layout.shape, first, second, values, ordered, self.layout.mesh)

    def transposed(self) -> SparseMatrix:
        form = {COO: COO, CSR: CSC, CSC: CSR}[self.form]
        first, second = (self.second, self.first) if form is COO else (self.first, self.second)
        ordered = self.ordered and form is not COO
        return self.of(form, first, second, self.values, ordered, self.layout.shape[::-1])


def expanded(offsets: Any, like: Any) -> Any:
    """Return for every entry between offsets the number of its row, sharded like `like`."""
    place = torch.ones_like(like, dtype=torch.int64).cumsum(0) - 1
    return torch.searchsorted(full(offsets).to(torch.int64), place, right=True) - 1


def row_offsets(rows: Any, height: int) -> Any:
    """Return how many entries lie before each row, and their number."""
    return torch.bincount(rows + 1, minlength=height + 1).cumsum(0)


def full(value: Any) -> Any:
    """Return offsets on every rank: they have one element per row, and not per entry."""
    if not isinstance(value, ShardTensor) or value._layout.is_replicated:
        return value
    return value._redistribute_to(Layout.replicate(value._layout.mesh, value.shape))


def wrapped(matrix: SparseMatrix) -> ShardTensor:
    """Return the tensor of a sparse matrix."""
    return wrap_deferred(matrix, matrix.values.dtype, matrix.values.device)


def sparse_matrix(value: Any) -> SparseMatrix | None:
    """Return the sparse matrix of a tensor with sharded entries, None for any other value."""
    deferred = value._deferred if value.__class__ is ShardTensor else None
    return deferred.settle() if isinstance(deferred, SparseMatrix) else None


def is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse tensor, plain or as the local tensor of a replicated ShardTensor."""
    if value.__class__ is ShardTensor:
        if value._deferred is not None:
            return sparse_matrix(value) is not None
        value = value._local_tensor
    return isinstance(value, Tensor) and value.layout is not torch.strided


def as_matrix(value: Any, like: Layout | None) -> SparseMatrix | None:
    """Return a sparse tensor as a matrix with entries sharded over the axes of other entries; None if it is none."""
    found = sparse_matrix(value)
    if found is not None:
        if found.sharding or like is None:
            return found
        (rows, columns, values), shape = found.entries(), found.layout.shape
    else:
        local = value._local_tensor if value.__class__ is ShardTensor else value
        if local.layout not in (COO, CSR, CSC) or local.ndim != 2 or local.dense_dim():
            return None
        coo = local.to_sparse_coo().coalesce()
        (rows, columns), values, shape = coo.indices(), coo.values(), local.shape
        if like is None:
            return None
    axes = like.shard_axes
    sizes = DimSharding(len(values), axes, nested_chunk(len(values), [like.mesh.size(a) for a in axes]))
    layout = Layout.make(like.mesh, [(sizes,)])
    rows, columns, values = (shard_entries(t, layout) for t in (rows, columns, values))
    return SparseMatrix(COO, shape, rows, columns, values, found is None, like.mesh)


def shard_entries(values: Any, layout: Layout | None) -> Any:
    """Return one number for each entry in the layout of the entries. Sends nothing if all ranks have all of them."""
    if layout is None:
        return values
    if not isinstance(values, ShardTensor):
        values = wrap(values, Layout.replicate(layout.mesh, values.shape))
    return values._redistribute_to(layout)


def product(left: SparseMatrix, right: SparseMatrix) -> SparseMatrix:
    """Return the product of two matrices in COO form. Communicates.

    Its entries are in order, also where MKL leaves the columns of a row out of order. Each entry of `left` meets all
    entries of `right` in the row that is its column.
    """
    rows, columns, values = left.entries()
    other = right.compressed()
    offsets = full(other.first)
    starts, counts = offsets[:-1][columns], offsets.diff()[columns]
    which = (torch.ones_like(counts).cumsum(0) - 1).repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    place = starts[which] + (torch.ones_like(which).cumsum(0) - 1 - before[which])
    shape = (left.layout.shape[0], right.layout.shape[1])
    made = values[which] * other.values[place]
    return left.of(COO, rows[which], other.second[place], made, False, shape).coalesced()


# ---------------------------------------------------------------------- what torch calls


def build_coo(sparse_dim, dense_dim, size, indices, values, *, is_coalesced=None, **options):
    """Defer `torch.sparse_coo_tensor` of a matrix."""
    if sparse_dim != 2 or dense_dim or options.get("dtype", values.dtype) != values.dtype:
        return None
    return SparseMatrix(COO, size, indices[0], indices[1], values, bool(is_coalesced), mesh_of((indices, values), {}))


def build_coo_in_inference_mode(indices, values, size, **options):
    """Defer `torch.sparse_coo_tensor` of a matrix in inference mode, where C++ does not split the call into others."""
    return build_coo(indices.shape[0], values.ndim - 1, size, indices, values, **options)


def build_compressed(offsets, indices, values, size, *, layout=None, **options):
    """Defer `torch.sparse_csr_tensor` and `torch.sparse_csc_tensor` of a matrix."""
    if (
        len(size) != 2
        or values.ndim != 1
        or layout not in (CSR, CSC)
        or options.get("dtype", values.dtype) != values.dtype
    ):
        return None
    return SparseMatrix(layout, size, offsets, indices, values, True, mesh_of((offsets, indices, values), {}))


def register_factory(op: Any, build: Callable[..., SparseMatrix | None]) -> None:
    """Have `build` answer an operator that C++ calls: torch asks no Python function where it builds sparse tensors."""

    def run(*args, **kwargs):
        plain = [t for t in args if isinstance(t, Tensor) and not isinstance(t, ShardTensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in plain):
            raise ShardingError(
                f"{function_name(op)}: the values are a plain tensor that requires grad, the indices are sharded: "
                "shard the values with scatter_tensor"
            )
        made = build(*args, **kwargs)
        return gather_fallback(op, (), args, kwargs) if made is None else wrapped(made)

    runtime.active.registry.dispatch_handlers[op] = run


register_factory(build_sparse_coo, build_coo)
register_factory(torch.ops.aten.sparse_coo_tensor.indices_size, build_coo_in_inference_mode)
register_factory(torch.ops.aten.sparse_compressed_tensor.comp_plain_value_size, build_compressed)


@handler("_convert_indices_from_coo_to_csr")
def convert_indices(func, types, args, kwargs):
    """Return the offsets of sorted rows."""
    names = ("input", "size")
    given = dict(zip(names, args, strict=False)) | kwargs
    found = row_offsets(given["input"].to(torch.int64), given["size"])
    return found.to(torch.int32) if given.get("out_int32") else found


def converted(matrix: SparseMatrix, form: Any = None, *, layout: Any = None) -> SparseMatrix | None:
    """Return the matrix in another form; None if it is not COO or CSR."""
    form = layout or form or COO
    return matrix.coalesced() if form is COO else matrix.compressed() if form is CSR else None


def transpose(run: Handler, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `t()`, `T` and `transpose(0, 1)` of a matrix with sharded entries."""
    dims = [*args[1:], *kwargs.values()]
    swaps = function_name(func) in ("t", "T", "mT", "transpose") and (not dims or {d % 2 for d in dims} == {0, 1})
    matrix = sparse_matrix(args[0]) if swaps else None
    return run(func, types, args, kwargs) if matrix is None else wrapped(matrix.transposed())


def select_entries(run: Handler) -> Handler:
    """Return the handler of `index_select`: that of dense tensors, and one for matrices."""

    def call(func, types, args, kwargs):
        if not is_sparse(args[0] if args else kwargs.get("input")):
            return run(func, types, args, kwargs)
        found = select(*args, **kwargs)
        return gather_fallback(func, types, args, kwargs) if found is None else found

    return call


def select(input: Any, dim: int, index: Any) -> ShardTensor | None:
    """Return rows or columns of a matrix: its product with one that has a one per index. None if nothing is sharded."""
    matrix, layout = sparse_matrix(input), getattr(index, "_layout", None)
    if (matrix is None or matrix.sharding is None) and layout is not None and layout.shard_axes:
        matrix = as_matrix(input, layout)
    if matrix is None or matrix.sharding is None or index.ndim != 1:
        return None
    dim = range(2)[dim]
    size, count = matrix.layout.shape[dim], len(index)
    if ((index < 0) | (index >= size)).any():
        raise IndexError("index_select(): index out of range")
    place, one = torch.ones_like(index).cumsum(0) - 1, torch.ones_like(index, dtype=matrix.values.dtype)
    chosen = matrix.of(COO, index, place, one, False, (size, count))
    found = product(matrix, chosen) if dim else product(matrix.transposed(), chosen).transposed()
    return wrapped(found.coalesced())


READS: Mapping[str, Callable] = MappingProxyType(
    {
        "indices": lambda matrix: torch.stack([matrix.first, matrix.second]) if matrix.is_coalesced else None,
        "_indices": lambda matrix: torch.stack([matrix.first, matrix.second]) if matrix.form is COO else None,
        "values": lambda matrix: matrix.values if matrix.is_coalesced or matrix.form is not COO else None,
        "_values": lambda matrix: matrix.values if matrix.form is COO else None,
        "crow_indices": lambda matrix: matrix.first if matrix.form is CSR else None,
        "col_indices": lambda matrix: matrix.second if matrix.form is CSR else None,
        "_nnz": lambda matrix: len(matrix.values),
        "coalesce": lambda matrix: matrix.coalesced() if matrix.form is COO else None,
        "to_sparse": converted,
        "to_sparse_coo": converted,
        "to_sparse_csr": partial(converted, form=CSR),
    }
)


@handler(*READS)
def read_entries(func, types, args, kwargs):
    """Read the entries of a matrix, sharded as they are; of a matrix on every rank, and of other forms, all of them."""
    matrix = sparse_matrix(args[0])
    found = (
        READS[func.__name__](matrix, *args[1:], **kwargs)
        if matrix is not None and (matrix.sharding or matrix.requires_grad)
        else None
    )
    if found is None:
        return gather_fallback(func, types, args, kwargs)
    return wrapped(found) if isinstance(found, SparseMatrix) else found
