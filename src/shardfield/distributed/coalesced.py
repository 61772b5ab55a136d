"""All-reduce many small tensors in one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .._compat.autocast import concatenate
from ..comm import collectives
from .vcollective_args import resolve_group

# Pairs and not a dict: torch.compile neither hashes nor compares a ReduceOp in torch 2.11. They are singletons.
_OP_NAMES = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "avg"),
    (ReduceOp.PRODUCT, "prod"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.BAND, "band"),
    (ReduceOp.BOR, "bor"),
)


class FusedWork:
    """A fused all-reduce in flight: until `wait()` returns, the result has this rank's local values."""

    def __init__(self, pending: collectives.Pending[Tensor] | None, tensors: Sequence[Tensor]):
        self._pending, self._tensors = pending, tensors

    def wait(self) -> bool:
        """Block until the result is filled in. A second call does nothing."""
        if self._pending is not None:
            parts = self._pending.wait().split([leaf.numel() for leaf in self._tensors])
            for leaf, part in zip(self._tensors, parts, strict=True):
                leaf.copy_(part.view(leaf.shape))
            self._pending, self._tensors = None, ()
        return True

    def is_completed(self) -> bool:
        """Return whether the result is filled in: `wait()` has returned, or there was no message."""
        return self._pending is None


def fused_all_reduce(
    tensors: Any,
    *,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """All-reduce a tensor, or a mapping or sequence of tensors (arbitrarily nested), with one message.

    The result has the same structure (dicts, lists, or a TensorDict for a TensorDict), shapes, dtypes and devices; it
    is detached and shares no memory with the input. The tensors are packed into one buffer, mappings in the order of
    their keys. Its dtype is the one that the tensors promote to, and fp32 for half precision. Integers are reduced as
    integers; a mix of integers and floats is refused unless `buffer_dtype` is set. `device` is the buffer's device, by
    default the first tensor's. With `async_op` it returns `(result, work)`, and `work.wait()` fills the result in. A
    single process gets its own values.

    >>> sums = fused_all_reduce({"loss": torch.tensor(3.0), "count": torch.tensor(2.0)})
    >>> float(sums["loss"] / sums["count"])
    1.5
    """
    name = next((text for known, text in _OP_NAMES if op is known or op == known), None)
    if name is None:
        raise ValueError(f"fused_all_reduce: op {op} is not one of {', '.join(str(o) for o, _ in _OP_NAMES)}")
    result = _clone_tensors(tensors)
    leaves = list(_tensor_leaves(result))
    group, size, _ = resolve_group(group)
    work = FusedWork(None, ())
    if leaves:
        dtype = buffer_dtype or _buffer_dtype(leaves)
        if group is not None and size > 1:
            where = torch.device(device) if device is not None else leaves[0].device
            buffer = concatenate([leaf.reshape(-1).to(where, dtype) for leaf in leaves])
            work = FusedWork(collectives.start_all_reduce(buffer, group, name), leaves)
    if async_op:
        return result, work
    work.wait()
    return result


def _clone_tensors(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.detach().clone()
    if isinstance(tensors, Mapping):
        if hasattr(tensors, "batch_size") and hasattr(tensors, "apply"):  # a TensorDict, which need not be installed
            return tensors.apply(_clone_tensors)
        return {key: _clone_tensors(value) for key, value in tensors.items()}
    if isinstance(tensors, Sequence) and not isinstance(tensors, (str, bytes)):
        return [_clone_tensors(value) for value in tensors]
    raise TypeError(f"fused_all_reduce: {type(tensors).__name__} is not a tensor, nor a mapping or sequence of tensors")


def _tensor_leaves(tensors: Any) -> Iterator[Tensor]:
    """Yield the tensors in an order that is the same on all ranks, independent of the insertion order of dicts."""
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, Mapping):
        for key in sorted(tensors.keys(), key=str):
            yield from _tensor_leaves(tensors[key])
    else:
        for value in tensors:
            yield from _tensor_leaves(value)


def _buffer_dtype(leaves: Sequence[Tensor]) -> torch.dtype:
    dtype = reduce(torch.promote_types, [leaf.dtype for leaf in leaves])
    if dtype.is_floating_point or dtype.is_complex:
        exact = [leaf.dtype for leaf in leaves if not (leaf.is_floating_point() or leaf.is_complex())]
        if exact:
            raise ValueError(
                f"fused_all_reduce: integers ({exact[0]}) together with {dtype} would be rounded; pass buffer_dtype= "
                "or reduce them separately"
            )
    return collectives.accumulate_dtype(dtype)
