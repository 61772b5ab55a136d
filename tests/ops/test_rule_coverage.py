"""Every registered rule has a row in the case tables that runs: a call that raises covers nothing."""

from __future__ import annotations

from pathlib import Path

from shardfield import runtime
from shardfield.testing import run_on_ranks
from tests.harness import check_case
from tests.ops import case_tables

ROOT = Path(__file__).parents[2]

# Modules whose rules are no functions of values alone (random numbers, memory, autograd), and the tests that call them.
ELSEWHERE = {
    "elementwise.random": "tests/ops/elementwise/test_random.py",
    "protocol.metadata": "tests/tensor/test_shard_tensor.py",
    "protocol.autograd_bridge": "tests/ops/protocol/test_autograd_bridge.py",
}
# Rules that refuse every call; a row with `refuses` covers them.
ONLY_REFUSE = {"normalization.batch_norm.refuse_sync_batch_norm"}


def rules_run() -> tuple[dict[str, list[str]], list[str], int]:
    """Return, on one rank, the rules that no row runs with their functions, failures, and the number of rules run."""
    registry = runtime.active.registry
    returned: set[int] = set()
    refused: set[int] = set()
    current = returned
    failures: list[str] = []

    def watch(func, handler):
        def run(*args):
            try:
                out = handler(*args)
            except Exception:
                if current is refused:
                    refused.add(id(registry.rules.get(func)))
                raise
            if current is returned:
                returned.add(id(registry.rules.get(func)))
            return out

        return run

    before = dict(registry.handlers)
    registry.handlers.update({func: watch(func, handler) for func, handler in before.items() if func in registry.rules})
    nothing: set[int] = set()
    try:
        for name in case_tables.TABLES:
            for row in case_tables.table(name):
                current = returned if row.runs else refused if row.refuses else nothing
                row.layouts = min(row.layouts, 2)
                failures += check_case(row, (1,))
    finally:
        registry.handlers.update(before)
    missing: dict[str, list[str]] = {}
    for func, planner in registry.rules.items():
        module = planner.__module__.removeprefix("shardfield.ops.")
        rule = f"{module}.{planner.__qualname__}"
        covered = returned | refused if rule in ONLY_REFUSE else returned
        if planner.__module__.startswith("shardfield.ops.") and module not in ELSEWHERE and id(planner) not in covered:
            missing.setdefault(rule, []).append(getattr(func, "__qualname__", str(func)))
    return missing, failures, len(returned)


def test_every_rule_has_a_row_that_runs():
    ((missing, failures, ran),) = run_on_ranks(rules_run, 1, timeout=300)
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"
    assert ran > 200
    assert not missing, f"no row under tests/ops runs {missing}"


def test_rules_tested_elsewhere_name_their_tests():
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).is_file()] == []
