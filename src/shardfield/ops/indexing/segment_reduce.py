"""`torch.segment_reduce` and torch_scatter's `segment_csr` along the first dim: rows of segments that ranks may share.

Each row is added to the row of its segment by `index_add`, or compared with it by `index_reduce`, so that the result is
sharded as theirs. Products, segments along other dims, and segments that leave rows out gather. The operators of
torch_scatter are found by name, so that it need not be installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import runtime, trace_state
from ...dispatch.registry import gather_fallback, handler, mesh_of, to_full_tensor
from ...layout import Layout
from ...tensor import ShardTensor, wrap

EXTREMES = {"max": ("amax", -torch.inf), "min": ("amin", torch.inf)}


@handler("segment_reduce")
def segment_reduce(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Reduce the rows of each segment."""
    given = dict(zip(("data", "reduce"), args, strict=False)) | kwargs
    data, lengths = given["data"], _lengths(given)
    if (
        lengths is None
        or given["reduce"] not in ("sum", "mean", *EXTREMES)
        or given.get("axis", 0) != 0
        or given.get("indices") is not None
        or not data.is_floating_point()
    ):
        return gather_fallback(func, types, args, kwargs)
    if data.__class__ is not ShardTensor:  # only the bounds are sharded
        data = wrap(data, Layout.replicate(mesh_of(tuple(given.values()), None), data.shape))
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return _reduce(data, given["reduce"], segment, lengths, given.get("initial"))


def _lengths(given: dict[str, Any]) -> Tensor | None:
    """Return the length of each segment; None if the segments do not have all rows, or their values are unknown."""
    bounds = given.get("lengths") if given.get("offsets") is None else given["offsets"]
    if bounds is None or bounds.ndim != 1 or not given["data"].ndim:
        return None
    if trace_state.values_unknown() and not trace_state.is_concrete(bounds):
        return None
    bounds = to_full_tensor(bounds) if isinstance(bounds, ShardTensor) else bounds
    if given.get("offsets") is not None:
        if not len(bounds) or bounds[0] != 0:
            return None
        bounds = bounds.diff()
    covers = bool((bounds >= 0).all()) and int(bounds.sum()) == given["data"].shape[0]
    return bounds if covers and len(bounds) else None


def _reduce(data: Tensor, reduce: str, segment: Tensor, lengths: Tensor, initial: float | None) -> Tensor:
    shape = (len(lengths), *data.shape[1:])
    if reduce in EXTREMES:
        name, start = EXTREMES[reduce]
        first = torch.full(shape, start if initial is None else initial, dtype=data.dtype, device=data.device)
        return first.index_reduce(0, segment, data, name)
    total = torch.full(shape, initial or 0.0, dtype=data.dtype, device=data.device).index_add(0, segment, data)
    if reduce == "sum":
        return total
    counts = lengths.to(data.dtype) if initial is None else lengths.clamp(min=1).to(data.dtype)
    return total / counts.view(-1, *[1] * (data.ndim - 1))


def segment_csr(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `segment_sum_csr(src, indptr, out=None)` of torch_scatter, or the mean, which is 0 in an empty segment."""
    src, indptr, out = (*args, None, None)[:3]
    given = {"data": src, "offsets": indptr}
    if kwargs or out is not None or not src.is_floating_point() or _lengths(given) is None:
        return gather_fallback(func, types, args, kwargs)
    reduce = "sum" if "segment_sum" in str(func) else "mean"
    return segment_reduce(torch.segment_reduce, types, (src, reduce), {"offsets": indptr, "initial": 0.0})


for _reduce_name in ("sum", "mean"):
    runtime.active.registry.register_named(f"torch_scatter.segment_{_reduce_name}_csr.default", segment_csr)
