"""The summary of a profile: one screen with the parts of a step, what ranks wait for, and what to change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..planning import Cost
from .trace import LOADER, PARTS, RankProfile

SHOWN = 6  # rows of a table


@dataclass
class Summary:
    """A profile of all ranks. `seconds`: those of a step without the profiler, on the slowest rank.

    gathers and lost: calls of rank 0 without a rule, and calls whose result lost its sharding, as "module op".
    """

    name: str
    mesh: str
    seconds: float
    ranks: list[RankProfile]
    predicted: Cost | None
    gathers: list[str]
    lost: list[str]

    @property
    def steps(self) -> int:
        return self.ranks[0].steps

    @property
    def named(self) -> float:
        """The part of all waiting that has a module and an op; 1 if there is none."""
        waiting = sum(r.waiting for r in self.ranks)
        return 1.0 - sum(r.unnamed for r in self.ranks) / waiting if waiting > 0 else 1.0

    @property
    def imbalance(self) -> float:
        """The computing of the slowest rank, divided by the mean of all ranks."""
        each = [r.parts["computing"] for r in self.ranks]
        return max(each) / max(statistics.mean(each), 1e-12)

    def share(self, part: str) -> float:
        """Return the part of the profiled steps that all ranks spend so, on average."""
        return sum(r.parts[part] for r in self.ranks) / max(sum(r.seconds for r in self.ranks), 1e-12)

    def waiting_for_batches_of_others(self) -> float:
        """Return the part of the profiled steps in which a rank has its batch and waits for that of another rank."""
        waited = sum(seconds for r in self.ranks for key, (seconds, _) in r.waits.items() if key[0] == LOADER)
        return waited / max(sum(r.seconds for r in self.ranks), 1e-12)

    def waits(self) -> list[tuple[tuple[str, str, str], float, float]]:
        """Return (module, op, kind), milliseconds of a step on the mean and on the slowest rank, the longest first."""
        keys = {key for r in self.ranks for key in r.waits}
        rows = []
        for key in keys:
            each = [1e3 * r.waits.get(key, (0.0, 0))[0] / r.steps for r in self.ranks]
            rows.append((key, statistics.mean(each), max(each)))
        return sorted(rows, key=lambda row: -row[1])

    def computing(self) -> list[tuple[str, float, float]]:
        """Return module, and milliseconds of a step on the mean and on the slowest rank, the longest first."""
        rows = []
        for module in {m for r in self.ranks for m in r.computing}:
            each = [1e3 * r.computing.get(module, 0.0) / r.steps for r in self.ranks]
            rows.append((module, statistics.mean(each), max(each)))
        return sorted(rows, key=lambda row: -row[1])

    def sent(self, key: tuple[str, str, str]) -> tuple[float, float]:
        """Return messages and bytes of a step that a rank sends for a call, on average."""
        each = [r.sent.get(key, (0, 0)) for r in self.ranks]
        return tuple(sum(column) / len(each) / self.steps for column in zip(*each, strict=True))  # type: ignore[return-value]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mesh": self.mesh,
            "seconds": self.seconds,
            "steps": self.steps,
            "named": self.named,
            "imbalance": self.imbalance,
            "parts": {part: self.share(part) for part in PARTS},
            "ranks": [{"rank": r.rank, "seconds": r.seconds, "parts": r.parts, "peak": r.peak} for r in self.ranks],
            "waits": [[*key, mean, longest] for key, mean, longest in self.waits()],
            "computing": [list(row) for row in self.computing()],
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "gathers": self.gathers,
            "lost": self.lost,
            "advice": advice(self),
        }


def advice(summary: Summary) -> list[str]:
    """Return what to change, the largest effect first."""
    found: list[tuple[float, str]] = []
    share = {part: summary.share(part) for part in PARTS}
    if summary.gathers:
        calls = ", ".join(dict.fromkeys(summary.gathers))
        found.append((1.0, f"no sharding rule: {calls}. The operands are gathered: rewrite the call, or write a rule"))
    if summary.lost:
        calls = ", ".join(dict.fromkeys(summary.lost))
        found.append((0.9, f"lost sharding: {calls}. Every rank holds and computes all of the result"))
    if summary.imbalance > 1.15:
        slowest = max(summary.ranks, key=lambda r: r.parts["computing"])
        text = f"rank {slowest.rank} computes {summary.imbalance:.2f} times the mean, and the others wait for it"
        cause = "choose shard sizes that share the work, and check that no other program uses its cores"
        found.append((share["domain"] + share["parameters"], f"{text}: {cause}"))
    first = next((key for key, *_ in summary.waits() if key[2] != "parameters" and key[0] != LOADER), None)
    late = summary.waiting_for_batches_of_others()
    domain = share["domain"] - late
    if domain > 0.2 and first is not None:
        most = f"most of it in {first[0]} {first[1]} ({first[2]})"
        text = f"{domain:.0%} waiting for messages of the domain, {most}"
        found.append((domain, f"{text}: use fewer domain ranks, or larger fields per rank"))
    if share["parameters"] > 0.2:
        text = f"{share['parameters']:.0%} waiting for parameters and gradients"
        found.append((share["parameters"], f"{text}: a larger batch, --accumulate, or --strategy hsdp or ddp"))
    if share["host"] > 0.4:
        text = f"{share['host']:.0%} of a step is the host's Python, the profiler's included"
        found.append((share["host"] / 2, f"{text}: larger batches or fields per rank, or shardfield.compile"))
    if (data := share["data"] + late) > 0.1:
        text = f"{data:.0%} waiting for data" + (" of this rank or another" if late > 0.05 else "")
        found.append((data, f"{text}: a faster store, chunks aligned to shards"))
    return [text for _, text in sorted(found, key=lambda item: -item[0])] or ["nothing stands out"]


# ---------------------------------------------------------------------- text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table whose first `left` columns are aligned to the left."""
    cut = [[c if len(c) <= 44 else f"{c[:20]}...{c[-21:]}" for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cut) for i in range(len(head))]
    return [
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cut
    ]


def _bytes(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def format_summary(summary: Summary) -> str:
    """Return the summary as text of one screen."""
    lines = [
        f"{summary.name} on {summary.mesh}: {summary.seconds * 1e3:.1f} ms a step, median of the slowest rank "
        "without the profiler",
        "",
    ]
    head = ("rank", "computing", "wait domain", "wait parameters", "data", "host", "memory of a step")
    rows = [
        (str(r.rank), *(f"{r.parts[part] / r.seconds:.0%}" for part in PARTS), _bytes(r.peak)) for r in summary.ranks
    ]
    hidden = len(rows) - 8
    lines += _table(head, rows[:8], 1) + ([f"... and {hidden} ranks"] if hidden > 0 else [])
    waits = summary.waits()
    if waits:
        body = [(*key, f"{mean:.2f}", f"{longest:.2f}", *_sent(summary, key)) for key, mean, longest in waits[:SHOWN]]
        head = ("waits for", "op", "message", "ms", "slowest rank", "messages", "sends")
        lines += ["", *_table(head, body, 3), f"{summary.named:.1%} of the waiting has a module and an op"]
    computing = [(module, f"{mean:.2f}", f"{longest:.2f}") for module, mean, longest in summary.computing()[:SHOWN]]
    lines += ["", *_table(("computes", "ms", "slowest rank"), computing, 1)]
    lines += [f"imbalance of computing: {summary.imbalance:.2f} (slowest rank over the mean)"]
    lines += ["", *_prediction(summary), "", "what to change"]
    return "\n".join([*lines, *(f"- {text}" for text in advice(summary))])


def _sent(summary: Summary, key: tuple[str, str, str]) -> tuple[str, str]:
    """Return the messages and bytes that a call sends in a step; those of FSDP and DDP are not counted."""
    if key[2] == "parameters":
        return "-", "-"
    messages, nbytes = summary.sent(key)
    return f"{messages:.0f}", _bytes(nbytes)


def _prediction(summary: Summary) -> list[str]:
    cost = summary.predicted
    if cost is None:
        return ["no prediction: it needs several ranks on CPUs, between which links are measured"]
    scale = summary.seconds / max(r.seconds / r.steps for r in summary.ranks)
    measured: Mapping[str, float] = {
        part: scale * statistics.mean(r.parts[part] / r.steps for r in summary.ranks) for part in PARTS
    }
    rows = [
        ("step", cost.seconds, summary.seconds),
        ("wait domain", cost.domain, measured["domain"]),
        ("wait parameters", cost.parameters, measured["parameters"]),
    ]
    body = [(name, f"{1e3 * a:.1f}", f"{1e3 * b:.1f}", f"{a / max(b, 1e-9):.2f}") for name, a, b in rows]
    return _table(("ms", "predicted", "measured", "ratio"), body, 1)
