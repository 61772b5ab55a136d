"""Products of plain sparse matrices, with and without gradients, and sharded fields."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, raises

ENTRIES = torch.tensor([[0, 0, 1, 2, 2, 2, 4, 5, 6, 6, 6], [1, 8, 3, 0, 4, 8, 2, 2, 5, 6, 7]])  # no entry in row 3
COUNT = ENTRIES.shape[1]
OPTIONS = {"layouts": 16}


def matrix(values, layout=torch.sparse_coo):
    """Return a sparse matrix of 7 rows and 9 columns."""
    found = torch.sparse_coo_tensor(ENTRIES, values, (7, 9), is_coalesced=True)
    return found if layout is torch.sparse_coo else found.to_sparse(layout=layout)


def made(call, name, layout=torch.sparse_coo):
    """Return a call on a matrix of these values, and on one without a gradient."""

    def run(values, *tensors):
        constant = matrix(torch.arange(1.0, COUNT + 1, dtype=torch.float64), layout)
        return [call(m, *tensors) for m in (matrix(values, layout), constant)]

    run.__name__ = f"{name} of a {str(layout).removeprefix('torch.')} matrix"
    return run


def repeated(values, x):
    """Multiply with a matrix with duplicate entries, which are summed."""
    return torch.sparse_coo_tensor(ENTRIES[:, [0, 1, 1, 4, 4]], values, (7, 9)) @ x


VALUES = T(COUNT, shard_dims=())
CASES = [
    case(made(torch.mm, "mm"), VALUES, T(9, 5), options=OPTIONS),
    case(made(torch.mm, "mm", torch.sparse_csr), VALUES, T(9, 5), options=OPTIONS),
    case(made(torch.matmul, "matmul", torch.sparse_csc), VALUES, T(9, 5), options=OPTIONS),
    case(made(torch.mv, "mv"), VALUES, T(9), options=OPTIONS),
    case(made(lambda m, x: m @ x, "@"), VALUES, T(9), options=OPTIONS),
    case(made(torch.sparse.mm, "sparse.mm"), VALUES, T(9, 5), options=OPTIONS),
    case(made(torch.spmm, "spmm"), VALUES, T(9, 5), options=OPTIONS),
    case(
        made(lambda m, y, x: torch.addmm(y, m, x, beta=2, alpha=0.5), "addmm"),
        VALUES,
        T(7, 5),
        T(9, 5),
        options=OPTIONS,
    ),
    case(made(lambda m, y, x: torch.sparse.addmm(y, m, x), "sparse.addmm"), VALUES, T(7, 5), T(9, 5), options=OPTIONS),
    case(made(lambda m, x: x @ m, "product with", torch.sparse_csr), VALUES, T(4, 7), options=OPTIONS),
    case(made(lambda m, x: x @ m, "product with"), VALUES, T(2, 4, 7), options=OPTIONS),
    case(
        made(lambda m, x, b: F.linear(x, m, b), "linear", torch.sparse_csr),
        VALUES,
        T(4, 9),
        T(7, shard_dims=()),
        options=OPTIONS,
    ),
    case(repeated, T(5, shard_dims=()), T(9, 5), options=OPTIONS),
    case(made(torch.mm, "mm"), VALUES, T(8, 5), options=OPTIONS | raises(RuntimeError, "Expected dim 0 size")),
    case(
        made(torch.mm, "mm"),
        VALUES,
        T(9, 5, dtype=torch.float32),
        options=OPTIONS | raises(RuntimeError, "expected scalar type Double but found Float"),
    ),
    case(  # a maximum instead of the sum has no rule
        lambda x: torch.sparse.mm(matrix(torch.ones(COUNT, dtype=x.dtype), torch.sparse_csr), x, "amax"),
        T(9, 5),
        options=OPTIONS | {"may_gather": True, "name": "sparse.mm by maxima"},
    ),
]
