"""Basic indexing: slices, ints, None, Ellipsis, and the named forms."""

from operator import getitem

import torch

from tests.harness import T, case, raises

NO_MESSAGES = {"no_messages": True, "layouts": 6}


def at(*index, shape=(5, 6, 4), options=NO_MESSAGES):
    return case(getitem, T(*shape), index if len(index) != 1 else index[0], options=options)


def write_through(x, index):
    """Write into a view, which must change its base."""
    y = x * 1
    y[index].mul_(2)
    return y


def grow_through(x, index):
    y = x.clone()
    part = y[index]
    part += 1
    return part * y.sum()


def add_to_row(x, v):
    y = x * 1
    y[2] += v
    y[:, 1] *= 2
    y[:, :, 3] -= y[:, :, 0]
    return y


def differences(x):
    """Take differences with one-sided stencils at the ends, as for a domain that is not periodic."""
    d = torch.zeros_like(x)
    d[:, 1:-1] = (x[:, 2:] - x[:, :-2]) / 2
    d[:, 0] = (-3 * x[:, 0] + 4 * x[:, 1] - x[:, 2]) / 2
    d[:, -1] = (3 * x[:, -1] - 4 * x[:, -2] + x[:, -3]) / 2
    return d


def chained(x):
    return x[1:][:, ::2][..., 1:3] + x[1:, ::2, 1:3].detach()


S = slice


def assign_itself(x):
    """Write a tensor into itself: its memory overlaps the target on the ranks whose shard is not empty."""
    y = x.sin()
    y[None, :] = y
    return y


CASES = [
    at(S(1, 4)),
    at(S(None), S(1, 4)),
    at(S(None, None, 2)),
    at(S(1, None, 3), S(-2, None), S(None, -1)),
    at(S(None), S(0, 100, 7)),
    at(S(3, 1)),
    at(S(4, 4), 2),
    at(0),
    at(-1),
    at(2, 3),
    at(2, 3, 1),
    at(S(1, 3), -2),
    at(Ellipsis, 1),
    at(Ellipsis, S(1, 3)),
    at(1, Ellipsis, S(None, None, 2)),
    at(None),
    at(S(None), None, 2, None),
    at(None, S(1, 3), Ellipsis, None),
    at(Ellipsis),
    at(()),
    at(torch.tensor(3)),
    at(S(None), torch.tensor(-1)),
    at(S(torch.tensor(1), torch.tensor(4))),
    at(0, shape=(5,)),
    at(S(1, 2), shape=(1, 3)),
    at(S(None), 0, shape=(3, 0), options=NO_MESSAGES | raises(IndexError, "is out of bounds for dimension")),
    at(S(0, 5), shape=(0, 3)),
    case(getitem, T(5, 4, fill="ints"), 2, options=NO_MESSAGES),
    case(getitem, T(5, 4, fill="bool"), (S(None), 1), options=NO_MESSAGES),
    case(getitem, T(5, 4, dtype=torch.complex128), (-1, S(1, None)), options=NO_MESSAGES),
    case(getitem, T(5, 6), 5, options=raises(IndexError, "is out of bounds for dimension")),  # raised on every rank
    case(getitem, T(5, 6), (0, -7), options=raises(IndexError, "is out of bounds for dimension")),
    case(getitem, T(5, 6), (0, 0, 0), options=raises(IndexError, "too many indices for tensor of dimension")),
    case(getitem, T(5, 6), S(None, None, -1), options=raises(ValueError, "step must be greater than zero")),
    case(getitem, T(), 0, options=raises(IndexError, "invalid index of a 0-dim tensor")),
    case(getitem, T(), None),
    case(getitem, T(5, 6), 1.5, options=raises(IndexError, "only integers, slices")),
    case(torch.Tensor.select, T(5, 6, 4), 1, 3, options=NO_MESSAGES),
    case(torch.select, T(5, 6, 4), -1, -2, options=NO_MESSAGES),
    case(torch.select, T(5, 6, 4), 1, 6, options=raises(IndexError, "out of range for tensor of size")),
    case(torch.narrow, T(5, 6, 4), 1, 2, 3, options=NO_MESSAGES),
    case(torch.Tensor.narrow, T(5, 6, 4), -1, -3, 2, options=NO_MESSAGES),
    case(torch.narrow, T(5, 6), 0, 4, 2, options=raises(RuntimeError, "exceeds dimension size")),
    case(torch.narrow, T(5, 6), 0, torch.tensor(1), 2),
    case(write_through, T(5, 6), (S(None), S(1, 4)), options=NO_MESSAGES | {"try_partial": False}),
    case(write_through, T(5, 6), (S(1, None, 2), S(None, None, 3)), options=NO_MESSAGES | {"try_partial": False}),
    case(write_through, T(5, 6), 2, options=NO_MESSAGES | {"try_partial": False}),
    case(write_through, T(5, 6, 4), (S(1, None), -1), options=NO_MESSAGES | {"try_partial": False}),
    case(write_through, T(5, 6, 4), (1, None, S(None), 2), options=NO_MESSAGES | {"try_partial": False}),
    case(add_to_row, T(5, 6, 4), T(6, 4), options={"try_partial": False}),
    case(assign_itself, T(5, 6), options={"layouts": 12}),
    case(differences, T(5, 6), options={"try_partial": False}),
    case(grow_through, T(5, 6), (S(2, 4), S(1, 3)), options={"try_partial": False}),
    case(chained, T(5, 6, 4), options=NO_MESSAGES | {"try_partial": False}),
    case(lambda x: x.reshape(4, 30)[:, 6:18], T(4, 5, 6), options={"name": "slice of a merged dim"}),
    case(lambda x: x.reshape(4, 30)[1:, 5:29:3], T(4, 5, 6), options={"name": "slice across a merged dim"}),
    case(lambda x: x.reshape(4, 30)[::2, 17], T(4, 5, 6), options={"name": "row of a merged dim"} | NO_MESSAGES),
    case(lambda x: x.reshape(4, 30)[1], T(4, 5, 6), options={"name": "merged dim kept"} | NO_MESSAGES),
]
