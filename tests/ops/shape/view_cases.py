"""Views: reshape, permute, squeeze, expand, dtype views."""

import torch

from tests.harness import T, case, double_backward, raises

NO_MESSAGES = {"no_messages": True, "layouts": 5}
FEW = {"layouts": 5}
FEW_WRITES = {"layouts": 8, "may_refuse": True, "try_partial": False}


def named(name, fn, *args, options=None):
    return case(fn, *args, options={"name": name} | (options or FEW))


def round_trip(x):
    return torch.relu(x.reshape(2, 3, 24) * 2).reshape(2, 3, 4, 6)


def views_read_after_a_write(x):
    """Take views, some of which need communication, and write into their source; one device's views see the write."""
    y = x * 1
    views = [y.reshape(8, 3), y[2], y.view(-1)[5:9], y.select(1, 4), y.t().reshape(-1), y[1:, 0].reshape(3, 1)]
    before = views[1] + views[4].sum()
    y.mul_(2)
    y[1] = 0.5
    return [before, views[1] - views[1].sum(), *(v * 1 for v in views), y]


def write_after_contiguous(x, order):
    """Write into the result of `contiguous`: the source changes if it is in order. A shard of size 1 hides that."""
    y = x * 1
    view = y.permute(order)
    same = view.contiguous()
    same.mul_(2)
    return y * 1, same * 1


VIEWS_OF_VIEWS = {
    "unfold, reshape": lambda y: y.unfold(0, 2, 1).reshape(3, 6, 2),
    "unfold, transpose, split": lambda y: y.unfold(1, 2, 2).mT.reshape(4, 2, 1, 3),
    "as_strided": lambda y: y.as_strided((12, 2), (2, 1)),
    "join, split, detach": lambda y: y.view(24).view(2, 3, 4).detach().squeeze(),
    "row, data": lambda y: y[1].data,
    "unfold, conj": lambda y: y.unfold(0, 2, 1).conj(),
    "aten.alias": lambda y: torch.ops.aten.alias(y.select(0, 2)),
    "column, ravel": lambda y: y.view(2, 2, 6)[..., 2].ravel(),  # torch copies it, where reshape returns a view
}


def view_of_view(x, name, into_view):
    """Write into the source of a view of a view, or into that view, and return both."""
    y = x * 1
    view = VIEWS_OF_VIEWS[name](y)
    (view if into_view else y).mul_(2)
    return view * 1, y * 1


def writes_into_split_dims(x):
    """Write into views that split a dim, which need communication where a shard boundary falls inside a new dim."""
    y = x * 1
    pairs = y.view(4, 2, 3)
    pairs[:, 1].add_(pairs[:, 0] * 2)
    pairs[1:, 0] += pairs[:-1, 1] * 0.3
    y[2:6].view(2, 2, 3)[:, 1].mul_(3)
    y[1::2].unflatten(0, (2, 2))[0] = y[:2].clone() * y[5].clone()
    y.mul_(0.5)
    return [y, pairs[:, 1] * 1, pairs]


def scan(decay, x):
    """Compute x[i] += decay[i] * x[i - 1] for all i, by a tree of writes into views of views, as Mamba's scan does."""
    a, x = decay * 1, x * 1
    below, above = a, x
    for _ in range(2):
        below, above = below.view(len(below) // 2, 2, -1), above.view(len(above) // 2, 2, -1)
        above[:, 1].add_(below[:, 1] * above[:, 0])
        below[:, 1].mul_(below[:, 0])
        below, above = below[:, 1], above[:, 1]
    above[1].add_(below[1] * above[0])
    for step in (2, 1):
        below, above = (t[step - 1 :: step] for t in (a, x))
        below, above = below.view(len(below) // 2, 2, -1), above.view(len(above) // 2, 2, -1)
        above[1:, 0].add_(below[1:, 0] * above[:-1, 1])
        below[1:, 0].mul_(below[:-1, 1])
    return x


def overlapping_chunks(x):
    """Return chunks of four rows that overlap by two, from the strides of a view, as Longformer does."""
    pairs = x.transpose(0, 1).reshape(x.shape[1], x.shape[0]).transpose(0, 1).contiguous().view(2, 4, x.shape[1])
    stride = list(pairs.stride())
    return pairs.as_strided((3, 4, x.shape[1]), (stride[0] // 2, *stride[1:]))


def strided_and_written(x, into_view):
    """Write into the source of `as_strided`, or into its result, and return both."""
    source = x * 1
    view = source.as_strided((8, 2), (2, 1))
    (view if into_view else source).mul_(0.5)
    return view * 1, source * 1


STRIDED = {"layouts": 8, "may_gather": True, "may_refuse": True}
CASES = [
    case(overlapping_chunks, T(8, 3), options={"layouts": 8, "may_refuse": True}),
    named(
        "as_strided, windows with a step and an offset",
        lambda x: (x * 2).as_strided((2, 3, 1, 4), (2 * 12, 3, 5, 1), 2),
        T(4, 4, 3),
        options={"layouts": 12, "may_refuse": True},
    ),
    case(torch.as_strided, T(3, 4), (4, 3), (1, 4), options=STRIDED),
    named(
        "as_strided, transposed",
        lambda x: x.t().as_strided((2, 3), (1, 4)),
        T(3, 4),
        options=STRIDED,
    ),
    named(
        "as_strided of a result",
        lambda x: (x.t() * 2).as_strided((2, 3), (1, 4)),
        T(3, 4),
        options=STRIDED | {"layouts": 16},
    ),
    named(
        "as_strided of a result in order",
        lambda x: (x * 2).as_strided((2, 3), (4, 1)),
        T(3, 4),
        options=STRIDED,
    ),
    named(
        "as_strided of a slice",
        lambda x: x[:, 1:].as_strided((2, 3), (4, 1)),
        T(3, 4),
        options=STRIDED,
    ),
    case(strided_and_written, T(4, 4, shard_dims=(0,)), False, options=STRIDED),
    case(strided_and_written, T(4, 4, shard_dims=(0,)), True, options=STRIDED),
    case(views_read_after_a_write, T(4, 6), options={"layouts": 12}),
    *(case(view_of_view, T(4, 6), name, w, options=FEW_WRITES) for name in VIEWS_OF_VIEWS for w in (False, True)),
    case(writes_into_split_dims, T(8, 3), options={"layouts": 12, "try_partial": False}),
    case(write_after_contiguous, T(2, 3), (1, 0), options=FEW_WRITES),
    case(write_after_contiguous, T(5, 3), (1, 0), options=FEW_WRITES),
    case(write_after_contiguous, T(5, 3), (0, 1), options=FEW_WRITES),
    case(write_after_contiguous, T(2, 3, 4), (0, 2, 1), options=FEW_WRITES),
    case(write_after_contiguous, T(1, 1, 2), (0, 2, 1), options=FEW_WRITES),
    case(write_after_contiguous, T(2, 1, 3), (1, 0, 2), options=FEW_WRITES),
    # a plain tensor that sharded values are written into gathers them
    case(
        scan,
        T(8, 3, grad=False),
        T(8, 3, grad=False),
        options={"layouts": 12, "try_partial": False, "may_gather": True},
    ),
    # ---- reshapes
    case(torch.reshape, T(2, 3, 4, 6), (2, 3, 24), options=NO_MESSAGES),
    case(torch.Tensor.view, T(2, 6, 4), 12, 4, options=NO_MESSAGES),
    case(torch.reshape, T(24, 5), (4, 6, 5), options={"layouts": 12}),
    case(torch.reshape, T(4, 6, 5), (-1,), options=NO_MESSAGES),
    case(torch.reshape, T(4, 6), (6, 4), options={"layouts": 12}),
    case(torch.reshape, T(2, 12), (3, 8), options=FEW),
    case(torch.reshape, T(4, 1, 6), (2, 12, 1), options=FEW),
    case(torch.reshape, T(24), (2, 12), options=FEW),
    case(torch.reshape, T(8, 3), (2, 2, 6, 1), options=FEW),
    case(torch.reshape, T(0, 3), (3, 0, 2), options=NO_MESSAGES),
    case(torch.reshape, T(1, 1), (), options=NO_MESSAGES),
    case(torch.reshape, T(), (1, 1), options=NO_MESSAGES),
    case(torch.reshape, T(4, 6), (5, 5), options=FEW | raises(RuntimeError, "is invalid for input of size")),
    case(torch.reshape, T(4, 6), (-1, 5), options=FEW | raises(RuntimeError, "is invalid for input of size")),
    case(
        torch.Tensor.view, T(4, 6), (-1, -1), options=FEW | raises(RuntimeError, "only one dimension can be inferred")
    ),
    case(
        torch.Tensor.view, T(0, 3), (0, -1), options=FEW | raises(RuntimeError, "cannot reshape tensor of 0 elements")
    ),
    # torch reads a 0-d tensor as a number
    named("reshape, size computed", lambda x: x.reshape(torch.tensor(2), -1), T(4, 6)),
    named("view, sizes computed", lambda x: x.view(*torch.tensor([2, 12])), T(4, 6)),
    named("expand, size computed", lambda x: x.expand(torch.tensor(3), -1, 5), T(4, 1)),
    named("transpose, dim computed", lambda x: x.transpose(torch.tensor(0), 1), T(4, 6)),
    case(torch.Tensor.view_as, T(4, 6), T(8, 3), options=FEW),
    case(torch.Tensor.reshape_as, T(4, 6), T(24), options=NO_MESSAGES),
    case(torch.flatten, T(2, 3, 4), options=NO_MESSAGES),
    case(torch.flatten, T(2, 3, 4, 5), 1, -2, options=NO_MESSAGES),
    case(torch.flatten, T(), options=NO_MESSAGES),
    case(torch.flatten, T(2, 3), 1, 0, options=FEW | raises(RuntimeError, "start_dim cannot come after end_dim")),
    case(torch.ravel, T(3, 4), options=NO_MESSAGES),
    case(torch.unflatten, T(5, 12), 1, (3, -1), options=FEW),
    case(torch.Tensor.unflatten, T(12, 5), 0, (2, 2, 3), options=FEW),
    case(
        torch.unflatten, T(5, 12), 1, (5, 2), options=FEW | raises(RuntimeError, "don't multiply up to the size of dim")
    ),
    case(torch.atleast_1d, T(), options=NO_MESSAGES),
    case(torch.atleast_2d, T(5), options=NO_MESSAGES),
    case(torch.atleast_3d, T(5), options=NO_MESSAGES),
    case(torch.atleast_3d, [T(5), T(2, 3), T()], options=NO_MESSAGES),
    named("round trip", round_trip, T(2, 3, 4, 6), options=NO_MESSAGES | {"try_partial": False}),
    named(
        "merge three",
        lambda x: torch.sin(x.flatten()).view(3, 4, 5),
        T(3, 4, 5),
        options=NO_MESSAGES | {"try_partial": False},
    ),
    named("merge, split otherwise", lambda x: torch.sin(x.flatten()).view(6, 2, 5), T(3, 4, 5)),
    named("merge some, then more", lambda x: x.flatten(0, 1).flatten(1).flatten(), T(3, 4, 2, 3), options=NO_MESSAGES),
    named(
        "permute merged",
        lambda x: x.flatten(1, 2).permute(2, 1, 0).reshape(3, 20, 2),
        T(2, 4, 5, 3),
        options=NO_MESSAGES,
    ),
    named("merged to simple", lambda x: x.flatten().flip(0), T(4, 6)),
    named("sum of two merged dims", lambda x, y: x.flatten() + y.flatten(), T(4, 6), T(4, 6), options={"layouts": 12}),
    named("merged dim times simple dim", lambda x, y: x.flatten() * y, T(4, 6), T(24), options={"layouts": 12}),
    # ---- permutations
    case(torch.permute, T(3, 4, 5), (2, 0, 1), options=NO_MESSAGES),
    case(torch.Tensor.permute, T(3, 4, 5), -1, 0, 1, options=NO_MESSAGES),
    case(
        torch.Tensor.permute,
        T(3, 4),
        0,
        0,
        options=FEW | raises(RuntimeError, "permute(): duplicate dims are not allowed"),
    ),
    case(torch.transpose, T(3, 4, 5), 0, -1, options=NO_MESSAGES),
    case(torch.transpose, T(3, 4, 5), 0, 3, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.swapaxes, T(3, 4, 5), 1, 2, options=NO_MESSAGES),
    case(torch.swapdims, T(3, 4), 0, 1, options=NO_MESSAGES),
    case(torch.t, T(3, 4), options=NO_MESSAGES),
    case(torch.t, T(3), options=NO_MESSAGES),
    case(torch.t, T(3, 4, 5), options=FEW | raises(RuntimeError, "t() expects a tensor with <= 2 dimensions")),
    case(torch.movedim, T(3, 4, 5), 0, 2, options=NO_MESSAGES),
    case(torch.movedim, T(3, 4, 5), (0, 1), (2, 0), options=NO_MESSAGES),
    case(torch.moveaxis, T(3, 4, 5), 2, 0, options=NO_MESSAGES),
    case(torch.adjoint, T(2, 3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    named("x.T", lambda x: x.T, T(3, 4), options=NO_MESSAGES),
    named("x.mT", lambda x: x.mT, T(2, 3, 4), options=NO_MESSAGES),
    named("x.H", lambda x: x.H, T(3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    named("x.mH", lambda x: x.mH, T(2, 3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    named(
        "x.mT of a vector",
        lambda x: x.mT,
        T(3),
        options=FEW | raises(RuntimeError, "tensor.mT is only supported on matrices"),
    ),
    case(torch.squeeze, T(1, 4, 1, 3), options=NO_MESSAGES),
    case(torch.squeeze, T(4, 1, 3), 1, options=NO_MESSAGES),
    case(torch.squeeze, T(4, 1, 3), 0, options=NO_MESSAGES),
    case(torch.squeeze, T(1, 4, 1), (0, 2), options=NO_MESSAGES),
    case(torch.squeeze, T(1, 1), options=NO_MESSAGES),
    case(torch.squeeze, T(1, dtype=torch.int64, fill="ints"), options=NO_MESSAGES),
    case(torch.squeeze, T(1, fill="bool"), 0, options=NO_MESSAGES),
    case(torch.squeeze, T(4, 1), 2, options=FEW | raises(IndexError, "Dimension out of range")),
    named("squeeze, then use", lambda x: torch.sin(x.squeeze(0)).sum(0), T(1, 4, 3)),
    case(torch.unsqueeze, T(3, 4), 1, options=NO_MESSAGES),
    case(torch.unsqueeze, T(3, 4), -1, options=NO_MESSAGES),
    case(torch.unsqueeze, T(3, 4), 3, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.unsqueeze, T(), 0, options=NO_MESSAGES),
    # ---- expansions
    case(torch.Tensor.expand, T(4, 1), 4, 5, options=FEW),
    case(torch.Tensor.expand, T(4), (3, -1), options=NO_MESSAGES),
    case(torch.Tensor.expand, T(1, 4, 1), 2, 3, -1, 5, options=FEW),
    case(torch.Tensor.expand, T(), 3, 2, options=NO_MESSAGES),
    case(torch.Tensor.expand, T(4), 3, 5, options=FEW | raises(RuntimeError, "The expanded size of the tensor")),
    case(torch.Tensor.expand, T(1, 3), 0, 3, options=FEW),
    case(torch.Tensor.expand_as, T(4, 1), T(3, 4, 5), options=FEW),
    case(torch.broadcast_to, T(1, 5), (4, 5), options=FEW),
    case(torch.broadcast_tensors, T(4, 1), T(5), T(3, 1, 1), options=FEW),
    # ---- complex and dtype views
    case(torch.view_as_real, T(3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    case(
        torch.view_as_real,
        T(3, 4),
        options=FEW | raises(RuntimeError, "only supported for complex tensors", since_2_15=TypeError),
    ),
    case(torch.view_as_complex, T(3, 4, 2), options=FEW),
    case(
        torch.view_as_complex,
        T(3, 4, 3),
        options=FEW | raises(RuntimeError, "Tensor must have a last dimension of size 2"),
    ),
    case(torch.real, T(3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    case(torch.imag, T(3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    case(torch.imag, T(3, 4), options=FEW | raises(RuntimeError, "imag is not implemented", since_2_15=TypeError)),
    named("x.real", lambda x: x.real * 2, T(3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    named("x.imag", lambda x: x.imag, T(3, 4, dtype=torch.complex128), options=NO_MESSAGES),
    named("x.real of a real", lambda x: x.real, T(3, 4), options=NO_MESSAGES),
    case(torch.Tensor.view, T(3, 4, dtype=torch.float32), torch.int32, options=NO_MESSAGES | {"try_partial": False}),
    case(torch.Tensor.view, T(3, 4), torch.int32, options=NO_MESSAGES | {"try_partial": False}),
    case(torch.Tensor.view, T(3, 4, fill="ints", dtype=torch.int32), torch.int64, options=FEW),
    case(
        torch.Tensor.view,
        T(3, 5, fill="ints", dtype=torch.int32),
        torch.int64,
        options=FEW | raises(RuntimeError, "must be divisible by 2 to view Int as Long"),
    ),
    named(
        "views, double backward", double_backward(lambda x: x.view(24).view(6, 4).t().flatten().view(2, 12)), T(4, 6)
    ),
    named("squeeze, double backward", double_backward(lambda x: x.squeeze(1).unsqueeze(0).expand(3, 4, 3)), T(4, 1, 3)),
]
