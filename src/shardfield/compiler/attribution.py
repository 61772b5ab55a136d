"""For which calls a program sends its messages: `explain()` of a compiled step names them.

While a program is traced a Report listens, as it would if the calls were run. A message is written down with the number
of the call that it is for; messages that are merged keep the numbers of all. When the program runs inside `explain()`,
the calls it was traced from are listed again, and what it sends is told to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..comm import collectives
from ..debug import explain
from ..debug.explain import Report, Row
from ..errors import ShardingError
from . import rendezvous

# Called with a message's calls before it is sent; None while nobody listens.
on_send: Callable[[Sequence[int]], None] | None = None


class TracedCalls:
    """The calls that a program was traced from."""

    def __init__(self, target: Any):
        root = getattr(target, "__self__", None)
        self._root = root if isinstance(root, nn.Module) else None
        self._report = Report()
        self._sending: list[Row] = []
        self.groups: list[ProcessGroup] = []  # whose ranks run it together

    # ------------------------------------------------------------------ tracing

    def reset(self) -> None:
        """Another trace begins."""
        self._report.rows.clear()
        self._sending.clear()
        self._report._path = [] if self._root is None else [(self._root, "")]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, calls are noted, and nobody else listens."""
        before = explain.active, collectives.meter, collectives.tag
        explain.active, collectives.meter, collectives.tag = (
            self._report,
            None,
            None,
        )  # what is counted is what the program sends
        hooks = [
            register_module_forward_pre_hook(self._report.enter_module),
            register_module_forward_hook(self._report.leave_module, always_call=True),
        ]
        try:
            yield
        finally:
            explain.active, collectives.meter, collectives.tag = before
            for hook in hooks:
                hook.remove()

    def current_ids(self) -> list[int]:
        """The number of the call for which a message is written down; nothing outside any call."""
        row = collectives.tag
        if row is None:
            return []
        for number, known in enumerate(self._sending):
            if known is row:
                return [number]
        self._sending.append(row)
        return [len(self._sending) - 1]

    # ------------------------------------------------------------------ running

    def instrument(self, compiled: Callable, *, backward: bool = False, has_backward: bool = False) -> Callable:
        """A compiled graph that tells who listens what it sends. keep: its backward will be run."""

        def run(args: Any) -> Any:
            listener = explain.active_report()
            try:
                if listener is None or listener._row is not None:  # inside another call, messages are that one's
                    return compiled(args)
                with self._attributing(listener, backward, has_backward):
                    return compiled(args)
            except RuntimeError as error:  # a message that failed, maybe for a rank that left to trace alone
                if not (said := rendezvous.failure_reason(self.groups)):
                    raise
                raise ShardingError(said) from error

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextmanager
    def _attributing(self, listener: Report, backward: bool, keep: bool) -> Iterator[None]:
        global on_send
        rows = listener.backward_rows(self) if backward else self._replay_rows(listener)
        if keep:
            listener.keep_for_backward(self, rows)
        shared: dict[tuple[int, ...], Row] = {}

        def tell(calls: Sequence[int]) -> None:
            if len(calls) < 2 or not rows:
                collectives.tag = rows[calls[0]] if calls and rows else None
            elif (found := shared.get(tuple(calls))) is not None:
                collectives.tag = found
            else:
                collectives.tag = shared[tuple(calls)] = listener.add_shared_row([rows[i] for i in calls])
            if not backward:
                listener._row = collectives.tag

        before, on_send = on_send, tell
        try:
            yield
        finally:
            on_send, collectives.tag, listener._row = before, None, None

    def _replay_rows(self, listener: Report) -> list[Row]:
        """The calls, once more, in a report; those that send by their numbers."""
        where = listener.path()
        again = {id(row): listener.compiled(row, where) for row in self._report.rows}
        return [again.get(id(row)) or listener.compiled(row, where) for row in self._sending]
