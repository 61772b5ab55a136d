"""Tensors in the static memory of CUDA graphs: values are copied in before a launch, and out after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import foreach_copy_, unflatten_tensors

MAX_PACKED = 1 << 18  # elements of the largest tensor that shares a buffer with others


def copy_into(static: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors into static ones, in one launch; those that are there already are left out."""
    pairs = [(s, t) for s, t in zip(static, given, strict=True) if s.data_ptr() != t.data_ptr()]
    if pairs:
        with torch.no_grad():
            if len(pairs) == 1:
                pairs[0][0].copy_(pairs[0][1])
            else:
                foreach_copy_([s for s, _ in pairs], [t for _, t in pairs])


def copies(static: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of static tensors."""
    with torch.no_grad():
        if len(static) == 1:
            return [static[0].clone()]
        fresh = [torch.empty_like(t) for t in static]
        copy_into(fresh, static)
    return fresh


class Packed:
    """Static tensors in few buffers, one per dtype, so that copies of all of them take one launch per buffer.

    `pack` is called inside the capture. Large tensors keep a buffer of their own, since packing copies them; so do
    strided ones (of weights in channels_last, for example), since a view of a packed one would lose their strides.
    """

    def __init__(self, tensors: Sequence[Tensor | None]):
        by_dtype: dict[Any, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                small = tensor.is_contiguous() and 0 < tensor.numel() <= MAX_PACKED
                key = (tensor.dtype, tensor.device) if small else i
                by_dtype.setdefault(key, []).append(i)
        self._groups = list(by_dtype.values())
        self._count = len(tensors)
        self._parts = [
            [torch.empty(tensors[i].shape, device="meta") for i in group]  # type: ignore[union-attr]
            for group in self._groups
        ]

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the buffers that hold the tensors."""
        found: list[Any] = list(tensors)
        return [
            torch.cat([found[i].reshape(-1) for i in group]) if len(group) > 1 else found[group[0]]
            for group in self._groups
        ]

    def copies(self, buffers: Sequence[Tensor]) -> list[Tensor | None]:
        """Return copies of the tensors, in buffers of their own."""
        found: list[Tensor | None] = [None] * self._count
        for group, parts, buffer in zip(self._groups, self._parts, copies(buffers), strict=True):
            of_group = [buffer] if len(group) == 1 else unflatten_tensors(buffer, parts)
            for i, tensor in zip(group, of_group, strict=True):
                found[i] = tensor
        return found
