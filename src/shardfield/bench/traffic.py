"""What torch was seen to send, whoever asked it to: what DTensor's traffic is counted by, and ours is held against.

Calls are seen where torch's own CommDebugMode sees them. That one counts collectives; here messages between two ranks
and bytes are counted too, and no hooks are put on modules.
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

# What a rank sends for one call among n ranks, where the whole of the message has so many bytes: the bytes of the ring
# algorithms, which our meter counts too. By the op's name, below c10d and below functional collectives.
_BYTES: dict[str, Callable[[int, int], float]] = {
    "allreduce_": lambda size, n: 2 * (n - 1) / n * size,
    "all_reduce": lambda size, n: 2 * (n - 1) / n * size,
    "_allgather_base_": lambda size, n: (n - 1) / n * size,  # of what arrives
    "all_gather_into_tensor": lambda size, n: (n - 1) * size,
    "_reduce_scatter_base_": lambda size, n: (n - 1) * size,  # of what arrives
    "reduce_scatter_tensor": lambda size, n: (n - 1) / n * size,
    "alltoall_base_": lambda size, n: (n - 1) / n * size,
    "all_to_all_single": lambda size, n: (n - 1) / n * size,
    "broadcast_": lambda size, n: size,  # of the rank that has it
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
    """Watch what this rank sends to all others; `kinds` has messages and bytes by kind, as our meter does.

    A call whose bytes are not known here is an error, so that nothing is left out of a count.
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
                raise NotImplementedError(f"the bytes of {func} are not known: add it to {__name__}._BYTES")
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            size = sum(t.numel() * t.element_size() for t in given if isinstance(t, Tensor))
            row = self.kinds.setdefault(_KIND[name], [0, 0])
            row[0] += 1
            if name != "broadcast_" or args[2] == self.rank:
                row[1] += math.floor(_BYTES[name](size, self.ranks))
        if any(issubclass(t, DTensor) for t in types):  # it makes its calls first, and those are seen
            return NotImplemented
        return func(*args, **(kwargs or {}))


def checked_traffic(call: Callable[[], Any]) -> Traffic:
    """What shardfield sends in a call, by its own meter; an error where torch was seen to send something else.

    Call it once before: a device's first message between two ranks is preceded by one that is not the call's.
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
        raise AssertionError(f"shardfield counted {ours}, torch was seen to send {mode.kinds} (messages, bytes)")
    return sent


def comm_counts(mode: CommDebugMode) -> dict[str, int]:
    """The collectives that torch's own count has, by our names."""
    found: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        kind = _KIND[str(op).rpartition(".")[2]]
        found[kind] = found.get(kind, 0) + count
    return found
