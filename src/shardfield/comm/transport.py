"""Transports: how bytes get from rank to rank. Direct, staged through host memory, or none.

A transport works in place on contiguous tensors in dtypes that backends support (`collectives` converts both).
`transport_for` chooses one per group: the messages of a backend that cannot send between devices (gloo on CUDA tensors)
are staged through host memory. The name of a backend is not enough to decide: a backend that also serves the CPU is
staged, and any other is probed once per group.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import get_ident
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .. import runtime
from .._compat import in_backward, is_foreign_thread, zero_all
from .._compat.world import all_gather_flat, backend_class
from ..errors import ShardingError
from . import stalls

UNUSED_TAG = 7331  # no rank sends a message with this tag
_SUM = ReduceOp.SUM
PeerTensors = Sequence[tuple[int, Tensor]]  # (coord of a peer, contiguous tensor)


class Handle(Protocol):
    """A message in flight."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """The five kinds of messages. Receive buffers are valid after all handles were waited for."""

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[Handle]: ...

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None: ...

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None: ...

    def exchange(self, receives: PeerTensors, sends: PeerTensors, group: ProcessGroup) -> list[Handle]: ...

    def send_to_ranks(self, sends: PeerTensors) -> list[Handle]:
        """Send to global ranks that call `recv_from_rank`."""
        ...

    def recv_from_rank(self, into: Tensor, source: int) -> None: ...


class DirectTransport:
    """Call torch.distributed on the tensors directly. Errors of blocking calls name the rank that did not take part."""

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[Handle]:
        if torch.compiler.is_compiling():  # torch.compile traces no asynchronous collective
            dist.all_reduce(buffer, op, group=group)
            return []
        return [dist.all_reduce(buffer, op, group=group, async_op=True)]

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        try:
            all_gather_flat(out, mine, group=group)
        except RuntimeError as error:
            stalls.reraise(error, group)

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None:
        try:
            dist.broadcast(buffer, group_src=source, group=group)
        except RuntimeError as error:
            stalls.reraise(error, group)

    def exchange(self, receives: PeerTensors, sends: PeerTensors, group: ProcessGroup) -> list[Handle]:
        ops = [dist.P2POp(dist.irecv, flat, group=group, group_peer=peer) for peer, flat in receives]
        ops += [dist.P2POp(dist.isend, flat, group=group, group_peer=peer) for peer, flat in sends]
        return dist.batch_isend_irecv(ops) if ops else []

    def send_to_ranks(self, sends: PeerTensors) -> list[Handle]:
        works = [dist.isend(flat, dst=rank) for rank, flat in sends]
        return [work for work in works if work is not None]

    def recv_from_rank(self, into: Tensor, source: int) -> None:
        try:
            dist.recv(into, src=source)
        except RuntimeError as error:
            stalls.reraise(error, None)


class HostStagedTransport:
    """Stage messages through host memory: send copies of the tensors, and copy the received ones to the device."""

    def __init__(self, through: Transport):
        self._inner = through

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[Handle]:
        host = _copy_to_host(buffer)
        return [_StagedHandle(self._inner.all_reduce(host, op, group), [(buffer, host)])]

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        host = _empty_on_host(out)
        self._inner.all_gather(host, _copy_to_host(mine), group)
        out.copy_(host)

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None:
        host = _copy_to_host(buffer)
        self._inner.broadcast(host, source, group)
        buffer.copy_(host)

    def exchange(self, receives: PeerTensors, sends: PeerTensors, group: ProcessGroup) -> list[Handle]:
        received = [(peer, _empty_on_host(flat)) for peer, flat in receives]
        sent = [(peer, _copy_to_host(flat)) for peer, flat in sends]
        handles = self._inner.exchange(received, sent, group)
        pairs = [(flat, host) for (_, flat), (_, host) in zip(receives, received, strict=True)]
        return [_StagedHandle(handles, pairs, sent)]

    def send_to_ranks(self, sends: PeerTensors) -> list[Handle]:
        sent = [(rank, _copy_to_host(flat)) for rank, flat in sends]
        return [_StagedHandle(self._inner.send_to_ranks(sent), [], sent)]

    def recv_from_rank(self, into: Tensor, source: int) -> None:
        host = _empty_on_host(into)
        self._inner.recv_from_rank(host, source)
        into.copy_(host)


class _StagedHandle:
    """Copies received host tensors to the device on `wait()`; holds the send buffers until then."""

    def __init__(self, handles: Sequence[Handle], pairs: Sequence[tuple[Tensor, Tensor]], sent: Any = ()):
        self._handles, self._pairs, self._sent = handles, pairs, sent

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        for target, host in self._pairs:
            target.copy_(host)
        self._handles = self._pairs = self._sent = ()


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _empty_on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


class NullTransport:
    """Send nothing, as if every other rank held the data of this one. For counting messages, not for training.

    Tensors received from single peers are zeros.
    """

    def __init__(self) -> None:
        # Sizes of groups, by group and dtype, as tensors: a number as an operand takes torch twice as long.
        self._sizes: dict[tuple[ProcessGroup, torch.dtype], Tensor] = {}

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[Handle]:
        if op is _SUM or op == _SUM:
            key = group, buffer.dtype
            if buffer.__class__ is not Tensor:  # a traced program reads no memory
                buffer.mul_(group.size())
                return []
            if key not in self._sizes:
                self._sizes[key] = torch.tensor(group.size(), dtype=buffer.dtype, device="cpu")
            buffer.mul_(self._sizes[key])
        elif op == ReduceOp.PRODUCT:
            buffer.pow_(group.size())
        return []

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        out.view(-1, mine.numel()).copy_(mine)

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None:
        return

    def exchange(self, receives: PeerTensors, sends: PeerTensors, group: ProcessGroup) -> list[Handle]:
        if receives:
            zero_all([flat for _, flat in receives])
        return []

    def send_to_ranks(self, sends: PeerTensors) -> list[Handle]:
        return []

    def recv_from_rank(self, into: Tensor, source: int) -> None:
        into.zero_()


DIRECT = DirectTransport()
STAGED = HostStagedTransport(DIRECT)


def transport_for(tensor: Tensor, group: ProcessGroup) -> Transport:
    """Return the transport of the next message of a group. All ranks of the group call it: the first call may probe."""
    rt = runtime.active
    if not torch.compiler.is_dynamo_compiling() and get_ident() != rt.thread:
        if get_ident() != rt.engine_thread or not in_backward():
            _enter_thread(rt)
    rt.messages += 1
    if rt.before_collective is not None:
        rt.before_collective(group)
    if rt.transport_override is not None:
        return rt.transport_override
    kind = tensor.device.type
    if kind == "cpu":
        return DIRECT
    found = rt.transports.get((group, kind))
    if found is None:
        found = rt.transports[group, kind] = _probe_transport(tensor, group)
        rt.transports_by_backend[backend_class(group, tensor.device), kind] = found
    return found


def cached_transport(tensor: Tensor, group: ProcessGroup) -> Transport:
    """Return the transport of a group with the same backend class. It never probes, so some ranks may call it alone."""
    rt = runtime.active
    if get_ident() != rt.thread:
        _enter_thread(rt)
    if rt.before_collective is not None:
        raise ShardingError(
            "compile: one rank sends shards to the others, which cannot be traced: do this before the call"
        )
    if rt.transport_override is not None or tensor.device.type == "cpu":
        return rt.transport_override or DIRECT
    return rt.transports_by_backend.get((backend_class(group, tensor.device), tensor.device.type), DIRECT)


def _enter_thread(rt: runtime.Runtime) -> None:
    """Let the thread of the world communicate, and autograd's threads on its behalf; refuse every other thread.

    Two threads of a rank send in an order that differs from rank to rank, so that one's values would be summed with
    the other's. The first message of a world starts its StallMonitor.
    """
    current = threading.current_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident}  # None: it is starting
    owner = rt.world_thread if rt.world_thread in names else threading.main_thread().ident  # it may have ended
    if owner is not None and current.ident == owner:
        rt.thread = owner
        stalls.start_monitor(rt)
    elif not (in_backward() and is_foreign_thread(current)):
        raise ShardingError(
            f"the thread {current.name!r} communicates, and so may {names.get(owner or 0)!r}: messages of two "
            "threads would be mixed up, in an order that differs from rank to rank. Communicate from one thread: the "
            "main thread, or the one that calls DistributedManager.initialize()"
        )
    else:
        rt.engine_thread = get_ident()


def _backend_serves_cpu(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether one backend serves the device and the CPU: it then sends from host memory.

    Such a backend is not probed: gloo accepts a CUDA tensor, fails midway, and loses its connections.
    """
    if "cpu:" not in dist.get_backend_config(group):
        return False
    return backend_class(group, torch.device("cpu")) is backend_class(group, device)


def _probe_transport(tensor: Tensor, group: ProcessGroup) -> Transport:
    """Probe whether the backend sends between devices, by one message around the ring, and return the transport.

    NCCL needs a collective of all ranks as the first call of a group, so an all_reduce comes first.
    """
    if _backend_serves_cpu(group, tensor.device):
        return STAGED
    size, coord = group.size(), group.rank()
    one = torch.ones(1, device=tensor.device)
    try:
        for handle in DIRECT.all_reduce(one, ReduceOp.SUM, group):
            handle.wait()
        heard = torch.zeros_like(one)
        for handle in DIRECT.exchange([((coord - 1) % size, heard)], [((coord + 1) % size, one)], group):
            handle.wait()
        if heard.item() == size:
            return DIRECT
        reason = "received values differ from the sent ones"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
    if "cpu:" not in dist.get_backend_config(group):
        raise ShardingError(
            f"the backend of this process group cannot send {tensor.device.type} tensors from rank to rank ({reason}), "
            'and the group has no CPU backend to stage them: call init_process_group("cpu:gloo,cuda:...")'
        )
    return STAGED


def break_connection(group: ProcessGroup) -> None:
    """Break this rank's connection to a peer of a gloo group, so that peers blocked in a collective raise.

    gloo blocks on the host, and raises when a peer has closed its connection. A receive that times out closes it.
    """
    with suppress(RuntimeError):
        peer = (group.rank() + 1) % group.size()
        receive = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=UNUSED_TAG)
        if receive is not None:
            receive.wait(timedelta(milliseconds=1))
