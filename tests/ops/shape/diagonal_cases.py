"""Diagonals, unfold, and out-of-place writes of views (select_scatter and its relatives)."""

import torch

from tests.harness import T, case, raises

NO_MESSAGES = {"no_messages": True, "layouts": 6}
OPTIONS = {"layouts": 6}


def write_diagonal(x):
    y = x * 1
    y.diagonal(1).mul_(3)
    return y


CASES = [
    case(torch.diagonal, T(5, 6), options=NO_MESSAGES),
    case(torch.diagonal, T(5, 6, 4), 1, options=NO_MESSAGES),
    case(torch.diagonal, T(5, 6, 4), -2, 2, 0, options=NO_MESSAGES),
    case(torch.Tensor.diagonal, T(3, 5, 4), offset=2, dim1=-1, dim2=1, options=NO_MESSAGES),
    case(torch.diagonal, T(5, 6), 9, options=NO_MESSAGES),
    case(torch.diagonal, T(5, 6), 0, 1, 1, options=raises(RuntimeError, "diagonal dimensions cannot be identical")),
    case(torch.linalg.diagonal, T(3, 5, 4), offset=-1, options=NO_MESSAGES),
    case(write_diagonal, T(5, 6), options=NO_MESSAGES | {"try_partial": False}),
    case(torch.diag, T(5, 6), options=NO_MESSAGES),
    case(torch.diag, T(5), 2, options=NO_MESSAGES),
    case(torch.Tensor.diag, T(5, 6), -1, options=NO_MESSAGES),
    case(torch.diag, T(5, 6, 4), options=raises(RuntimeError, "diag(): Supports 1D or 2D tensors")),
    case(torch.diag_embed, T(4, 5), options=NO_MESSAGES),
    case(torch.diag_embed, T(5), -2, options=NO_MESSAGES),
    case(torch.diag_embed, T(3, 4), 1, 0, 2, options=NO_MESSAGES),
    case(torch.diag_embed, T(3, 4), 0, 1, 0, options=NO_MESSAGES),
    case(torch.diagflat, T(2, 3), 1, options=OPTIONS),
    case(torch.Tensor.unfold, T(9, 4), 0, 3, 1, options=OPTIONS),
    case(torch.Tensor.unfold, T(9, 4), 0, 2, 2, options=OPTIONS),
    case(torch.Tensor.unfold, T(4, 8), -1, 2, 3, options=OPTIONS),
    case(torch.Tensor.unfold, T(8, 5), 0, 7, 1, options=OPTIONS),
    case(torch.Tensor.unfold, T(8, 5), 0, 8, 3, options=OPTIONS),
    case(torch.Tensor.unfold, T(8, 5), 0, 1, 4, options=OPTIONS),
    case(torch.Tensor.unfold, T(8, 5), 0, 9, 1, options=raises(RuntimeError, "maximum size for tensor at dimension")),
    case(lambda x: x.unfold(0, 3, 2).unfold(1, 2, 1), T(9, 6), options=OPTIONS | {"name": "unfold of unfold"}),
    case(torch.select_scatter, T(5, 6, 4), T(5, 4), 1, 3, options=OPTIONS),
    case(torch.select_scatter, T(5, 6), T(6), 0, -2, options=OPTIONS),
    case(
        torch.select_scatter,
        T(5, 6),
        T(1),
        0,
        1,
        options=OPTIONS | raises(RuntimeError, "expected src to have a size equal to the slice"),
    ),
    case(torch.slice_scatter, T(5, 6, 4), T(5, 2, 4), 1, 1, 5, 2, options=OPTIONS),
    case(torch.slice_scatter, T(5, 6), T(3, 6), start=2, options=OPTIONS),
    case(
        torch.slice_scatter,
        T(5, 6),
        T(2, 6),
        start=2,
        options=OPTIONS | raises(RuntimeError, "expected src to have a size equal to the slice"),
    ),
    case(torch.diagonal_scatter, T(5, 6), T(5), options=OPTIONS),
    case(torch.diagonal_scatter, T(5, 6, 4), T(6, 4), 0, 0, 2, options=OPTIONS | {"name": "diagonal_scatter mid"}),
    case(torch.diagonal_scatter, T(4, 6, 4), T(6, 3), -1, 0, 2, options=OPTIONS),
    case(torch.select_copy, T(5, 6), 0, 2, options=NO_MESSAGES),
    # torch 2.11 has no derivative of narrow_copy
    case(torch.narrow_copy, T(5, 6), 1, 2, 3, options=NO_MESSAGES | {"grad": torch.__version__ >= "2.13"}),
    case(torch.diagonal_copy, T(5, 6), 1, options=NO_MESSAGES),
    case(torch.unfold_copy, T(8, 5), 0, 3, 2, options=OPTIONS),
    case(torch.slice_copy, T(5, 6), 1, 1, 5, 2, options=NO_MESSAGES),
]
