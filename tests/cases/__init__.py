"""The table of op cases, one module per family; `CASES` is all of it, by name."""

from __future__ import annotations

import importlib
import pkgutil

from harness import Case

FAMILIES = sorted(m.name for m in pkgutil.iter_modules(__path__))


def family(name: str) -> list[Case]:
    """The rows of one family, each with a name of its own."""
    rows = importlib.import_module(f"cases.{name}").CASES
    seen: dict[str, int] = {}
    for row in rows:
        seen[row.name] = seen.get(row.name, 0) + 1
        if seen[row.name] > 1:
            row.name = f"{row.name} #{seen[row.name]}"
    return rows
