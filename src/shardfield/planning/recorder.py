"""Record a rank's step as a tape of computing calls, messages and waits, and track its memory.

Messages of this library are recorded by a wrapper around its transport. Messages of FSDP and DDP are recorded where
torch dispatches its c10d ops. Both work on real and on simulated ranks, so that tests can compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from .. import runtime
from .._compat import DispatchMode
from .._compat.fake import flops_of
from .._compat.world import group_argument
from ..comm import transport
from ..debug import explain
from .memory import Memory

PARAMETERS = "(parameters)"  # module name for the messages of FSDP, DDP and the optimizer
OUTSIDE_MODULES = "(loss)"  # module name for messages outside any module


class Work(NamedTuple):
    """A computing call: floating-point operations, bytes read and written, and dtype."""

    flops: int
    bytes: int
    dtype: torch.dtype


class Send(NamedTuple):
    """The start of one or several messages.

    `to` lists (global rank, bytes) of the peers; for a collective, all ranks of its group, with 0 bytes.
    """

    id: int
    kind: str
    bytes: int
    to: tuple[tuple[int, int], ...]
    overlapped: bool  # a message of FSDP or DDP, which compute while it is in flight


class Wait(NamedTuple):
    """The rank blocks until the message `id` has arrived."""

    id: int


@dataclass
class Seen:
    """The record of a rank inside `watch()`.

    `kinds` and `modules` map to [messages, bytes]. Kinds of FSDP and DDP begin with "parameters:", all others are
    collectives of this library. `tape` holds the events in order. `gathers` lists ops that fell back to a gather,
    `lost` those whose result lost a sharding.
    """

    rank: int = 0
    kinds: dict[str, list[int]] = field(default_factory=dict)
    modules: dict[str, list[int]] = field(default_factory=dict)
    tape: list[Work | Send | Wait] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    gathers: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def messages(self) -> int:
        return sum(m for m, _ in self.kinds.values())

    @property
    def bytes(self) -> int:
        return sum(b for _, b in self.kinds.values())

    @property
    def flops(self) -> int:
        return sum(e.flops for e in self.tape if isinstance(e, Work))

    @property
    def peak(self) -> int:
        """The peak memory of this rank's tensors in bytes."""
        return self.memory.peak

    def restart(self) -> None:
        """Clear messages and computation at the beginning of a step. Live memory still counts."""
        for record in (self.kinds, self.modules, self.tape):
            record.clear()  # type: ignore[attr-defined]
        self.memory.restart()

    def _count_messages(self, kind: str, module: str, messages: int, nbytes: int) -> None:
        for table, key in ((self.kinds, kind), (self.modules, module)):
            entry = table.setdefault(key, [0, 0])
            entry[0] += messages
            entry[1] += nbytes


class _RecordedHandle:
    """Wrap the handles of a message so that a wait is recorded on the tape."""

    def __init__(self, seen: Seen, number: int, handles: Sequence[Any]):
        self._seen, self._number, self._handles = seen, number, handles

    def wait(self) -> None:
        self._seen.tape.append(Wait(self._number))
        self._seen.memory.wait()
        for handle in self._handles:
            handle.wait()


class _RecordingTransport:
    """Wrap a transport and record its messages."""

    def __init__(self, inner: Any, seen: Seen, mode: _RecorderMode):
        self._inner, self._seen, self._mode = inner, seen, mode

    def _record(
        self, kind: str, nbytes: int, to: Any, method: str, *args: Any, into: Sequence[Tensor] = ()
    ) -> list[_RecordedHandle]:
        """Pass on a message. `into`: the tensors that receive, which a segment of virtual ranks logs."""
        log = runtime.active.message_log
        if log is not None and log.replaying:  # nothing is sent
            getattr(self._inner, method)(*args)
            return []
        if log is not None and into:
            log.record(kind).store(into)
        seen = self._seen
        number = len(seen.tape)
        seen.tape.append(Send(number, kind, nbytes, tuple(to), False))
        self._mode.muted += 1
        try:
            handles = getattr(self._inner, method)(*args)
        finally:
            self._mode.muted -= 1
        return [_RecordedHandle(seen, number, handles or ())]

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[_RecordedHandle]:
        size = dist.get_world_size(group)
        nbytes = int(2 * (size - 1) / size * _nbytes(buffer))
        return self._record("all_reduce", nbytes, _group_peers(group), "all_reduce", buffer, op, group, into=[buffer])

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        nbytes = (dist.get_world_size(group) - 1) * _nbytes(mine)
        _wait(self._record("all_gather", nbytes, _group_peers(group), "all_gather", out, mine, group, into=[out]))

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None:
        args = buffer, source, group
        _wait(self._record("broadcast", _nbytes(buffer), _group_peers(group), "broadcast", *args, into=[buffer]))

    def exchange(self, receives: Any, sends: Any, group: ProcessGroup) -> list[_RecordedHandle]:
        ranks = dist.get_process_group_ranks(group)
        # A link is full duplex: the larger of the two directions determines its time.
        by_peer: dict[int, list[int]] = {}
        for direction, flats in enumerate((sends, receives)):
            for peer, flat in flats:
                by_peer.setdefault(ranks[peer], [0, 0])[direction] += _nbytes(flat)
        to = [(rank, max(both)) for rank, both in by_peer.items()]
        into = [flat for _, flat in receives]
        handles = self._record("exchange", sum(b for _, b in to), to, "exchange", receives, sends, group, into=into)
        return handles if to else []

    def send_to_ranks(self, sends: Any) -> list[_RecordedHandle]:
        to = [(rank, _nbytes(flat)) for rank, flat in sends]
        return self._record("deliver", sum(b for _, b in to), to, "send_to_ranks", sends)

    def recv_from_rank(self, into: Tensor, source: int) -> None:
        to = [(source, _nbytes(into))]
        _wait(self._record("deliver", _nbytes(into), to, "recv_from_rank", into, source, into=[into]))


def _wait(handles: Sequence[_RecordedHandle]) -> None:
    for handle in handles:
        handle.wait()


class _RecorderMode(DispatchMode):
    """Record every call below autograd."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen, self.muted = seen, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls ops on local tensors, which are recorded
        out = func(*args, **(kwargs or {}))
        if any(t.device.type == "meta" for t in _tensors(out)):
            return out  # shape inference of a rule, no computation
        self.seen.memory.track(out)
        if self.muted:
            return out
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(func, args)
        else:
            self._record_work(func, args, kwargs or {}, out)
        return out

    def _record_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs, outputs = _tensors([args, list(kwargs.values())]), _tensors(out)
        is_view = not func._schema.is_mutable and all(
            any(o is i or _same_storage(o, i) for i in inputs) for o in outputs
        )
        if not outputs or is_view or "empty" in func._schema.name:  # no computation
            return
        nbytes = sum(map(_nbytes, inputs)) + sum(_nbytes(o) for o in outputs if not any(o is i for i in inputs))
        self.seen.tape.append(Work(flops_of(func, args, kwargs, out), nbytes, outputs[0].dtype))

    def _record_collective(self, func: Any, args: Any) -> None:
        kind = _COLLECTIVES.get(func._schema.name.split("::")[1])
        if kind is None:  # wait_tensor, barrier
            return
        group = group_argument(args)
        size = group.size()
        if size == 1:
            return
        name, factor = kind
        largest = max(sum(map(_nbytes, _tensors(a))) for a in args if isinstance(a, (Tensor, list, tuple)))
        if name == "all_gather":  # the functional form has no output argument
            largest = max(largest, size * min(sum(map(_nbytes, _tensors(a))) for a in args if _tensors(a)))
        nbytes = int(factor * (size - 1) / size * largest)
        self.seen._count_messages(f"parameters: {name}", PARAMETERS, 1, nbytes)
        self.seen.tape.append(Send(len(self.seen.tape), name, nbytes, tuple(_group_peers(group)), True))


# c10d op -> (kind, factor). A rank sends factor * (n - 1) / n of the bytes of the largest tensor, over n ranks.
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather_into_tensor_coalesced": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 2),
    "allreduce_coalesced_": ("all_reduce", 2),
    "all_reduce": ("all_reduce", 2),
    "all_reduce_": ("all_reduce", 2),
    "all_reduce_coalesced": ("all_reduce", 2),
    "broadcast_": ("broadcast", 1),
    "broadcast": ("broadcast", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
}


@contextmanager
def watch() -> Iterator[Seen]:
    """Record the computation, messages and memory of this rank inside the context, in a real or simulated world."""
    seen = Seen(dist.get_rank())
    mode = _RecorderMode(seen)
    with explain.explain() as report:
        meter = runtime.active.meter

        def count(kind: str, messages: int, nbytes: int) -> None:
            seen._count_messages(kind, _module_path(runtime.active.tag), messages, nbytes)
            if meter is not None:
                meter(kind, messages, nbytes)

        recording = _RecordingTransport(runtime.active.transport_override or transport.DIRECT, seen, mode)
        seen.memory.start()
        try:
            with runtime.observing(meter=count, transport_override=recording), mode:
                yield seen
        finally:
            seen.memory.stop()
    seen.gathers = [row.op for row in report.gathers]
    seen.lost = [row.op for row in report.lost]


def _module_path(row: Any) -> str:
    """Return the path of the module that a message belongs to."""
    if row is None or not row.module:
        return OUTSIDE_MODULES
    path = row.module.removeprefix("DistributedDataParallel/module").split("/")[1:]
    return "/".join(path) or "(model)"


def _group_peers(group: ProcessGroup) -> list[tuple[int, int]]:
    return [(rank, 0) for rank in dist.get_process_group_ranks(group)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage() is b.untyped_storage()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
