"""`explain()` reports what each call did and sent; `strict()` refuses gathers and lost shardings.

Neither costs anything when off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import runtime
from ..dispatch.torch_aliases import function_name
from . import explain_html

R = TypeVar("R", bound="Report")


@contextmanager
def strict() -> Iterator[None]:
    """Raise a ShardingError on every rank where a call inside the context gathers its operands or loses a sharding.

    A call loses a sharding if a result at least as large as a rank's share of its sharded operands is Replicate over
    a mesh axis that they were sharded on. Such a call has run when the error is raised.
    """
    rt = runtime.active
    depths = {"strict_depth": rt.strict_depth + 1, "strict_sharding": rt.strict_sharding + 1}
    with runtime.observing(**depths, observer=rt.observer or Unreported):
        yield


class Unreported:
    """The observer while `strict()` is active without `explain()`: it examines calls and reports nothing."""

    _row = _outer = None

    @staticmethod
    def run_call(func: Any, found: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call."""
        return found(func, types, args, kwargs)


def active_report() -> Report | None:
    """Return the active report, or None."""
    found: Any = runtime.active.observer
    while found is not None and not isinstance(found, Report):
        found = found._outer
    return found


def record_outcome(kind: str, nested: bool = False, costs: dict[str, float] | None = None) -> None:
    """Record the outcome of the current call; a `nested` outcome does not replace a more specific one.

    `costs`: the estimates by which it was chosen, in bytes.
    """
    observer = runtime.active.observer
    row = None if observer is None else observer._row
    if row is not None and row.ending != "gather" and not (nested and row.ending != "rule"):
        row.ending, row.costs = kind, costs or {}


def record_lost(axes: dict[str, int]) -> bool:
    """Record the mesh axes over which the current call lost a sharding: name -> bytes that each rank has instead.

    Return False if the call gathered its operands: it is then recorded as a gather.
    """
    observer = runtime.active.observer
    row = None if observer is None else observer._row
    if row is not None:
        if row.ending == "gather":
            return False
        for axis, nbytes in axes.items():
            row.lost[axis] = max(row.lost.get(axis, 0), nbytes)
    return True


def record_unbalanced(axes: dict[str, float]) -> None:
    """Record axes over which the current call's result is unbalanced: name -> its largest shard in even shares."""
    observer = runtime.active.observer
    row = None if observer is None else observer._row
    if row is not None:
        row.unbalanced.update(axes)


class Row:
    """One call: its module, its outcome, the layouts, and the messages of this rank.

    `lost`: mesh axis -> bytes of results that lost their sharding over it, so that every rank has all of them.
    `unbalanced`: mesh axis -> the largest shard of a result over it, divided by an even share, if this is two or more
    and the operands are balanced. `costs`: strategy -> its estimated cost in bytes, where a rule chose among several.

    `messages` and `bytes` are forward, `back_messages` and `back_bytes` what its backward sent; `kinds` counts the
    collectives of both by name. `compiled`: the call is part of a compiled program, which sent its messages.
    """

    def __init__(self, module: str, op: str, inputs: list[Any]):
        self.module, self.op, self.inputs = module, op, inputs
        self.ending, self.output, self.compiled = "rule", None, False
        self.messages = self.bytes = self.back_messages = self.back_bytes = 0
        self.kinds: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self.unbalanced: dict[str, float] = {}
        self.costs: dict[str, float] = {}

    @property
    def outcome(self) -> str:
        """How the call ended, why it was planned in this way, and what it lost."""
        costs = ", ".join(f"{name} {cost / 1e3:,.{0 if cost >= 99_950 else 1}f}" for name, cost in self.costs.items())
        why = [f"cost in kB: {costs}"] if len(self.costs) > 1 else []
        lost = [f"lost sharding over axis {axis!r} ({nbytes} bytes)" for axis, nbytes in self.lost.items()]
        skewed = [
            f"unbalanced over axis {axis!r} ({n:.3g} even shares on one rank)" for axis, n in self.unbalanced.items()
        ]
        return ", ".join([self.ending, *why, *lost, *skewed, *["compiled"] * self.compiled])

    def __repr__(self) -> str:
        return f"<{self.module} {self.op}: {self.ending}, {self.messages}+{self.back_messages} messages>"


class Report:
    """The calls made inside `explain()`. `print` it for a table, `html(path)` for a picture; `rows` has the objects."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._row: Row | None = None
        self._path: list[tuple[nn.Module, str]] = []
        self._unattributed = Row("", "(outside any call)", [])
        self._backward_rows: dict[
            Any, list[list[Row]]
        ] = {}  # rows of programs that have run forward, for their backward

    @property
    def messages(self) -> int:
        """Messages this rank sent, backward included."""
        return sum(r.messages + r.back_messages for r in self._all_rows())

    @property
    def bytes(self) -> int:
        """Bytes this rank sent, backward included."""
        return sum(r.bytes + r.back_bytes for r in self._all_rows())

    @property
    def gathers(self) -> list[Row]:
        """The calls that had no rule."""
        return [r for r in self.rows if r.ending == "gather"]

    @property
    def lost(self) -> list[Row]:
        """The calls that lost a sharding: a result as large as a rank's share is on every rank."""
        return [r for r in self.rows if r.lost]

    @property
    def unbalanced(self) -> list[Row]:
        """The calls whose result is unbalanced: one rank has at least twice an even share of it, and of no operand."""
        return [r for r in self.rows if r.unbalanced]

    def _all_rows(self) -> list[Row]:
        return [*self.rows, self._unattributed] if self._unattributed.kinds else self.rows

    # ------------------------------------------------------------------ recording

    def run_call(self, func: Any, found: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call and record it; calls made inside it are part of it."""
        if self._row is not None:
            return found(func, types, args, kwargs)
        row = Row(self.path(), function_name(func), layouts([args, kwargs]))
        self._row = runtime.active.tag = row
        try:
            out = found(func, types, args, kwargs)
        finally:
            self._row = runtime.active.tag = None
        row.output = next(iter(layouts(out)), None)
        if row.output is not None or row.kinds:
            self.rows.append(row)
        return out

    def record_message(self, kind: str, messages: int, nbytes: int) -> None:
        row: Row = runtime.active.tag or self._unattributed
        row.kinds[kind] = row.kinds.get(kind, 0) + 1
        if self._row is row:
            row.messages += messages
            row.bytes += nbytes
        else:
            row.back_messages += messages
            row.back_bytes += nbytes

    def enter_module(self, module: nn.Module, args: Any) -> None:
        name = type(module).__name__
        if self._path:
            parent = self._path[-1][0]
            name = next((n for n, child in parent.named_modules() if child is module and n), name)
        self._path.append((module, name))

    def leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._path and self._path[-1][0] is module:
            self._path.pop()

    def path(self) -> str:
        """Return the path of the module whose forward is running."""
        return "/".join(name for _, name in self._path if name)

    # ------------------------------------------------------------------ programs

    def compiled(self, row: Row, where: str) -> Row:
        """Add the row of a call of a compiled program that runs in the module `where`."""
        again = Row("/".join(part for part in (where, row.module) if part), row.op, row.inputs)
        again.ending, again.output, again.compiled, again.lost = row.ending, row.output, True, row.lost
        again.unbalanced, again.costs = row.unbalanced, row.costs
        self.rows.append(again)
        return again

    def add_shared_row(self, rows: list[Row]) -> Row:
        """Add a row for a message that several calls of a compiled program share."""
        row = Row("", "shared: " + ", ".join(f"{r.module} {r.op}".strip() for r in rows), [])
        row.compiled = True
        self.rows.append(row)
        return row

    def keep_for_backward(self, program: Any, rows: list[Row]) -> None:
        """Keep the rows of a program until its backward runs."""
        self._backward_rows.setdefault(program, []).append(rows)

    def backward_rows(self, program: Any) -> list[Row]:
        """Return the rows of the latest run of a program, for its backward. The rows are kept for a second backward."""
        left = self._backward_rows.get(program, [[]])
        return left.pop() if len(left) > 1 else left[0]

    # ------------------------------------------------------------------ printing

    def __str__(self) -> str:
        head = ("module", "op", "by", "in", "out", "messages", "bytes", "backward", "bytes")
        body = [
            (r.module, r.op, r.outcome, "; ".join(map(str, r.inputs)), str(r.output or ""))
            + tuple(str(n) for n in (r.messages, r.bytes, r.back_messages, r.back_bytes))
            for r in self._all_rows()
        ]
        total = [
            sum(getattr(r, n) for r in self._all_rows()) for n in ("messages", "bytes", "back_messages", "back_bytes")
        ]
        events = f"{len(self.gathers)} gathered, {len(self.lost)} lost sharding, {len(self.unbalanced)} unbalanced"
        body.append(("total", "", events, "", "", *map(str, total)))
        limits = [48, 48, 96, *[48] * 6]
        table = [
            tuple(
                cell if len(cell) <= limit else cell[: limit - 3] + "..."
                for cell, limit in zip(row, limits, strict=True)
            )
            for row in [head, *body]
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]

        def line(row: tuple[str, ...]) -> str:
            cells = [c.ljust(w) if i < 5 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            return "  ".join(cells).rstrip()

        return "\n".join(map(line, table))

    def html(self, path: str | Path) -> None:
        """Write the report as a picture: one HTML file that needs no other file, legible in dark and light."""
        Path(path).write_text(explain_html.page(self))


def layouts(value: Any) -> list[Any]:
    """Return the layouts of the ShardTensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        found = getattr(value, "_layout", None)
        return [] if found is None else [found]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [layout for v in value for layout in layouts(v)]
    return []


@contextmanager
def explain() -> Iterator[Report]:
    """Report every call on ShardTensors inside: `with explain() as report: loss = model(x).sum(); loss.backward()`.

    `print(report)` shows, for each call, the module it was made in, whether a rule or a gather ran it, the sharding it
    lost, whether one rank has far more of its result than others, the layouts in and out, and the messages and bytes
    this rank sent for it, forward and backward.
    """
    with observe(Report()) as report:
        yield report


@contextmanager
def observe(report: R) -> Iterator[R]:
    """Record every call on ShardTensors, every message and every module inside in `report`."""
    hooks = [
        register_module_forward_pre_hook(runtime.of_this_rank(report.enter_module)),
        register_module_forward_hook(runtime.of_this_rank(report.leave_module), always_call=True),
    ]
    try:
        with runtime.observing(observer=report, meter=report.record_message):
            yield report
    finally:
        for hook in hooks:
            hook.remove()
