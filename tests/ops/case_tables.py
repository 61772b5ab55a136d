"""Find the case tables: `tests/ops/<family>/<rule>_cases.py`, each with a list `CASES`."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.harness import Case

HERE = Path(__file__).parent
MODULES = {
    path.stem.removesuffix("_cases"): f"tests.ops.{path.parent.name}.{path.stem}" for path in HERE.glob("*/*_cases.py")
}
TABLES = sorted(MODULES)


def table(name: str) -> list[Case]:
    """Return the rows of one table, each under a unique name."""
    rows = importlib.import_module(MODULES[name]).CASES
    seen: dict[str, int] = {}
    for row in rows:
        seen[row.name] = seen.get(row.name, 0) + 1
        if seen[row.name] > 1:
            row.name = f"{row.name} #{seen[row.name]}"
    return rows
