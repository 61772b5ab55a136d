"""Count the work of a rank, to see whether ranks share it: balance and redundancy.

The work of matrix products, convolutions and attention is their FLOPs, as `torch.utils.flop_counter` counts them, of a
Fourier transform 5 n log2(n) for each line of n numbers, and of every other op one for each element of its largest
tensor; new tensors count their own elements. Of a sparse matrix only entries count. Views, uninitialized tensors and
messages do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .. import runtime
from .._compat import DispatchMode
from ..dispatch.arguments import map_tensors

aten = torch.ops.aten
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def _fft_work(input: Tensor, dims: Any, *rest: Any, out: Tensor) -> int:
    larger = input if input.numel() >= out.numel() else out
    return int(5 * larger.numel() * math.log2(max(math.prod(larger.shape[d] for d in dims), 2)))


def _attention_work(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out: Any, **named: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_work(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _elements(value: Tensor) -> int:
    return 0 if value.is_meta else value._nnz() if value.layout in SPARSE else value.numel()


def _sparse_work(tensors: list[Tensor], multiplies: bool) -> int:
    """Return one for each entry, two for each entry and column of a product with dense columns."""
    entries = max(_elements(t) for t in tensors if t.layout in SPARSE)
    columns = [t.shape[-1] for t in tensors if t.layout is torch.strided and t.ndim == 2]
    return 2 * entries * max(columns, default=1) if multiplies else entries


def _own_counts() -> dict[Any, Callable[..., int]]:
    """Return the counts of operators that torch's counter does not have."""
    return {
        **dict.fromkeys((aten._fft_c2c, aten._fft_r2c, aten._fft_c2r), _fft_work),
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_work,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_work,
    }


class WorkCounter(DispatchMode):
    """Count the work of all local operators inside, forward and backward, in `total`.

    with WorkCounter() as work:
        model(x).sum().backward()
    print(work.total)
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._own = _own_counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += self._work_of(func, args, kwargs or {}, out)
        return out

    def _work_of(self, func: Any, args: Any, kwargs: dict, out: Any) -> int:
        packet = getattr(func, "_overloadpacket", None)
        name = func._schema.name
        if packet is None or func.namespace == "c10d" or func.is_view or "empty" in name or name.endswith("_choice"):
            return 0  # `_fused_sdp_choice` names a kernel
        virtual = runtime.active.virtual
        if virtual is not None and virtual.copying:  # a message between virtual ranks
            return 0
        tensors: list[Tensor] = []
        reads = () if name.startswith("aten::new_") else (args, kwargs)
        map_tensors((reads, out), tensors.append)
        sizes = [_elements(t) for t in tensors]
        if not any(sizes):  # a rule that probes torch for a shape
            return 0
        if any(t.layout in SPARSE for t in tensors):
            return _sparse_work(tensors, packet in flop_registry)
        if packet in self._own:
            return self._own[packet](*args, **kwargs, out=out)
        return flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else max(sizes)
