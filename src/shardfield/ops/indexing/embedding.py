"""Embedding tables and one-hot codes.

Rows of a table are taken as `index` takes them: a plain table and cut indices need no message forward, a table cut
along its rows gives a Partial (every rank looks up what it holds) or is asked, where the indices are cut as well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import without_override_check
from ...comm import collectives
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, handler, to_full_tensor
from ...errors import ShardingError
from ...layout import Layout
from ...tensor import ShardTensor, wrap
from .gather_rows import plan_advanced_index


def _embedding(weight: Operand, indices: Operand, padding_idx=-1, scale_grad_by_freq=False, sparse=False, *, fn):
    if weight.ndim != 2:
        raise RuntimeError("'weight' must be 2-D")
    if indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"embedding: indices must be int or long tensors, not {indices.dtype}")

    def whole(weight: Tensor, indices: list[Tensor]) -> Tensor:
        if not weight.shape[1]:  # on a device, torch's gradient of a table without columns is written past its end
            return weight[indices[0].long()]
        return fn(weight, indices[0], padding_idx, False, sparse)

    plan = plan_advanced_index(weight, [indices], [0], 0, whole, negative=False)
    where = plan.indices[0]
    cut = plan.source.is_sharded(0)
    if sparse and not (plan.source.is_replicated and plan.result.is_replicated):
        raise ShardingError("sparse gradients cannot be summed over ranks: use sparse=False")

    def local(weight, indices):
        rows = plan.local(weight, [indices])
        if padding_idx >= 0 and cut:  # the rows of the padding get no gradient
            rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
        if scale_grad_by_freq:
            count = _row_counts(indices, weight.device, where, plan.source.shape[0])[indices.to(torch.int64)]
            rows = rows.detach() + (rows - rows.detach()) / count.unsqueeze(
                -1
            )  # the value, exactly; its gradient, less
        return rows

    return Plan(local, plan.result, {"weight": plan.source, "indices": where})


def _row_counts(indices: Tensor, device: torch.device, where: Layout, size: int) -> Tensor:
    """How often each row is asked for, on all ranks together."""
    count = torch.bincount(indices.reshape(-1), minlength=size).to(device)
    for axis in where.nontrivial_axes(where.shard_axes):
        count = collectives.all_reduce(count, where.mesh.get_group(axis))
    return count


_run_embedding = make_handler(_embedding, partial=False, merged=True)
_embedding_body = without_override_check(F.embedding)


@handler("embedding")
def embedding(func, types, args, kwargs):
    """Rows of a table. The one in nn.functional has the arguments in another order, and ends in the other."""
    if func is F.embedding:
        return _embedding_body(*args, **kwargs)
    return _run_embedding(func, types, args, kwargs)


@composed("embedding_renorm_")
def embedding_renorm_(input, indices, max_norm, norm_type):
    """Rows that are asked for and longer than `max_norm` are made that long, in place."""
    if isinstance(indices, ShardTensor):
        indices = to_full_tensor(indices)
    if not isinstance(input, ShardTensor):
        return torch.embedding_renorm_(input, indices, max_norm, norm_type)
    asked = torch.zeros(input.shape[0], 1, dtype=torch.bool, device=input.device)
    asked[indices.reshape(-1)] = True
    length = torch.linalg.vector_norm(input, norm_type, dim=1, keepdim=True)
    return input.mul_(torch.where((length > max_norm) & asked, max_norm / (length + 1e-7), 1.0))


@composed("one_hot")
def one_hot(input, num_classes=-1):
    """A new last dim with a one at the place of each class. How many classes there are, all ranks agree on."""
    if input.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if not input.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    input = input._reduced_value()
    local, layout = input._local_tensor, input._layout
    extremes = torch.stack([local.max(), -local.min()]) if local.numel() else local.new_tensor([-1, 0])
    for axis in layout.nontrivial_axes(layout.shard_axes):
        extremes = collectives.all_reduce(extremes, layout.mesh.get_group(axis), "max")
    largest, least = extremes[0].item(), -extremes[1].item()
    if least < 0:
        raise RuntimeError("Class values must be non-negative.")
    classes = largest + 1 if num_classes == -1 else num_classes
    if num_classes != -1 and classes < 1:
        raise RuntimeError("num_classes should be positive")
    if largest >= classes:
        raise RuntimeError("Class values must be smaller than num_classes.")
    return wrap(F.one_hot(local, classes), layout.insert(layout.ndim, classes))
