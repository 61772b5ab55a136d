"""The process group and the store of virtual ranks, so that all of torch.distributed works between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from .._compat.virtual import Work, name_of_group
from ..errors import WorldError
from .messages import Exchange, Message, PendingCollective, reduce


class Handle(Work):
    """A message in flight, as torch.distributed shows it: other ranks run while this one waits."""

    def __init__(self, exchange: Exchange, messages: Sequence[Message | PendingCollective], result: Any = None):
        super().__init__()
        self._exchange, self._messages, self._result = exchange, messages, result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for message in self._messages:
            self._exchange.wait(message)
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


class VirtualGroup(dist.ProcessGroup):
    """A process group of virtual ranks. Starting a message never blocks; waiting for one lets other ranks run."""

    def __init__(self, exchange: Exchange, coord: int, size: int):
        super().__init__(coord, size)
        self._exchange, self._coord, self._size = exchange, coord, size
        self._number = 0  # of collectives

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._coord

    def getBackendName(self) -> str:
        return "threaded"

    @property
    def _key(self) -> str:
        return name_of_group(self)

    @property
    def pg_name(self) -> str:
        return self._key

    @property
    def group_name(self) -> str:
        return self._key

    def __repr__(self) -> str:
        return f"VirtualGroup(rank {self._coord} of {self._size})"

    def _collective(self, what: str, passed: Any, finish: Callable[[list[Any]], None], result: Any = None) -> Handle:
        number, self._number = self._number, self._number + 1
        pending = self._exchange.take_part(self._key, number, self._size, self._coord, what, passed, finish)
        return Handle(self._exchange, [pending], result)

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def finish(of_ranks: list[list[Tensor]]) -> None:
            for parts in zip(*of_ranks, strict=True):
                total = reduce([p.reshape(-1) for p in parts], op)
                for part in parts:
                    part.copy_(total.view(part.shape))

        return self._collective(f"all_reduce of {_shapes(tensors)}", tensors, finish, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Handle:
        def finish(of_ranks: list[list[Tensor]]) -> None:
            for parts in zip(*of_ranks, strict=True):
                target = parts[opts.rootRank]
                target.copy_(reduce([p.reshape(-1) for p in parts], opts.reduceOp).view(target.shape))

        return self._collective(f"reduce of {_shapes(tensors)} to {opts.rootRank}", tensors, finish, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Handle:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def finish(of_ranks: list[tuple[Tensor, list[Tensor]]]) -> None:
            for coord, (output, _) in enumerate(of_ranks):
                total = reduce([parts[coord].reshape(-1) for _, parts in of_ranks], op)
                output.copy_(total.view(output.shape))

        return self._collective(f"reduce_scatter of {_shapes(inputs[0])}", (outputs[0], inputs[0]), finish, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Handle:
        return self.reduce_scatter([output], [list(input.view(-1).chunk(self._size))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        handles = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return Handle(self._exchange, [m for handle in handles for m in handle._messages], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Handle:
        root = opts.rootRank

        def finish(of_ranks: list[list[Tensor]]) -> None:
            for coord, theirs in enumerate(of_ranks):
                if coord != root:
                    for target, source in zip(theirs, of_ranks[root], strict=True):
                        target.copy_(source.reshape(target.shape))

        return self._collective(f"broadcast of {_shapes(tensors)} from {root}", tensors, finish, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        def finish(of_ranks: list[tuple[list[Tensor], Tensor]]) -> None:
            for into, _ in of_ranks:
                for target, (_, source) in zip(into, of_ranks, strict=True):
                    target.copy_(source.reshape(target.shape))

        return self._collective(f"all_gather of {_shapes(inputs)}", (outputs[0], inputs[0]), finish, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Handle:
        return self.allgather([list(output.view(-1).chunk(self._size))], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        handles = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return Handle(self._exchange, [m for handle in handles for m in handle._messages], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        handles = [self.allgather([[o[i] for o in outputs]], [t]) for i, t in enumerate(inputs)]
        return Handle(self._exchange, [m for handle in handles for m in handle._messages], outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Handle:
        def finish(of_ranks: list[tuple[list[list[Tensor]], Tensor]]) -> None:
            for target, (_, source) in zip(of_ranks[opts.rootRank][0][0], of_ranks, strict=True):
                target.copy_(source)

        return self._collective(
            f"gather of {_shapes(inputs)} to {opts.rootRank}", (outputs, inputs[0]), finish, outputs
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Handle:
        def finish(of_ranks: list[tuple[Tensor, list[list[Tensor]]]]) -> None:
            for (target, _), source in zip(of_ranks, of_ranks[opts.rootRank][1][0], strict=True):
                target.copy_(source)

        return self._collective(
            f"scatter of {_shapes(outputs)} from {opts.rootRank}", (outputs[0], inputs), finish, outputs
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        def finish(of_ranks: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for coord, (into, _) in enumerate(of_ranks):
                for target, (_, sources) in zip(into, of_ranks, strict=True):
                    target.copy_(sources[coord].reshape(target.shape))

        return self._collective("all_to_all", (outputs, inputs), finish, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Handle:
        def parts(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            return list(tensor.split(sizes) if sizes else tensor.chunk(self._size))

        return self.alltoall(parts(output, output_sizes), parts(input, input_sizes), opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Handle:
        sent = [self._exchange.send(self._key, self._coord, target, tag, t) for t in tensors]
        return Handle(self._exchange, sent, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Handle:
        received = [self._exchange.receive(self._key, source, self._coord, tag, t) for t in tensors]
        return Handle(self._exchange, received, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Handle:
        raise WorldError("virtual ranks receive from a rank that is named: recv() without a source is not supported")

    def barrier(self, opts: Any = None) -> Handle:
        return self._collective("barrier", None, lambda of_ranks: None)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


class VirtualStore(dist.Store):
    """The key-value store of virtual ranks: `get` and `wait` let other ranks run until a key is set."""

    def __init__(self, exchange: Exchange, values: dict[str, bytes]):
        super().__init__()
        self._exchange, self._values = exchange, values

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
        if not self.check(keys):
            assert self._exchange.scheduler is not None
            self._exchange.scheduler.wait_until(lambda: self.check(keys))

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
