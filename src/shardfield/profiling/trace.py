"""Read the profiler's trace of one rank: which part of a step is what, and which module and op it belongs to.

The events of the thread that runs the steps nest. An event belongs to the innermost annotation around it: a call on
ShardTensors, a module, a unit of FSDP, or the autograd node of a call (found by its sequence number).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .spans import PREFIX

# The parts of a step. "host" is the rest: Python, and the launch of operators.
PARTS = ("computing", "domain", "parameters", "data", "host")
PARAMETERS = "(parameters)"
LOADER = "(data)"  # stands for the module of the loader's messages
BACKWARD = "autograd::engine::evaluate_function: "
DDP_COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"  # follows the wait for a bucket
_OPERATOR = re.compile(r"(?!autograd|c10d|_c10d|torch|FSDP|gloo|nccl|ProfilerStep)\w+::\w+")
Event = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """The module and op that events inside an annotation belong to; `parameters`: they are of FSDP or DDP.

    `known` is false inside an autograd node whose call is not in the trace: a wait there has no name.
    """

    module: str = ""
    op: str = ""
    parameters: bool = False
    known: bool = True


# Outside modules, calls and autograd nodes, a step waits for one message: the sum of its loss and gradient norm.
STEP = Context("(step)", "loss and gradient norm")


@dataclass
class RankProfile:
    """One rank's steps. Seconds are sums over all steps.

    waits: (module, op, kind of message) -> [seconds, waits]; computing: module -> seconds; sent: (module, op, kind) ->
    [messages, bytes]. `memory`: (microseconds, bytes) above the least of the run. `unnamed`: seconds of waits that no
    module is known for. `events`: the trace, in microseconds of this rank's clock, of which `aligned` is the end of a
    barrier.
    """

    rank: int
    steps: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    waits: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    computing: dict[str, float] = field(default_factory=dict)
    sent: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    memory: list[tuple[float, int]] = field(default_factory=list)
    unnamed: float = 0.0
    aligned: float = 0.0
    events: list[Event] = field(default_factory=list)

    @property
    def waiting(self) -> float:
        """Seconds of waits for messages."""
        return self.parts["domain"] + self.parts["parameters"]

    @property
    def peak(self) -> int:
        return max((nbytes for _, nbytes in self.memory), default=0)

    def as_json(self) -> dict[str, Any]:
        lists = {name: [[*key, *value] for key, value in getattr(self, name).items()] for name in ("waits", "sent")}
        return asdict(self) | lists

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankProfile:
        tables = {name: {tuple(row[:3]): row[3:] for row in values[name]} for name in ("waits", "sent")}
        return cls(**(values | tables | {"memory": [tuple(m) for m in values["memory"]]}))


def read_rank(trace: dict[str, Any], table: Sequence[dict[str, Any]], rank: int) -> RankProfile:
    """Read the exported trace of one rank, whose annotations `table` describes."""
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X" and not e["name"].startswith(("gloo:", "nccl:"))]
    steps = [e for e in spans if _fact(e, table, "kind") == "step"]
    if not steps:
        raise ValueError("the trace has no step")
    main = steps[0]["tid"]
    made = RankProfile(rank, len(steps), seconds=sum(e["dur"] for e in steps) * 1e-6)
    barrier = next(e for e in spans if _fact(e, table, "kind") == "barrier")
    made.aligned = barrier["ts"] + barrier["dur"]
    own = sorted((e for e in spans if e["tid"] == main), key=lambda e: (e["ts"], -e["dur"]))
    _Sweep(made, table).run(e for e in own if e["ts"] >= made.aligned)
    made.parts["host"] = max(0.0, made.seconds - sum(made.parts.values()))
    made.memory = _memory(trace["traceEvents"], steps)
    return made


def _fact(event: Event, table: Sequence[dict[str, Any]], name: str) -> Any:
    return table[int(event["name"][len(PREFIX) :])].get(name) if event["name"].startswith(PREFIX) else None


class _Sweep:
    """Go through the events of the main thread in order, with the stack of those that are open."""

    def __init__(self, made: RankProfile, table: Sequence[dict[str, Any]]):
        self.made, self.table = made, table
        self.stack: list[tuple[float, Context, str]] = []  # end, context, what it is
        self.forward: dict[int, Context] = {}  # sequence number -> the call whose backward has it
        self.last_end = 0.0
        self.in_step = False

    def run(self, events: Iterator[Event]) -> None:
        for event in events:
            begin, end = event["ts"], event["ts"] + event["dur"]
            while self.stack and self.stack[-1][0] <= begin:
                self.stack.pop()
            if event["name"] == DDP_COPY and begin > self.last_end:
                self._wait(self.last_end, begin, Context(PARAMETERS, "DDP all_reduce", True), "parameters", None)
            outer = self.stack[-1][1] if self.stack else Context()
            counted = any(what in ("computing", "domain", "parameters", "data") for *_, what in self.stack)
            self.in_step = any(what == "step" for *_, what in self.stack)
            context, what = self._classify(event, outer, counted)
            self.stack.append((end, context, what))
            self.last_end = max(self.last_end, begin if what == "step" else end)

    def _classify(self, event: Event, outer: Context, counted: bool) -> tuple[Context, str]:
        name, args = event["name"], event.get("args", {})
        if name.startswith(PREFIX):
            return self._annotation(event, self.table[int(name[len(PREFIX) :])], outer)
        sequence = args.get("Sequence number")
        if name.startswith(BACKWARD):
            found = self.forward.get(sequence)
            if found is None:
                return replace(outer, known=outer != STEP and outer.known), "backward"
            return replace(found, op=found.op or name[len(BACKWARD) :]), "backward"
        if name.startswith("FSDP::"):
            unit = re.fullmatch(r"FSDP::([^ ]+)(?: \((.*)\))?", name)
            label, module = (unit[1], unit[2] or "(model)") if unit else (name, "(model)")
            self._show(event, f"FSDP {label}", "parameters", module=module)
            return Context(module, f"FSDP {label}", True), "fsdp"
        if sequence is not None and not any(what == "backward" for *_, what in self.stack):
            self.forward[sequence] = outer  # the last one is the call that makes the node
        if name.endswith("::wait_tensor") and not counted:
            self._wait(event["ts"], event["ts"] + event["dur"], outer, "parameters", event)
            return outer, "parameters"
        if not counted and _OPERATOR.match(name):
            self._compute(event, outer)
            return outer, "computing"
        if name.startswith(("c10d::", "Optimizer.")):
            self._show(
                event, name, "message" if name.startswith("c10d::") else "step", module=outer.module, op=outer.op
            )
        return outer, ""

    def _annotation(self, event: Event, facts: dict[str, Any], outer: Context) -> tuple[Context, str]:
        kind = facts["kind"]
        if kind == "wait":
            context = Context(facts["module"], facts["op"]) if facts["module"] else outer
            self._wait(event["ts"], event["ts"] + event["dur"], context, facts["of"], event, facts)
            return context, "domain"
        if kind == "send":
            context = Context(facts["module"], facts["op"]) if facts["module"] else outer
            self._send(event, facts, context)
            return context, ""
        if kind == "data":
            self._add("data", event["dur"])
            self._show(event, "data", "data")
            return Context(LOADER, "loader"), "data"
        if kind == "step":
            self._show(event, f"step {facts['number']}", "step")
            return STEP, "step"
        context = Context(facts.get("module", ""), facts.get("op", "forward"))
        self._show(event, f"{context.module} {context.op}" if kind != "module" else context.module, kind)
        return context, kind

    def _add(self, part: str, microseconds: float) -> None:
        if self.in_step:
            self.made.parts[part] += microseconds * 1e-6

    def _wait(
        self,
        begin: float,
        end: float,
        context: Context,
        of: str,
        event: Event | None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        part = "parameters" if context.parameters or of == "parameters" else "domain"
        self._add(part, end - begin)
        if any(what == "data" for *_, what in self.stack):
            self._add("data", begin - end)  # it waits for other ranks, not for data
        if not context.known:
            context = Context()
        if self.in_step:
            entry = self.made.waits.setdefault((context.module or "?", context.op or "?", of), [0.0, 0])
            entry[0] += (end - begin) * 1e-6
            entry[1] += 1
            if not (context.module and context.op):
                self.made.unnamed += (end - begin) * 1e-6
        source = event or {"ts": begin, "dur": end - begin}
        more = {"bytes": facts["bytes"], "message": facts["message"]} if facts else {}
        self._show(
            source, f"wait {of}: {context.module} {context.op}", "wait", module=context.module, op=context.op, **more
        )
        if facts and facts["message"] is not None:
            self.made.events.append({"message": facts["message"], "end": end})
        if facts and facts["blocking"]:
            self._send({"ts": begin}, facts, context)

    def _send(self, event: Event, facts: dict[str, Any], context: Context) -> None:
        if self.in_step:
            key = context.module or "?", context.op or "?", facts["of"]
            entry = self.made.sent.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += facts["bytes"]
        name = f"{facts['of']}: {context.module} {context.op}"
        args = {"module": context.module, "op": context.op, "bytes": facts["bytes"]}
        self.made.events.append({"message": facts["message"], "begin": event["ts"], "name": name, "args": args})

    def _compute(self, event: Event, context: Context) -> None:
        self._add("computing", event["dur"])
        if self.in_step:
            module = PARAMETERS if context.parameters else context.module or "?"
            self.made.computing[module] = self.made.computing.get(module, 0.0) + event["dur"] * 1e-6
        self._show(event, event["name"], "computing", module=context.module, op=context.op)

    def _show(self, event: Event, name: str, category: str, **args: Any) -> None:
        shown = {"name": name, "cat": category, "ts": event["ts"], "dur": event["dur"], "args": args}
        self.made.events.append(shown)


def _memory(events: Sequence[Event], steps: Sequence[Event]) -> list[tuple[float, int]]:
    """Return the bytes of tensors by time, above the least during the steps."""
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    seen = [
        (e["ts"], e["args"]["Total Allocated"])
        for e in events
        if e["name"] == "[memory]" and begin <= e["ts"] <= end and "Total Allocated" in e["args"]
    ]
    seen.sort()
    least = min((nbytes for _, nbytes in seen), default=0)
    return [(at, nbytes - least) for at, nbytes in seen]


def merge(profiles: Sequence[RankProfile], facts: dict[str, Any]) -> dict[str, Any]:
    """Return one Chrome trace of all ranks: a process each, its steps, its messages and its memory.

    The clocks of the ranks are aligned at the end of a barrier before the first step.
    """
    merged: list[Event] = []
    for profile in profiles:
        rank, zero = profile.rank, profile.aligned
        merged += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "steps"}},
        ]
        ends = {e["message"]: e["end"] for e in profile.events if "end" in e}
        for event in profile.events:
            if "begin" in event:
                end = ends.get(event["message"])
                if end is not None:
                    same = {"cat": "message", "id": event["message"], "pid": rank, "tid": 0, "name": event["name"]}
                    merged.append({"ph": "b", "ts": event["begin"] - zero, "args": event["args"], **same})
                    merged.append({"ph": "e", "ts": end - zero, **same})
            elif "name" in event:
                merged.append({"ph": "X", "pid": rank, "tid": 0, **event, "ts": event["ts"] - zero})
        merged += [
            {"ph": "C", "name": "memory", "pid": rank, "ts": at - zero, "args": {"bytes": nbytes}}
            for at, nbytes in profile.memory
        ]
    return {"traceEvents": merged, "displayTimeUnit": "ms", "shardfield": facts}
