"""The process group and the store of virtual ranks, so that all of torch.distributed works between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from .. import runtime
from .._compat.virtual import PythonGroup, Work, name_of_group, ranks_of_group
from ..errors import WorldError
from .message_log import LoggedCall
from .messages import Exchange, Message, Part, PendingCollective
from .reduction import reduce


class Handle(Work):
    """A message in flight, as torch.distributed shows it: other ranks run while this one waits."""

    def __init__(self, exchange: Exchange, messages: Sequence[Message | PendingCollective], result: Any = None):
        super().__init__()
        self._exchange, self._messages, self._result = exchange, messages, result
        self._logged: list[tuple[LoggedCall, Sequence[Tensor]]] = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for message in self._messages:
            self._exchange.wait(message)
        for entry, tensors in self._logged:
            entry.store(tensors)
        self._logged = []
        return True

    def is_completed(self) -> bool:
        return all(message.done for message in self._messages)

    def is_success(self) -> bool:
        return self.is_completed() and not any(message.error for message in self._messages)

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future that is complete: torch waits for one in C++, where no other rank could run."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


class VirtualGroup(PythonGroup):
    """A process group of virtual ranks. Starting a message never blocks; waiting for one lets other ranks run."""

    def __init__(self, exchange: Exchange, coord: int, size: int):
        super().__init__(coord, size)
        self._exchange, self._coord, self._size = exchange, coord, size
        self._name: str | None = None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._coord

    def getBackendName(self) -> str:
        return "threaded"

    def _set_group_name(self, name: str) -> None:
        """Store the name that torch gives: destroying a group asks for it after torch's table has dropped it."""
        self._name = name
        super()._set_group_name(name)  # type: ignore[misc]

    @property
    def _key(self) -> str:
        return self._name or name_of_group(self)

    @property
    def _ranks(self) -> list[int]:
        return ranks_of_group(self)

    @property
    def pg_name(self) -> str:
        return self._key

    @property
    def group_name(self) -> str:
        return self._key

    def __repr__(self) -> str:
        return f"VirtualGroup(rank {self._coord} of {self._size})"

    def _collective(
        self,
        what: str,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        finish: Callable[[Sequence[Part]], None],
        result: Any = None,
    ) -> Handle:
        log = runtime.active.message_log
        if log is not None and log.replaying:
            log.receive((self._key, what), receives)
            return Handle(self._exchange, [], result)
        key = self._key, self._exchange.next_number(self._key, self._coord)
        pending = self._exchange.take_part(key, self._ranks, self._coord, what, Part(sends, receives), finish)
        handle = Handle(self._exchange, [pending], result)
        if log is not None:
            handle._logged = [(log.record((self._key, what)), receives)]
        return handle

    def _joined(self, handles: Sequence[Handle], result: Any) -> Handle:
        joined = Handle(self._exchange, [m for handle in handles for m in handle._messages], result)
        joined._logged = [entry for handle in handles for entry in handle._logged]
        return joined

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def finish(parts: Sequence[Part]) -> None:
            for i in range(len(tensors)):
                total = reduce([part.sends[i].reshape(-1) for part in parts], op)
                for part in parts:
                    part.receive(i, total)

        # As on other backends, ranks need as many elements, whatever their shapes.
        what = f"all_reduce of {_shapes([t.reshape(-1) for t in tensors])}"
        return self._collective(what, tensors, tensors, finish, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Handle:
        def finish(parts: Sequence[Part]) -> None:
            for i in range(len(tensors)):
                parts[opts.rootRank].receive(i, reduce([p.sends[i].reshape(-1) for p in parts], opts.reduceOp))

        what = f"reduce of {_shapes(tensors)} to {opts.rootRank}"
        return self._collective(what, tensors, tensors, finish, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Handle:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def finish(parts: Sequence[Part]) -> None:
            for coord, part in enumerate(parts):
                if part.receives is not None:
                    part.receive(0, reduce([p.sends[coord].reshape(-1) for p in parts], op))

        return self._collective(f"reduce_scatter of {_shapes(inputs[0])}", inputs[0], outputs, finish, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Handle:
        return self.reduce_scatter([output], [list(input.view(-1).chunk(self._size))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        handles = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._joined(handles, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Handle:
        root = opts.rootRank

        def finish(parts: Sequence[Part]) -> None:
            for coord, part in enumerate(parts):
                for i, source in enumerate(parts[root].sends) if coord != root else ():
                    part.receive(i, source)

        sends = tensors if self._coord == root else []
        return self._collective(f"broadcast of {_shapes(tensors)} from {root}", sends, tensors, finish, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        def finish(parts: Sequence[Part]) -> None:
            for part in parts:
                for i, other in enumerate(parts):
                    part.receive(i, other.sends[0])

        return self._collective(f"all_gather of {_shapes(inputs)}", inputs[:1], outputs[0], finish, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Handle:
        return self.allgather([list(output.view(-1).chunk(self._size))], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        handles = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._joined(handles, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        handles = [self.allgather([[o[i] for o in outputs]], [t]) for i, t in enumerate(inputs)]
        return self._joined(handles, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Handle:
        def finish(parts: Sequence[Part]) -> None:
            for i, part in enumerate(parts):
                parts[opts.rootRank].receive(i, part.sends[0])

        what = f"gather of {_shapes(inputs)} to {opts.rootRank}"
        return self._collective(what, inputs[:1], outputs[0] if outputs else [], finish, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Handle:
        def finish(parts: Sequence[Part]) -> None:
            for part, source in zip(parts, parts[opts.rootRank].sends, strict=True):
                part.receive(0, source)

        what = f"scatter of {_shapes(outputs)} from {opts.rootRank}"
        return self._collective(what, inputs[0] if inputs else [], outputs[:1], finish, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        def finish(parts: Sequence[Part]) -> None:
            for coord, part in enumerate(parts):
                for i, other in enumerate(parts):
                    part.receive(i, other.sends[coord])

        return self._collective("all_to_all", inputs, outputs, finish, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Handle:
        def parts(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            return list(tensor.split(sizes) if sizes else tensor.chunk(self._size))

        return self.alltoall(parts(output, output_sizes), parts(input, input_sizes), opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Handle:
        log = runtime.active.message_log
        if log is not None and log.replaying:
            return Handle(self._exchange, [], tensors)
        at = self._key, self._coord, target, tag
        sent = [self._exchange.send(at, t, self._ranks[target]) for t in tensors]
        return Handle(self._exchange, sent, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Handle:
        log, key = runtime.active.message_log, (self._key, source, self._coord, tag)
        call = (*key, *(t.shape for t in tensors))
        if log is not None and log.replaying:
            log.receive(call, tensors)
            return Handle(self._exchange, [], tensors)
        handle = Handle(self._exchange, [self._exchange.receive(key, t) for t in tensors], tensors)
        if log is not None:
            handle._logged = [(log.record(call), tensors)]
        return handle

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Handle:
        raise WorldError("virtual ranks receive from a rank that is named: recv() without a source is not supported")

    def barrier(self, opts: Any = None) -> Handle:
        return self._collective("barrier", [], [], lambda parts: None)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


class VirtualStore(dist.Store):
    """The key-value store of virtual ranks: `get` and `wait` let other ranks run until a key is set.

    `shared` is the store of several processes with virtual ranks; without one the values are in a dict.
    """

    def __init__(self, exchange: Exchange, values: dict[str, bytes], shared: dist.Store | None = None):
        super().__init__()
        self._exchange, self._values, self._shared = exchange, values, shared

    def set(self, key: str, value: Any) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        if self._shared is not None:
            self._shared.set(key, value)
        else:
            self._values[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key] if self._shared is None else self._shared.get(key)

    def add(self, key: str, value: int) -> int:
        if self._shared is not None:
            return self._shared.add(key, value)
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        if self._shared is not None:
            return self._shared.check(keys)
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
        if not self.check(keys):
            assert self._exchange.scheduler is not None
            self._exchange.scheduler.wait_until(lambda: self.check(keys))

    def delete_key(self, key: str) -> bool:
        if self._shared is not None:
            return self._shared.delete_key(key)
        return self._values.pop(key, None) is not None
