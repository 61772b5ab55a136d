"""Every rule has rows: an op that is registered and never called in the case table fails here, and rows on one rank."""

from __future__ import annotations

from shardfield.dispatch import registry
from shardfield.testing import run_on_ranks
from tests.harness import check_case
from tests.ops import case_tables

# Registered, and tested elsewhere: what is not a function of its arguments, memory, autograd's own functions.
ELSEWHERE = {"elementwise.random", "protocol.metadata", "protocol.autograd_bridge"}


def planners_called() -> tuple[set[str], set[str], list[str]]:
    """On one rank, the planners and handlers that the rows reach, all there are, and what the rows complain of."""
    reached: set[int] = set()
    complaints: list[str] = []

    def watched(func, found):
        def run(*args):
            reached.add(id(registry.RULES.get(func)))
            return found(*args)

        return run

    before = dict(registry.HANDLERS)
    registry.HANDLERS.update({func: watched(func, found) for func, found in before.items() if func in registry.RULES})
    try:
        for family in case_tables.TABLES:
            for row in case_tables.table(family):
                row.layouts = min(row.layouts, 2)
                complaints += check_case(row, (1,))
    finally:
        registry.HANDLERS.update(before)

    def name(planner) -> str:
        return f"{planner.__module__.removeprefix('shardfield.ops.')}.{planner.__qualname__}"

    known = {id(p): p for p in registry.RULES.values() if p.__module__.startswith("shardfield.ops.")}
    listed = {i: p for i, p in known.items() if p.__module__.removeprefix("shardfield.ops.") not in ELSEWHERE}
    return {name(p) for i, p in listed.items() if i in reached}, {name(p) for p in listed.values()}, complaints


def test_every_rule_has_rows():
    ((reached, known, complaints),) = run_on_ranks(planners_called, 1, timeout=300)
    assert not complaints, "\n".join(complaints[:6]) + f"\n({len(complaints)} complaints)"
    assert len(known) > 50
    assert not known - reached, f"no row in tests/cases reaches {sorted(known - reached)}"
