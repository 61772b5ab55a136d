"""The table of op cases on every mesh: values and all gradients against one device."""

from __future__ import annotations

import math
import os

import pytest

from shardfield.testing import run_on_ranks
from tests.harness import DEVICE, MESHES, Case, check_case
from tests.ops import case_tables

# What `make test` has time for: two layouts of each row, one on tiles and one on one of the other meshes in turn. With
# SHARDFIELD_LAYOUTS, as `make sweep` sets it, that many layouts (or what a row asks for) on every mesh. One rank alone
# is left to test_rules.py, which runs every row there, on the CPU.
EVERY = "SHARDFIELD_LAYOUTS" in os.environ
ALONE = [mesh for mesh in MESHES if math.prod(mesh) == 1 and DEVICE != "cpu"]
LINES = [mesh for mesh in MESHES if len(mesh) == 1 and math.prod(mesh) > 1]
TILES = [mesh for mesh in MESHES if len(mesh) > 1 and math.prod(mesh) > 1]


def meshes(at: int) -> list[tuple[int, ...]]:
    return [*ALONE, *(LINES if EVERY else [LINES[at % len(LINES)]]), *TILES]


CALLS = [
    (name, at, mesh) for name in case_tables.TABLES for at in range(len(case_tables.table(name))) for mesh in meshes(at)
]


def run_rows(family: str, rows: list[int], mesh: tuple[int, ...]) -> list[str]:
    """On a rank: the complaints of some rows of a family."""
    table = case_tables.table(family)
    return [
        complaint
        for row in rows
        for complaint in check_case(table[row], mesh, layout_indices=chosen(table[row], row, mesh))
    ]


def chosen(case: Case, row: int, mesh: tuple[int, ...]) -> list[int]:
    """Which layouts are drawn: on tiles those that cut all operands and elsewhere one alone, or the other way round."""
    if EVERY:
        return list(range(min(case.layouts, int(os.environ["SHARDFIELD_LAYOUTS"]))))
    return [(row + len(mesh)) % 2]


def called(call: tuple[str, int, tuple[int, ...]]) -> str:
    family, at, mesh = call
    return f"{family}-{case_tables.table(family)[at].name}-{'x'.join(map(str, mesh))}"


@pytest.mark.parametrize(("family", "row", "mesh"), CALLS, ids=map(called, CALLS))
def test_op(family, row, mesh):
    complaints = run_on_ranks(run_rows, math.prod(mesh), family, [row], mesh, timeout=60)
    told = [f"rank {rank}: {c}" for rank, found in enumerate(complaints) for c in found]
    assert not told, "\n".join(told[:6]) + f"\n({len(told)} complaints)"
