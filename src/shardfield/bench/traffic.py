"""Count the traffic that torch's dispatcher sees: the count of DTensor, and a check of shardfield's own count.

It intercepts the same calls as torch's CommDebugMode. That one counts collectives; this one also counts point-to-point
messages and bytes, and installs no hooks on modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from .._compat import DispatchMode
from .measure import Traffic, count_traffic

# Op of c10d or of the functional collectives -> bytes that a rank sends, from the bytes of its first argument and the
# number of ranks n. Ring algorithms are assumed, as in shardfield's own count.
_BYTES: dict[str, Callable[[int, int], float]] = {
    "allreduce_": lambda size, n: 2 * (n - 1) / n * size,
    "all_reduce": lambda size, n: 2 * (n - 1) / n * size,
    "_allgather_base_": lambda size, n: (n - 1) / n * size,  # size of the output
    "all_gather_into_tensor": lambda size, n: (n - 1) * size,
    "_reduce_scatter_base_": lambda size, n: (n - 1) * size,  # size of the output
    "reduce_scatter_tensor": lambda size, n: (n - 1) / n * size,
    "alltoall_base_": lambda size, n: (n - 1) / n * size,
    "all_to_all_single": lambda size, n: (n - 1) / n * size,
    "broadcast_": lambda size, n: size,  # sent by the source rank
    "send": lambda size, n: size,
}
KINDS = {
    "all_reduce": ("allreduce_", "all_reduce"),
    "all_gather": ("_allgather_base_", "all_gather_into_tensor"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    "all_to_all": ("alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_",),
    "exchange": ("send",),
}
_KIND = {op: kind for kind, ops in KINDS.items() for op in ops}
_NO_TRAFFIC = {"recv_", "wait_tensor", "barrier", "monitored_barrier_"}


class CommCounter(DispatchMode):
    """Count what this rank sends; `kinds` maps a kind to [messages, bytes], as in `measure.Traffic`.

    A collective that is not in the table of bytes raises, so that no traffic is missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.kinds: dict[str, list[int]] = {}

    @property
    def bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.kinds.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = str(func).partition(".")
        name = name.partition(".")[0]
        if "c10d" in space and name not in _NO_TRAFFIC and not name.startswith("_wrap"):
            if name not in _BYTES:
                raise NotImplementedError(f"the bytes of {func} are unknown: add it to {__name__}._BYTES")
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
            row = self.kinds.setdefault(_KIND[name], [0, 0])
            row[0] += 1
            if name != "broadcast_" or args[2] == self.rank:
                row[1] += math.floor(_BYTES[name](size, self.ranks))
        if any(issubclass(t, DTensor) for t in types):  # DTensor calls ops on local tensors, which are counted
            return NotImplemented
        return func(*args, **(kwargs or {}))


def checked_traffic(call: Callable[[], Any]) -> Traffic:
    """Return shardfield's own count of the traffic of a call. Raise if torch's dispatcher saw something else.

    Run the call once before: NCCL sends an extra message before the first one between two ranks.
    """
    with count_traffic() as sent, CommCounter() as mode:
        call()
    ours: dict[str, list[int]] = {}
    for kind, (messages, nbytes) in sent.kinds.items():
        row = ours.setdefault("exchange" if kind == "deliver" else kind, [0, 0])
        row[0] += messages
        row[1] += nbytes
    ours = {kind: row for kind, row in ours.items() if any(row)}
    if ours != mode.kinds:
        raise AssertionError(f"shardfield counted {ours}, torch's dispatcher saw {mode.kinds} (messages, bytes)")
    return sent


def comm_counts(mode: CommDebugMode) -> dict[str, int]:
    """Return the counts of torch's CommDebugMode by the kinds of this module."""
    counts: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        kind = _KIND[str(op).rpartition(".")[2]]
        counts[kind] = counts.get(kind, 0) + count
    return counts
