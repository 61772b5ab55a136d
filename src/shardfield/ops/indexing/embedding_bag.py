"""`F.embedding_bag`: the rows of a table, reduced bag by bag.

If every rank has complete bags and all rows of the table, it calls torch's function. Otherwise rows are looked up as by
`F.embedding` and then reduced.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import as_operand, composed, gather_fallback, mesh_of, to_full_tensor
from ...layout import DimSharding, Layout
from ...tensor import ShardTensor, wrap
from .._common.probe import meta_tensor
from .._common.together import empty_result_of
from .._common.value_checks import raise_if_any_rank
from ..elementwise.random import global_index


@composed(F.embedding_bag, exact=True)
def embedding_bag(
    input,
    weight,
    offsets=None,
    max_norm=None,
    norm_type=2.0,
    scale_grad_by_freq=False,
    mode="mean",
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=None,
):
    """Return the sum, mean or maximum of the rows of each bag; a bag without rows is zero."""
    call = (max_norm, norm_type, scale_grad_by_freq, mode, sparse)
    metas = [None if t is None else meta_tensor(t) for t in (offsets, per_sample_weights)]
    F.embedding_bag(
        meta_tensor(input), meta_tensor(weight), metas[0], None, *call[1:], metas[1], include_last_offset, padding_idx
    )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    if scale_grad_by_freq or sparse:
        # With scale_grad_by_freq, torch's CPU kernel divides by the count of another row than the one that gets the
        # gradient: only torch's call itself gives its result. A sparse gradient cannot be summed over ranks.
        named = {"per_sample_weights": per_sample_weights, "include_last_offset": include_last_offset}
        args = (input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse)
        return gather_fallback(F.embedding_bag, (), args, named | {"padding_idx": padding_idx})
    mesh = mesh_of((input, weight, offsets, per_sample_weights), None)
    indices, layout = as_operand(input, mesh)
    outside = (indices < 0) | (indices >= weight.shape[0])
    why = f"embedding_bag: an index is not in the {weight.shape[0]} rows of the table"
    raise_if_any_rank(outside, process_groups(layout, layout.shard_axes), RuntimeError, why)
    if input.ndim == 2 and max_norm is None:
        bags_are_local = not layout.is_sharded(1)
        if bags_are_local and not as_operand(weight, mesh)[1].is_sharded(0):
            return _run_bags(F.embedding_bag, (), (input, weight, mode, per_sample_weights, padding_idx), {})
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    kept = None if padding_idx is None else input != padding_idx
    if input.ndim == 2:
        return _reduce_dim(rows, kept, mode)
    return _reduce_runs(rows, kept, mode, input, _checked(offsets, input, include_last_offset))


def _bags(input: Operand, weight: Operand, mode, per_sample_weights, padding_idx, *, fn):
    """Plan the local call: bags as the input is sharded, columns as the table is."""
    bags, columns = input.layout.dims[0], weight.layout.dims[1]
    if set(input.layout.axes_of(0)) & set(weight.layout.axes_of(1)):
        columns = (DimSharding(weight.shape[1]),)
    indices = input.layout.with_dim(1, DimSharding(input.shape[1]))
    table = weight.layout.with_dims([(DimSharding(weight.shape[0]),), columns])
    result = Layout.make(indices.mesh, [bags, columns])
    shape = result.local_shape

    def local(input: Tensor, weight: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        if 0 in shape:
            others = [weight] if per_sample_weights is None else [weight, per_sample_weights]
            return empty_result_of(others, shape, weight.dtype, weight)
        named = {"per_sample_weights": per_sample_weights, "padding_idx": padding_idx}
        return fn(input, weight, mode=mode, **named)

    operands = {"input": indices, "weight": table}
    if per_sample_weights is not None:
        operands["per_sample_weights"] = indices
    return Plan(local=local, operands=operands, layout=result)


_run_bags = make_handler(_bags, partial=False, merged=False)


def _checked(offsets: Tensor, input: Tensor, include_last: bool) -> Tensor:
    """Return the first position of each bag, on every rank; raise torch's errors on all ranks."""
    begins = to_full_tensor(offsets) if isinstance(offsets, ShardTensor) else offsets
    if include_last:
        begins = begins[:-1]
    if begins.device.type == "cpu" and len(begins):
        if begins[0] != 0:
            raise RuntimeError("embedding_bag: offsets[0] has to be 0: the first bag starts at the first index")
        if begins[-1] > len(input):
            raise RuntimeError(f"embedding_bag: offsets[-1] is beyond the {len(input)} indices")
    return begins


def _reduce_dim(rows: Tensor, kept: Tensor | None, mode: str) -> Tensor:
    """Reduce the second of three dims over the rows that are kept."""
    if kept is not None:
        rows = rows.masked_fill(~kept.unsqueeze(-1), -torch.inf if mode == "max" else 0)
    if mode == "max":
        out = rows.max(1).values
        return out if kept is None else out.masked_fill(~kept.any(1, keepdim=True), 0)
    if mode == "sum":
        return rows.sum(1)
    count = rows.shape[1] if kept is None else kept.sum(1, keepdim=True).clamp_min(1)
    return rows.sum(1) / count


def _reduce_runs(rows: Tensor, kept: Tensor | None, mode: str, input: Tensor, begins: Tensor) -> Tensor:
    """Reduce runs of consecutive rows; run b starts at `begins[b]`."""
    if isinstance(input, ShardTensor):
        layout = input._reduced_value()._layout
        position = wrap(global_index(layout, input.device), layout)
    else:
        position = torch.arange(len(input), device=input.device)
    bag = torch.searchsorted(begins, position.to(begins.dtype), right=True) - 1
    zeros = torch.zeros(len(begins), rows.shape[1], dtype=rows.dtype, device=rows.device)
    counts = torch.zeros(len(begins), 1, dtype=rows.dtype, device=rows.device)
    present = torch.ones_like(position) if kept is None else kept
    counts = counts.index_add(0, bag, present.to(rows.dtype).unsqueeze(-1))
    if kept is not None:
        rows = rows.masked_fill(~kept.unsqueeze(-1), -torch.inf if mode == "max" else 0)
    if mode == "max":
        most = zeros.scatter_reduce(0, bag.unsqueeze(-1).expand_as(rows), rows, "amax", include_self=False)
        return most.masked_fill(counts == 0, 0)
    total = zeros.index_add(0, bag, rows)
    return total / counts.clamp_min(1) if mode == "mean" else total
