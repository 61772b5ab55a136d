"""Annotate a profile: modules, calls on ShardTensors, messages and waits, each with the module and op it belongs to.

Annotations go through `torch.profiler.record_function`, so they have the clock of the profiler and nest with its
operators. Their names are numbers; `Spans.table` has what each of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from .. import runtime
from .._compat.world import observed_waits
from ..comm import transport
from ..debug.explain import Report, observe
from ..dispatch.torch_aliases import function_name

PREFIX = "shardfield#"  # names of annotations: this and their number
LOSS = "(loss)"  # module name of calls outside the model
Owner = tuple[str, str]  # module, op; empty if the trace has to say


class Spans:
    """The annotations of one rank. `table[n]` describes the one with number n."""

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        self.messages = 0
        self.waiting = False  # inside a wait that has a span

    def open(self, kind: str, **facts: Any) -> record_function:
        """Return a context whose body is one span."""
        number = len(self.table)
        self.table.append({"kind": kind, **facts})
        return record_function(f"{PREFIX}{number}")

    @contextmanager
    def wait(
        self, kind: str, message: int | None = None, owner: Owner = ("", ""), nbytes: int = 0, blocking: bool = False
    ) -> Iterator[None]:
        """Make the body a wait for a message. `blocking`: the body sends it too."""
        facts = {"message": message, "module": owner[0], "op": owner[1], "bytes": nbytes, "blocking": blocking}
        self.waiting = True
        try:
            with self.open("wait", of=kind, **facts):
                yield
        finally:
            self.waiting = False

    def foreign_wait(self) -> Any:
        """Return the context of a wait for a message that this library did not send: of FSDP, DDP, or the program."""
        return nullcontext() if self.waiting else self.wait("parameters")


class SpanReport(Report):
    """A report whose modules and calls are spans too. `model` gives modules their names."""

    def __init__(self, spans: Spans, model: nn.Module):
        super().__init__()
        self.spans = spans
        self._names = {module: name.removeprefix("module.") for name, module in model.named_modules()}
        self._open: list[Any] = []

    def run_call(self, func: Any, found: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        if self._row is not None:
            return found(func, types, args, kwargs)
        with self.spans.open("call", module=self.path() or LOSS, op=function_name(func)):
            return super().run_call(func, found, types, args, kwargs)

    def enter_module(self, module: nn.Module, args: Any) -> None:
        self._path.append((module, self._names.get(module, type(module).__name__)))
        span = self.spans.open("module", module=self.path())
        span.__enter__()
        self._open.append(span)

    def leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._path and self._path[-1][0] is module:
            self._path.pop()
            self._open.pop().__exit__(None, None, None)

    def path(self) -> str:
        """Return the name of the innermost module whose forward is running."""
        return (self._path[-1][1] or "(model)") if self._path else ""


class _NamedHandle:
    """The handles of a message, whose wait is a span of the call that sent it."""

    def __init__(self, spans: Spans, facts: tuple[str, int, Owner, int], handles: Sequence[Any]):
        self._spans, self._facts, self._handles = spans, facts, handles

    def wait(self) -> None:
        with self._spans.wait(*self._facts):
            for handle in self._handles:
                handle.wait()


class NamedTransport:
    """Wrap the transports of this rank: each message is a span of the call that sends it."""

    def __init__(self, spans: Spans):
        self._spans = spans

    def _inner(self, tensor: Tensor | None, group: ProcessGroup | None) -> Any:
        """Return the transport that a message has without the profiler; steps before it have chosen one."""
        kind = "cpu" if tensor is None else tensor.device.type
        return runtime.active.transports.get((group, kind), transport.DIRECT) if kind != "cpu" else transport.DIRECT

    def _start(self, kind: str, nbytes: int, send: Callable[[], Any]) -> list[_NamedHandle]:
        row, spans = runtime.active.tag, self._spans
        owner = ("", "") if row is None else (row.module or LOSS, row.op)
        number, spans.messages = spans.messages, spans.messages + 1
        with spans.open("send", of=kind, message=number, module=owner[0], op=owner[1], bytes=nbytes):
            handles = send()
        return [_NamedHandle(spans, (kind, number, owner, nbytes), handles or ())]

    def _block(self, kind: str, nbytes: int, send: Callable[[], Any]) -> None:
        row = runtime.active.tag
        owner = ("", "") if row is None else (row.module or LOSS, row.op)
        number, self._spans.messages = self._spans.messages, self._spans.messages + 1
        with self._spans.wait(kind, number, owner, nbytes, blocking=True):
            send()

    def all_reduce(self, buffer: Tensor, op: Any, group: ProcessGroup) -> list[_NamedHandle]:
        size, inner = group.size(), self._inner(buffer, group)
        nbytes = int(2 * (size - 1) / size * _nbytes(buffer))
        return self._start("all_reduce", nbytes, lambda: inner.all_reduce(buffer, op, group))

    def all_gather(self, out: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        inner = self._inner(out, group)
        self._block("all_gather", (group.size() - 1) * _nbytes(mine), lambda: inner.all_gather(out, mine, group))

    def broadcast(self, buffer: Tensor, source: int, group: ProcessGroup) -> None:
        inner = self._inner(buffer, group)
        self._block("broadcast", _nbytes(buffer), lambda: inner.broadcast(buffer, source, group))

    def exchange(self, receives: Any, sends: Any, group: ProcessGroup) -> list[_NamedHandle]:
        if not receives and not sends:
            return []
        inner = self._inner(next(iter([*sends, *receives]))[1], group)
        nbytes = sum(_nbytes(flat) for _, flat in sends)
        return self._start("exchange", nbytes, lambda: inner.exchange(receives, sends, group))

    def send_to_ranks(self, sends: Any) -> list[_NamedHandle]:
        inner = self._inner(sends[0][1] if sends else None, dist.group.WORLD)
        return self._start("deliver", sum(_nbytes(flat) for _, flat in sends), lambda: inner.send_to_ranks(sends))

    def recv_from_rank(self, into: Tensor, source: int) -> None:
        inner = self._inner(into, dist.group.WORLD)
        self._block("deliver", _nbytes(into), lambda: inner.recv_from_rank(into, source))


@contextmanager
def annotate(model: nn.Module) -> Iterator[SpanReport]:
    """Annotate modules, calls, messages and waits inside, of a model that runs on this rank."""
    spans = Spans()
    with observe(SpanReport(spans, model)) as report, observed_waits(spans.foreign_wait):
        with runtime.observing(transport_override=NamedTransport(spans)):
            yield report


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
