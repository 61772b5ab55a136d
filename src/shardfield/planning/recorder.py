"""A rank's step as a tape: the calls it computes, the messages it sends and waits for, and the memory it needs.

The library's own messages are told by their carrier, those of FSDP and DDP are seen where torch hands them to the
backend. Both hold on real ranks as in a simulated world, so that one can be checked against the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from .._compat import DispatchMode
from .._compat.fake import flops_of
from .._compat.world import group_argument
from ..comm import collectives, transport
from ..debug import explain
from .memory import Memory

PARAMETERS = "(parameters)"  # in place of a module, for what FSDP, DDP and the optimizer send
OUTSIDE_MODULES = "(loss)"  # and for what is sent outside of any module


class Work(NamedTuple):
    """A call that computes: floating point operations, bytes read and written, and the dtype it computes in."""

    flops: int
    bytes: int
    dtype: torch.dtype


class Send(NamedTuple):
    """A message leaves, or several at once. `to`: (global rank, bytes) of peers; of a collective, all of its ranks."""

    id: int
    kind: str
    bytes: int
    to: tuple[tuple[int, int], ...]
    overlapped: bool  # sent by FSDP or DDP, which work on while it is under way


class Wait(NamedTuple):
    """Nothing goes on before a message has come."""

    id: int


@dataclass
class Seen:
    """What a rank did inside `watch()`.

    `kinds` and `modules` map to [messages, bytes]; the library's messages are its own kinds, those of FSDP and DDP
    begin with "parameters:". `tape` has it all in the order it happened.
    """

    rank: int = 0
    kinds: dict[str, list[int]] = field(default_factory=dict)
    modules: dict[str, list[int]] = field(default_factory=dict)
    tape: list[Work | Send | Wait] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    gathers: list[str] = field(default_factory=list)

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
        """The most bytes that this rank's tensors had at one time."""
        return self.memory.peak

    def restart(self) -> None:
        """Forget what was sent and computed so far, not what is in memory: a step begins."""
        for kept in (self.kinds, self.modules, self.tape):
            kept.clear()  # type: ignore[attr-defined]
        self.memory.peak = self.memory.now

    def _count_messages(self, kind: str, module: str, messages: int, nbytes: int) -> None:
        for table, key in ((self.kinds, kind), (self.modules, module)):
            entry = table.setdefault(key, [0, 0])
            entry[0] += messages
            entry[1] += nbytes


class _RecordedHandle:
    """Handles of the library's messages: waiting for them goes on the tape."""

    def __init__(self, seen: Seen, number: int, handles: Sequence[Any]):
        self._seen, self._number, self._handles = seen, number, handles

    def wait(self) -> None:
        self._seen.tape.append(Wait(self._number))
        for handle in self._handles:
            handle.wait()


class _RecordingTransport:
    """A carrier that writes down what another one carries."""

    def __init__(self, through: Any, seen: Seen, mode: _RecorderMode):
        self._inner, self._seen, self._mode = through, seen, mode

    def _record(self, kind: str, nbytes: int, to: Any, how: str, *args: Any) -> list[_RecordedHandle]:
        seen = self._seen
        number = len(seen.tape)
        seen.tape.append(Send(number, kind, nbytes, tuple(to), False))
        self._mode.muted += 1
        try:
            handles = getattr(self._inner, how)(*args)
        finally:
            self._mode.muted -= 1
        return [_RecordedHandle(seen, number, handles or ())]

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[_RecordedHandle]:
        size = dist.get_world_size(group)
        nbytes = int(2 * (size - 1) / size * _nbytes(buffer))
        return self._record("all_reduce", nbytes, _group_peers(group), "all_reduce", buffer, op, group)

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        nbytes = (dist.get_world_size(group) - 1) * _nbytes(mine)
        self._record("all_gather", nbytes, _group_peers(group), "all_gather", out, mine, group)[0].wait()

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None:
        self._record("broadcast", _nbytes(buffer), _group_peers(group), "broadcast", buffer, source, group)[0].wait()

    def exchange(self, receives: Any, sends: Any, group: ProcessGroup) -> list[_RecordedHandle]:
        ranks = dist.get_process_group_ranks(group)
        # a link works both ways at once, so that what comes costs only where it is more than what goes
        moved: dict[int, list[int]] = {}
        for way, flats in enumerate((sends, receives)):
            for peer, flat in flats:
                moved.setdefault(ranks[peer], [0, 0])[way] += _nbytes(flat)
        to = [(rank, max(both)) for rank, both in moved.items()]
        told = self._record("exchange", sum(b for _, b in to), to, "exchange", receives, sends, group)
        return told if to else []

    def send_to_ranks(self, sends: Any) -> list[_RecordedHandle]:
        to = [(rank, _nbytes(flat)) for rank, flat in sends]
        return self._record("deliver", sum(b for _, b in to), to, "send_to_ranks", sends)

    def recv_from_rank(self, into: Tensor, source: int) -> None:
        self._record("deliver", _nbytes(into), [(source, _nbytes(into))], "recv_from_rank", into, source)[0].wait()


class _RecorderMode(DispatchMode):
    """Sees every call below autograd."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen, self.muted = seen, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its calls on local tensors come by here next
        out = func(*args, **(kwargs or {}))
        if any(t.device.type == "meta" for t in _tensors(out)):
            return out  # a rule asks torch for a shape
        self.seen.memory.track(out)
        if self.muted:
            return out
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(func, args)
        else:
            self._record_work(func, args, kwargs or {}, out)
        return out

    def _record_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        read, wrote = _tensors([args, list(kwargs.values())]), _tensors(out)
        same = not func._schema.is_mutable and all(any(o is i or _same_storage(o, i) for i in read) for o in wrote)
        if not wrote or same or "empty" in func._schema.name:  # nothing, a view, or memory
            return
        nbytes = sum(map(_nbytes, read)) + sum(_nbytes(o) for o in wrote if not any(o is i for i in read))
        self.seen.tape.append(Work(flops_of(func, args, kwargs, out), nbytes, wrote[0].dtype))

    def _record_collective(self, func: Any, args: Any) -> None:
        kind = _COLLECTIVES.get(func._schema.name.split("::")[1])
        if kind is None:  # wait_tensor, barrier
            return
        group = group_argument(args)
        size = group.size()
        if size == 1:
            return
        name, share = kind
        largest = max(sum(map(_nbytes, _tensors(a))) for a in args if isinstance(a, (Tensor, list, tuple)))
        if name == "all_gather":  # the functional form has the input alone
            largest = max(largest, size * min(sum(map(_nbytes, _tensors(a))) for a in args if _tensors(a)))
        nbytes = int(share * (size - 1) / size * largest)
        self.seen._count_messages(f"parameters: {name}", PARAMETERS, 1, nbytes)
        self.seen.tape.append(Send(len(self.seen.tape), name, nbytes, tuple(_group_peers(group)), True))


# torch's collectives: what they are, and the share of the larger tensor that a rank sends, but for 1/ranks of it
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
    """Watch all that this rank does inside, in a real world or a simulated one."""
    seen = Seen(dist.get_rank())
    mode = _RecorderMode(seen)
    before = transport.override
    with explain.explain() as told:
        meter = collectives.meter

        def count(kind: str, messages: int, nbytes: int) -> None:
            seen._count_messages(kind, _module_path(collectives.tag), messages, nbytes)
            if meter is not None:
                meter(kind, messages, nbytes)

        collectives.meter = count
        transport.override = cast(transport.Transport, _RecordingTransport(before or transport.DIRECT, seen, mode))
        seen.memory.start()
        try:
            with mode:
                yield seen
        finally:
            seen.memory.stop()
            collectives.meter, transport.override = meter, before
    seen.gathers = [row.op for row in told.gathers]


def _module_path(row: Any) -> str:
    """The module for which a message is sent, by its path in the model."""
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
