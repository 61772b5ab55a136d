"""The table of op cases on every mesh: values and all gradients against one device."""

from __future__ import annotations

import math
import os

import pytest

import cases
from harness import MESHES, check
from shardfield.testing import run_on_ranks

# Layouts drawn for a row on each mesh: the first few keep `make test` short, `make sweep` runs all that a row asks for.
LAYOUTS = int(os.environ.get("SHARDFIELD_LAYOUTS", "3"))
# One rank alone is left to test_rules.py, which runs every row there.
SEVERAL = [mesh for mesh in MESHES if math.prod(mesh) > 1]
ROWS = [(name, at) for name in cases.FAMILIES for at in range(len(cases.family(name)))]


def run_rows(family: str, rows: list[int], mesh: tuple[int, ...]) -> list[str]:
    """On a rank: the complaints of some rows of a family."""
    table = cases.family(family)
    for row in rows:
        table[row].layouts = min(table[row].layouts, LAYOUTS)
    return [complaint for row in rows for complaint in check(table[row], mesh)]


@pytest.mark.parametrize("mesh", SEVERAL, ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize(("family", "row"), ROWS, ids=[f"{f}-{cases.family(f)[at].name}" for f, at in ROWS])
def test_op(family, row, mesh):
    complaints = run_on_ranks(run_rows, math.prod(mesh), family, [row], mesh, timeout=60)
    told = [f"rank {rank}: {c}" for rank, found in enumerate(complaints) for c in found]
    assert not told, "\n".join(told[:6]) + f"\n({len(told)} complaints)"
