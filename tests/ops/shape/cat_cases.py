"""Joins: cat, stack and their relatives, block_diag, meshgrid."""

import torch

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 5}
INTS = {"fill": "ints", "dtype": torch.int64}


CASES = [
    case(torch.cat, [T(5, 3), T(2, 3)], options={"layouts": 20}),
    case(torch.cat, [T(3, 5), T(3, 2), T(3, 4)], 1, options={"layouts": 20}),
    case(torch.cat, [T(3, 5), T(3, 5)], dim=-1, options=FEW),
    case(torch.cat, [T(1, 4), T(6, 4)], options=FEW),
    case(
        torch.cat,
        [T(8, 4, shard_dims=(0,)), T(1, 4, shard_dims=())],
        options=FEW | {"no_messages": True, "try_partial": False},
    ),
    case(torch.cat, [T(6), T(1), T(0)], options=FEW),
    case(torch.cat, [T(0), T(3, 4), T(2, 4)], options=FEW),
    case(torch.cat, [T(0, 4), T(3, 4)], options=FEW),
    case(torch.cat, [T(0), T(0)], options=FEW),
    case(torch.cat, [T(4, 3)], options=FEW),
    case(torch.cat, [T(4, 3, dtype=torch.float32), T(2, 3)], options=FEW | {"try_partial": False}),
    case(torch.cat, [T(4, 3, **INTS), T(2, 3)], options=FEW),
    case(torch.cat, [T(4, 3, fill="bool"), T(2, 3, **INTS)], options=FEW),
    case(torch.cat, [T(4, 3), T(2, 4)], options=FEW | raises(RuntimeError, "Sizes of tensors must match")),
    case(torch.cat, [T(4, 3), T(2)], options=FEW | raises(RuntimeError, "Tensors must have same number of dimensions")),
    case(torch.cat, [T(4, 3), T(2, 3)], 2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.cat, [T(2, 3, 4), T(2, 1, 4), T(2, 2, 4)], 1, options=FEW),
    case(torch.concat, [T(4, 3), T(2, 3)], options=FEW),
    case(torch.concatenate, [T(4, 3), T(2, 3)], axis=0, options=FEW),
    case(
        lambda x, y: torch.cat([x.flatten(1), y.flatten(1)], 0),
        T(2, 3, 4),
        T(3, 3, 4),
        options=FEW | {"name": "cat next to a merged dim"},
    ),
    case(
        lambda x, y: torch.cat([x.flatten(1), y], 1),
        T(2, 3, 4),
        T(2, 5),
        options=FEW | {"name": "cat along a merged dim"},
    ),
    case(
        lambda x: torch.cat([x[1:], x[:1]]) + torch.cat(x.chunk(2)[::-1]),
        T(6, 3),
        options=FEW | {"name": "cat of slices"},
    ),
    case(torch.stack, [T(4, 3), T(4, 3)], options={"layouts": 16}),
    case(torch.stack, [T(4, 3), T(4, 3), T(4, 3)], -1, options=FEW),
    case(torch.stack, [T(4), T(4)], 1, options=FEW),
    case(
        lambda x: torch.stack([x[0] * n for n in range(1, 7)], 1),
        T(3, 16),
        options=FEW | {"name": "stack of one row"},
    ),
    case(lambda x: x[0][:, None] * x[1], T(3, 12), options=FEW | {"name": "table of two rows"}),
    case(torch.stack, [T(), T(), T()], options=FEW),
    case(torch.stack, [T(4, dtype=torch.float32), T(4)], options=FEW | {"try_partial": False}),
    case(torch.stack, [T(4), T(3)], options=FEW | raises(RuntimeError, "stack expects each tensor to be equal size")),
    case(torch.stack, [T(4), T(4)], 2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(
        lambda x: torch.stack([2 * r for r in x.unbind()], 1),
        T(5, 3),
        options=FEW | {"name": "unbind and stack"},
    ),
    case(lambda x: torch.stack(x.unbind()[::-1]), T(5, 3), options=FEW | {"name": "rows in another order"}),
    case(torch.hstack, [T(3), T(4)], options=FEW),
    case(torch.hstack, [T(2, 3), T(2, 4)], options=FEW),
    case(torch.hstack, [T(), T()], options=FEW),
    case(torch.vstack, [T(3), T(2, 3)], options=FEW),
    case(torch.row_stack, [T(3), T(3)], options=FEW),
    case(torch.dstack, [T(3), T(3)], options=FEW),
    case(torch.dstack, [T(2, 3), T(2, 3, 2)], options=FEW),
    case(torch.column_stack, [T(3), T(3, 2), T(3)], options=FEW),
    case(torch.block_diag, T(2, 3), T(3), T(), T(3, 1), options=FEW),
    case(torch.block_diag, T(2, 3, 1), T(3), options=FEW | raises(RuntimeError, "must have 2 or fewer dimensions")),
    case(torch.meshgrid, T(3), T(4), T(), indexing="ij", options=FEW),
    case(torch.meshgrid, [T(3), T(4)], indexing="xy", options=FEW),
    case(torch.cartesian_prod, T(3), T(4), T(2), options=FEW),
    case(torch.cartesian_prod, T(3), options=FEW),
    case(torch.combinations, T(4), options=FEW | {"may_gather": True}),  # no rule
    case(
        double_backward(lambda x, y: torch.cat([x, y])),
        T(5),
        T(2),
        options={"layouts": 12, "name": "cat, double backward"},
    ),
    case(
        double_backward(lambda x, y: torch.cat([x, y], 1)),
        T(2, 5),
        T(2, 3),
        options=FEW | {"name": "cat of rows, double backward"},
    ),
    case(
        double_backward(lambda x: torch.stack(x.unbind(), 1)),
        T(4, 3),
        options=FEW | {"name": "unbind and stack, double backward"},
    ),
]
