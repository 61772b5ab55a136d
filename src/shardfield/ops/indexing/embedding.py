"""Embedding tables and one-hot codes.

Rows of a table are gathered as in advanced indexing. A replicated table and sharded indices need no communication in
forward. A table sharded along its rows gives a Partial result (every rank looks up the rows it holds); if the indices
are sharded too, rows are requested from their owners. The adjoint adds the gradient rows to the table.
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

    def lookup(weight: Tensor, indices: list[Tensor]) -> Tensor:
        # On GPUs, torch writes the gradient of a table without columns out of bounds. Its second derivative raises if
        # there are no indices, which a rank may lack alone.
        if not weight.shape[1] or not indices[0].numel():
            return weight[indices[0].long()]
        return fn(weight, indices[0], padding_idx, False, sparse)

    plan = plan_advanced_index(weight, [indices], [0], 0, lookup, negative=False)
    index_layout = plan.indices[0]
    rows_sharded = plan.source.is_sharded(0)
    if sparse and not (plan.source.is_replicated and plan.result.is_replicated):
        raise ShardingError("sparse gradients cannot be summed over ranks: use sparse=False")

    def local(weight, indices):
        rows = plan.local(weight, [indices])
        if padding_idx >= 0 and rows_sharded:  # padding rows get no gradient
            rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
        if scale_grad_by_freq:
            count = _row_counts(indices, weight.device, index_layout, plan.source.shape[0])[indices.to(torch.int64)]
            # keeps the value exactly and divides its gradient
            rows = rows.detach() + (rows - rows.detach()) / count.unsqueeze(-1)
        return rows

    return Plan(local, plan.result, {"weight": plan.source, "indices": index_layout})


def _row_counts(indices: Tensor, device: torch.device, layout: Layout, size: int) -> Tensor:
    """Return how often each row is looked up, summed over all ranks."""
    count = torch.bincount(indices.reshape(-1), minlength=size).to(device)
    for axis in layout.nontrivial_axes(layout.shard_axes):
        count = collectives.all_reduce(count, layout.mesh.get_group(axis))
    return count


_run_embedding = make_handler(_embedding, partial=False, merged=True)
_embedding_body = without_override_check(F.embedding)


@handler("embedding")
def embedding(func, types, args, kwargs):
    """Return rows of a table. F.embedding has another argument order; its body calls torch.embedding."""
    if func is F.embedding:
        return _embedding_body(*args, **kwargs)
    return _run_embedding(func, types, args, kwargs)


@composed("embedding_renorm_")
def embedding_renorm_(input, indices, max_norm, norm_type):
    """Scale rows that are looked up and longer than `max_norm` to that norm, in place."""
    if isinstance(indices, ShardTensor):
        indices = to_full_tensor(indices)
    if not isinstance(input, ShardTensor):
        return torch.embedding_renorm_(input, indices, max_norm, norm_type)
    looked_up = torch.zeros(input.shape[0], 1, dtype=torch.bool, device=input.device)
    looked_up[indices.reshape(-1)] = True
    norm = torch.linalg.vector_norm(input, norm_type, dim=1, keepdim=True)
    return input.mul_(torch.where((norm > max_norm) & looked_up, max_norm / (norm + 1e-7), 1.0))


@composed("one_hot")
def one_hot(input, num_classes=-1):
    """Append a dim with a one at each class. All ranks agree on the number of classes by an all_reduce."""
    if input.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if not input.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    input = input._reduced_value()
    local, layout = input._local_tensor, input._layout
    extremes = torch.stack([local.max(), -local.min()]) if local.numel() else local.new_tensor([-1, 0])
    for axis in layout.nontrivial_axes(layout.shard_axes):
        extremes = collectives.all_reduce(extremes, layout.mesh.get_group(axis), "max")
    largest, smallest = extremes[0].item(), -extremes[1].item()
    if smallest < 0:
        raise RuntimeError("Class values must be non-negative.")
    classes = largest + 1 if num_classes == -1 else num_classes
    if num_classes != -1 and classes < 1:
        raise RuntimeError("num_classes should be positive")
    if largest >= classes:
        raise RuntimeError("Class values must be smaller than num_classes.")
    return wrap(F.one_hot(local, classes), layout.insert(layout.ndim, classes))
