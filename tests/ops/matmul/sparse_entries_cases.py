"""Sparse matrices whose entries are sharded: products with each other and with fields, conversions, gradients."""

import torch

from shardfield import ShardTensor
from tests.harness import T, case, raises

# Entries of a matrix of 6 x 5 and one of 5 x 7, in order; row 2 of the first and row 3 of the second have none.
LEFT = torch.tensor([[0, 0, 1, 1, 1, 3, 3, 4, 5], [1, 4, 0, 2, 3, 0, 4, 4, 2]])
RIGHT = torch.tensor([[0, 0, 1, 2, 2, 4, 4], [2, 6, 0, 2, 3, 0, 6]])
OPTIONS = {"layouts": 16}


def coo(at, values, shape):
    return torch.sparse_coo_tensor(at, values, shape, is_coalesced=True)


def shuffled(at, values, shape):
    """Return a matrix whose entries are not in order, two of them twice."""
    order = torch.arange(at.shape[1]).flip(0)
    return torch.sparse_coo_tensor(at[:, order], values[order], shape)


def csr(at, values, shape):
    return torch.sparse_csr_tensor(torch._convert_indices_from_coo_to_csr(at[0], shape[0]), at[1], values, size=shape)


def parts(matrix):
    """Return indices and values of a matrix, in order: torch's CSR product of MKL leaves columns out of order."""
    found = matrix.to_sparse_coo().coalesce()
    again = torch.sparse_coo_tensor(found.indices(), found.values(), matrix.shape).coalesce()
    return again.indices(), again.values()


def dense(at, values, shape):
    return torch.zeros(shape, dtype=values.dtype).index_put(tuple(at), values, accumulate=True)


def is_sharded(*tensors):
    return any(isinstance(t, ShardTensor) and t._layout.shard_axes for t in tensors)


def product_of(make, other=None):
    """Return a call that multiplies two matrices with these values.

    Values of one device are those of the dense product: torch has no second derivative of a sparse one.
    """

    def run(a, b):
        zero = 0.0 * (a.sum() + b.sum())  # none is plain if one is sharded
        a, b = a + zero, b + zero
        indices, values = parts(make(LEFT, a, (6, 5)) @ (other or make)(RIGHT, b, (5, 7)))
        if isinstance(values, ShardTensor):
            return indices, values
        return indices, (dense(LEFT, a, (6, 5)) @ dense(RIGHT, b, (5, 7)))[tuple(indices)]

    run.__name__ = f"product of {make.__name__} matrices"
    return run


def from_edges(edges, weights):
    """Square the matrix of sharded edges, as torch_geometric's GraphUNet does."""
    matrix = csr(edges, weights, (5, 5))
    indices, values = parts(matrix @ matrix)
    return indices, values


def with_field(edges, weights, x):
    """Multiply a matrix of sharded edges with a field.

    Where the matrix is not sharded the product is a dense one: second derivatives of torch's sparse product lack terms.
    """
    weights = weights + 0.0 * edges.sum()  # as computed from the nodes: sharded or on every rank, but not plain
    if not is_sharded(edges, weights):
        matrix = dense(edges, weights, (6, 5))
        return matrix @ x, matrix @ x, x.T @ matrix.t()
    matrix = torch.sparse_coo_tensor(edges, weights, (6, 5))
    return matrix @ x, torch.sparse.mm(matrix, x), x.T @ matrix.t()


def plain_matrix(a):
    return coo(RIGHT, torch.arange(1.0, 8, dtype=a.dtype), (5, 7))


def times_plain(a):
    """Multiply a matrix of sharded values with a plain one; see `with_field` for other values."""
    indices, values = parts(coo(LEFT, a, (6, 5)) @ plain_matrix(a))
    if not is_sharded(a):
        values = (dense(LEFT, a, (6, 5)) @ plain_matrix(a).to_dense())[tuple(indices)]
    return indices, values


def plain_times(a):
    return parts(plain_matrix(a).t().coalesce() @ shuffled(LEFT.flip(0), a, (5, 6)).coalesce())


def read(a):
    """Read the parts of matrices."""
    ordered, unordered, compressed = coo(LEFT, a, (6, 5)), shuffled(LEFT, a, (6, 5)), csr(LEFT, a, (6, 5))
    assert ordered.is_coalesced() and not unordered.is_coalesced() and ordered.is_sparse and compressed.is_sparse_csr
    assert ordered._nnz() == 9 and compressed.shape == (6, 5) and compressed.layout is torch.sparse_csr
    compressed_too = unordered.to_sparse_csr()
    return (
        ordered.values() * 2, unordered._values(), unordered._indices(), unordered.coalesce().values(),
        compressed.crow_indices(), compressed.col_indices(), compressed.values(),
        compressed_too.crow_indices(), compressed_too.values(),
    )  # fmt: skip


def selected(a, index):
    """Select columns and rows, some twice; torch has no gradient of it."""
    matrix = shuffled(LEFT, a, (6, 5))
    return *parts(matrix.index_select(1, index)), *parts(torch.index_select(matrix, 0, index))


def coarsened(edges, weights, index):
    """Pool a graph, as torch_geometric's ASAPooling does."""
    matrix = csr(edges, weights, (5, 5))
    chosen = torch.sparse_coo_tensor(edges, weights * 2, (5, 5)).index_select(1, index).to_sparse_csr()
    return parts(chosen.t().to_sparse_csr() @ (matrix @ chosen))


def without_rule(a):
    return coo(LEFT, a, (6, 5)).to_dense() * 2


def edges(shape, generator):
    return torch.stack([torch.tensor([0, 0, 1, 1, 1, 2, 3, 4, 4]), LEFT[1]])


def repeated(shape, generator):
    return torch.tensor([3, 0, 4, 3])


VALUES, PLAIN_VALUES, EDGES = T(9), T(9, shard_dims=()), T(2, 9, fill=edges, shard_dims=(1,))
CONSTANT, INDEX = T(9, grad=False), T(4, fill=repeated)
CASES = [
    case(product_of(coo), VALUES, T(7), options=OPTIONS),
    case(product_of(shuffled), VALUES, T(7), options=OPTIONS),
    case(product_of(shuffled, coo), VALUES, T(7, shard_dims=()), options=OPTIONS),
    case(product_of(csr), CONSTANT, T(7, grad=False), options=OPTIONS),
    case(from_edges, EDGES, CONSTANT, options=OPTIONS),
    case(from_edges, EDGES, T(9, grad=False, shard_dims=()), options=OPTIONS),
    case(with_field, EDGES, VALUES, T(5, 3), options=OPTIONS),
    case(with_field, EDGES, PLAIN_VALUES, T(5, 3), options=OPTIONS),
    case(with_field, T(2, 9, fill=edges, shard_dims=()), VALUES, T(5, 3, shard_dims=()), options=OPTIONS),
    case(  # C++ itself records a gradient of plain values
        lambda edges, weights, x: torch.sparse_coo_tensor(edges, weights, (6, 5)) @ x,
        EDGES,
        PLAIN_VALUES,
        T(5, 3, shard_dims=()),
        options=OPTIONS | {"may_refuse": True, "name": "plain values that require grad"},
    ),
    case(times_plain, VALUES, options=OPTIONS),
    case(plain_times, VALUES, options=OPTIONS),
    case(read, CONSTANT, options=OPTIONS),
    case(selected, CONSTANT, INDEX, options=OPTIONS),
    case(selected, CONSTANT, T(4, shard_dims=(), fill=repeated), options=OPTIONS),
    case(
        lambda a, index: coo(LEFT, a, (6, 5)).index_select(1, index + 3),
        CONSTANT,
        INDEX,
        options=OPTIONS | raises(IndexError, "out of range") | {"name": "index_select out of range"},
    ),
    case(coarsened, EDGES, CONSTANT, INDEX, options=OPTIONS),
    case(coarsened, EDGES, T(9, grad=False, shard_dims=()), T(4, shard_dims=(), fill=repeated), options=OPTIONS),
    case(without_rule, VALUES, options=OPTIONS | {"may_gather": True}),
    case(
        lambda a: coo(LEFT, a, (6, 5)) @ coo(LEFT, a, (6, 5)),
        VALUES,
        options=OPTIONS | raises(RuntimeError, "shapes cannot be multiplied") | {"name": "product of other sizes"},
    ),
]
