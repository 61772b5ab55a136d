"""The case tables on every mesh: values, all gradients, errors and messages against one device.

Every row runs on virtual ranks, in this process and ten times faster, and a sample of the rows on processes.
"""

from __future__ import annotations

import math
import os

import pytest

from shardfield.testing import run_on_ranks
from tests.harness import DEVICE, MESHES, Case, check_case
from tests.harness.virtual import VirtualRanks
from tests.ops import case_tables

# `make test` has time for two layouts of each row: one on a 2-d mesh and one on a 1-d mesh, which differs from row to
# row, and runs one in five of these calls on processes as well. SHARDFIELD_LAYOUTS, which `make sweep` sets, draws that
# many layouts (or the row's own number) on every mesh, on virtual ranks and on processes. On a GPU all calls run on
# processes. A single rank is left to test_rule_coverage.py, which runs every row there, on the CPU.
EVERY_MESH = "SHARDFIELD_LAYOUTS" in os.environ
SAMPLE = 1 if EVERY_MESH or DEVICE != "cpu" else 5
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


def on(calls: list[tuple[str, int, tuple[int, ...]]]):
    """Parametrize a test by calls."""
    return pytest.mark.parametrize(("name", "row", "mesh"), calls, ids=map(call_id, calls))


@pytest.fixture(scope="module")
def ranks():
    with VirtualRanks() as ranks:
        yield ranks


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns once per process: on one of its virtual ranks
@on(CALLS if DEVICE == "cpu" else [])
def test_op(name, row, mesh, ranks):
    failures = ranks.check(math.prod(mesh), run_rows, name, [row], mesh)
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"


@on(CALLS[::SAMPLE])
def test_op_on_processes(name, row, mesh):
    if DEVICE != "cpu" and case_tables.table(name)[row].device_asserts:
        pytest.skip(f"the {DEVICE} kernel asserts on the invalid value, which ends the process")
    found = run_on_ranks(run_rows, math.prod(mesh), name, [row], mesh, timeout=60)
    failures = [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"
