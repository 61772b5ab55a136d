"""The case tables on every mesh: values, all gradients, errors and messages against one device."""

from __future__ import annotations

import math
import os

import pytest

from shardfield.testing import run_on_ranks
from tests.harness import DEVICE, MESHES, Case, check_case
from tests.ops import case_tables

# `make test` has time for two layouts of each row: one on a 2-d mesh and one on a 1-d mesh, which differs from row to
# row. SHARDFIELD_LAYOUTS, which `make sweep` sets, draws that many layouts (or the row's own number) on every mesh.
# A single rank is left to test_rule_coverage.py, which runs every row there, on the CPU.
EVERY_MESH = "SHARDFIELD_LAYOUTS" in os.environ
ONE_RANK = [mesh for mesh in MESHES if math.prod(mesh) == 1 and DEVICE != "cpu"]
MESHES_1D = [mesh for mesh in MESHES if len(mesh) == 1 and math.prod(mesh) > 1]
MESHES_2D = [mesh for mesh in MESHES if len(mesh) > 1 and math.prod(mesh) > 1]


def meshes(row: int) -> list[tuple[int, ...]]:
    """Return the meshes that a row is run on."""
    return [*ONE_RANK, *(MESHES_1D if EVERY_MESH else [MESHES_1D[row % len(MESHES_1D)]]), *MESHES_2D]


CALLS = [
    (name, row, mesh)
    for name in case_tables.TABLES
    for row in range(len(case_tables.table(name)))
    for mesh in meshes(row)
]


def run_rows(name: str, rows: list[int], mesh: tuple[int, ...]) -> list[str]:
    """Return, on a rank, the failures of some rows of a table."""
    table = case_tables.table(name)
    return [
        failure
        for row in rows
        for failure in check_case(table[row], mesh, layout_indices=layout_indices(table[row], row, mesh))
    ]


def layout_indices(case: Case, row: int, mesh: tuple[int, ...]) -> list[int]:
    """Return the layouts to draw: all operands sharded on one of the row's two meshes, a single one on the other."""
    if EVERY_MESH:
        return list(range(min(case.layouts, int(os.environ["SHARDFIELD_LAYOUTS"]))))
    return [(row + len(mesh)) % 2]


def call_id(call: tuple[str, int, tuple[int, ...]]) -> str:
    """Return the test id of a call."""
    name, row, mesh = call
    return f"{name}-{case_tables.table(name)[row].name}-{'x'.join(map(str, mesh))}"


@pytest.mark.parametrize(("name", "row", "mesh"), CALLS, ids=map(call_id, CALLS))
def test_op(name, row, mesh):
    if DEVICE != "cpu" and case_tables.table(name)[row].device_asserts:
        pytest.skip(f"the {DEVICE} kernel asserts on the invalid value, which ends the process")
    found = run_on_ranks(run_rows, math.prod(mesh), name, [row], mesh, timeout=60)
    failures = [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"
