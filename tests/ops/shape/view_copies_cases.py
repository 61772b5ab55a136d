"""Copies of views, in-place views, and writes through views."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, raises

FEW = {"layouts": 4}
MAY_REFUSE = {"may_refuse": True, "layouts": 8}


def written(name, view, *args, options=None):
    """Build a row that writes into a view, which must change its base."""

    def run(x):
        base = x * 1.0
        view(base).mul_(3.0).add_(1.0)
        return base

    return case(run, *args, options={"name": f"write: {name}", "layouts": 6, "try_partial": False} | (options or {}))


def in_place(name, change, *args):
    def run(x):
        y = x * 1.0
        return torch.sin(change(y)), y

    return case(run, *args, options=FEW | {"name": f"in place: {name}"})


CASES = [
    written("view", lambda x: x.view(24), T(4, 6)),
    written("flatten", lambda x: x.flatten(1), T(3, 4, 5)),
    written("merge and split", lambda x: x.view(24).view(2, 2, 6), T(4, 6), options={"may_refuse": True}),
    written("unflatten", lambda x: x.unflatten(0, (2, 3)), T(6, 4), options={"may_refuse": True}),
    written("transpose", lambda x: x.transpose(0, 1), T(4, 6)),
    written("T", lambda x: x.T, T(4, 6)),
    written("permute", lambda x: x.permute(2, 0, 1).flatten(1), T(2, 3, 4)),
    written("squeeze", lambda x: x.squeeze(1), T(4, 1, 3)),
    written("unsqueeze", lambda x: x.unsqueeze(1), T(4, 3)),
    written("slice", lambda x: x[1:3], T(5, 3)),
    written("narrow", lambda x: x.narrow(1, 1, 2), T(4, 5)),
    written("tensor_split", lambda x: x.tensor_split(3)[1], T(5, 3)),
    written("chunk", lambda x: x.chunk(2)[1], T(5, 3), options={"grad": False}),
    written("split", lambda x: x.split([1, 3], 1)[1], T(2, 4), options={"grad": False}),
    written("unbind", lambda x: x.unbind(1)[2], T(3, 4), options={"grad": False}),
    written(
        "chunk with a gradient",
        lambda x: x.chunk(2)[1],
        T(5, 3),
        options=raises(RuntimeError, "is a view and is being modified inplace"),
    ),
    written("real", lambda x: torch.view_as_complex(x.view(3, 4, 2)).real, T(3, 8), options={"may_refuse": True}),
    written("view_as_real", lambda x: torch.view_as_real(torch.view_as_complex(x)), T(3, 4, 2, shard_dims=(0, 1))),
    # dropout with nothing to drop returns its input
    written("dropout, not in training", lambda x: F.dropout(x, 0.3, False), T(4, 6)),
    written("dropout of none", lambda x: F.dropout(x, 0.0), T(4, 6)),
    written("dropout2d, not in training", lambda x: F.dropout2d(x, 0.3, False), T(2, 3, 4, 2)),
    written("alpha_dropout, not in training", lambda x: F.alpha_dropout(x, 0.3), T(4, 6)),
    # torch copies here, or raises; a shard of one row or none could be viewed nevertheless
    written("reshape that copies", lambda x: x.t().reshape(24), T(4, 6), options=MAY_REFUSE),
    written(
        "view of a transpose",
        lambda x: x.t().view(24),
        T(4, 6),
        options=MAY_REFUSE | raises(RuntimeError, "view size is not compatible"),
    ),
    written(
        "reshape that copies, on a mesh", lambda x: x.permute(1, 0, 2).reshape(6, 4), T(2, 3, 4), options=MAY_REFUSE
    ),
    written("slice and merge", lambda x: x[:, :3].reshape(12), T(4, 6), options=MAY_REFUSE),
    written("chunk and merge", lambda x: x.chunk(2, 1)[0].reshape(12), T(4, 6), options=MAY_REFUSE | {"grad": False}),
    written("rows and merge", lambda x: x[1:3].flatten(), T(4, 6), options=MAY_REFUSE),
    written("row and merge", lambda x: x[:, 1].reshape(-1), T(3, 4, 5), options=MAY_REFUSE),
    written("merge, then slice", lambda x: x.flatten()[3:9], T(4, 6), options=MAY_REFUSE),
    written("copy, then slice", lambda x: x.t().reshape(24)[3:9], T(4, 6), options=MAY_REFUSE),
    in_place("t_", lambda x: x.t_(), T(3, 4)),
    in_place("transpose_", lambda x: x.transpose_(0, 2), T(3, 4, 2)),
    in_place("swapaxes_", lambda x: x.swapaxes_(0, 1), T(3, 4)),
    in_place("swapdims_", lambda x: x.swapdims_(0, 1), T(3, 4)),
    in_place("squeeze_", lambda x: x.squeeze_(1), T(3, 1, 4)),
    in_place("unsqueeze_", lambda x: x.unsqueeze_(-1), T(3, 4)),
    case(torch.permute_copy, T(3, 4), (1, 0), options=FEW),
    case(torch.transpose_copy, T(3, 4), 0, 1, options=FEW),
    case(torch.t_copy, T(3, 4), options=FEW),
    case(torch.expand_copy, T(3, 1), (3, 4), options=FEW),
    case(torch.squeeze_copy, T(3, 1), options=FEW),
    case(torch.unsqueeze_copy, T(3, 4), 0, options=FEW),
    case(torch.view_copy, T(3, 4), (12,), options=FEW),
    case(torch.alias_copy, T(3, 4), options=FEW),
    case(torch.detach_copy, T(3, 4), options=FEW | {"grad": False}),
    case(torch.select_copy, T(3, 4), 0, 1, options=FEW),
    case(torch.as_strided_copy, T(3, 4), (4, 3), (1, 4), options=FEW | {"may_gather": True}),
    case(torch.slice_copy, T(5, 4), 0, 1, 4, 2, options=FEW),
    # torch 2.11 has no derivative of narrow_copy
    case(torch.narrow_copy, T(5, 4), 0, 1, 3, options=FEW | {"grad": torch.__version__ >= "2.13"}),
    case(torch.split_copy, T(5, 4), 2, options=FEW),
    case(torch.split_with_sizes_copy, T(5, 4), [2, 3], options=FEW),
    case(torch.unbind_copy, T(3, 4), options=FEW),
    case(torch.diagonal_copy, T(3, 4), options=FEW),
    case(torch.view_as_real_copy, T(3, 4, dtype=torch.complex128), options=FEW),
    case(torch.view_as_complex_copy, T(3, 4, 2), options=FEW | {"grad": False}),
]

# Where the view is a copy it is refused.
VIEWED = in_place("squeeze_ of a view", lambda y: y[None].squeeze_(0), T(4, 5))
VIEWED.may_refuse = True
CASES += [
    VIEWED,
    case(
        lambda x: torch.nested.nested_tensor([x[0].detach(), x[1].detach()]),
        T(2, 5),
        options=FEW | {"name": "nested tensor", "may_gather": True, "refuses": "cannot be nested"},
    ),
]
