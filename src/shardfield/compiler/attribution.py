"""Attribute the collectives of a compiled program to the torch calls it was traced from, for `explain()`.

While a program is traced, a Report records the calls as it does for an eager run. Each collective in the graph carries
the number of the call that issued it; a merged collective carries the numbers of all its calls. When the program runs
inside `explain()`, the recorded calls are added to the user's report, and the bytes of each collective are counted for
its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import runtime
from ..debug import explain
from ..debug.explain import Report, Row
from ..errors import ShardingError
from . import rendezvous


class TracedCalls:
    """Record the calls that a program was traced from, and replay them into a report."""

    def __init__(self, target: Any):
        root = getattr(target, "__self__", None)
        self._root = root if isinstance(root, nn.Module) else None
        self._report = Report()
        self._sending: list[Row] = []
        self.groups: list[ProcessGroup] = []  # process groups of the program's meshes

    # ------------------------------------------------------------------ tracing

    def reset(self) -> None:
        """Drop the recorded calls, since another trace begins."""
        self._report.rows.clear()
        self._sending.clear()
        self._report._path = [] if self._root is None else [(self._root, "")]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls in the report of this object, with all other observers switched off."""
        hooks = [
            register_module_forward_pre_hook(runtime.of_this_rank(self._report.enter_module)),
            register_module_forward_hook(runtime.of_this_rank(self._report.leave_module), always_call=True),
        ]
        try:
            # messages are counted when the program runs, not while it is traced
            with runtime.observing(observer=self._report, meter=None, tag=None):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def current_ids(self) -> list[int]:
        """Return the number of the call that issues the current collective, as a list; empty outside any call."""
        row = runtime.active.tag
        if row is None:
            return []
        for number, sending in enumerate(self._sending):
            if sending is row:
                return [number]
        self._sending.append(row)
        return [len(self._sending) - 1]

    # ------------------------------------------------------------------ running

    def instrument(self, compiled: Callable, *, backward: bool = False, has_backward: bool = False) -> Callable:
        """Wrap a compiled graph so that an active report sees its collectives.

        `has_backward`: it is a forward graph whose backward graph will run later.
        """

        def run(args: Any) -> Any:
            listener = explain.active_report()
            try:
                if listener is None or listener._row is not None:  # inside another call, which gets the messages
                    return compiled(args)
                with self._attributing(listener, backward, has_backward):
                    return compiled(args)
            except RuntimeError as error:  # a collective failed, maybe because a rank left to trace alone
                if not (reason := rendezvous.failure_reason(self.groups)):
                    raise
                raise ShardingError(reason) from error

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextmanager
    def _attributing(self, listener: Report, backward: bool, keep: bool) -> Iterator[None]:
        rows = listener.backward_rows(self) if backward else self._replay_rows(listener)
        if keep:
            listener.keep_for_backward(self, rows)
        shared: dict[tuple[int, ...], Row] = {}

        def set_tag(calls: Sequence[int]) -> None:
            if len(calls) < 2 or not rows:
                runtime.active.tag = rows[calls[0]] if calls and rows else None
            elif (row := shared.get(tuple(calls))) is not None:
                runtime.active.tag = row
            else:
                runtime.active.tag = shared[tuple(calls)] = listener.add_shared_row([rows[i] for i in calls])
            if not backward:
                listener._row = runtime.active.tag

        try:
            with runtime.observing(on_send=set_tag):
                yield
        finally:
            runtime.active.tag, listener._row = None, None

    def _replay_rows(self, listener: Report) -> list[Row]:
        """Add the traced calls to a report. Return the rows of the calls that communicate, by call number."""
        path = listener.path()
        replayed = {id(row): listener.compiled(row, path) for row in self._report.rows}
        return [replayed.get(id(row)) or listener.compiled(row, path) for row in self._sending]
