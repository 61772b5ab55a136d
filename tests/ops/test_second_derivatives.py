"""Second derivatives of the case tables against one device, in float64."""

from __future__ import annotations

import math
import os

import pytest

from shardfield.testing import run_on_ranks
from tests.harness.second_derivatives import check_second_derivatives
from tests.ops import case_tables

# `make test` draws two layouts without empty shards for a sample of the rows. SHARDFIELD_LAYOUTS, which `make sweep`
# sets, runs every row on every mesh, with empty shards.
SWEEP = "SHARDFIELD_LAYOUTS" in os.environ
SAMPLE, GROUPS = 12, 3
MESHES = [(2,), (3,), (2, 2)]
ROWS = [(name, row) for name in case_tables.TABLES for row in range(len(case_tables.table(name)))]

# Rows that may block in a second backward (docs/shardtensor.md): table, part of the name.
BLOCKS = [
    ("basic_index", "grow_through"),
    ("lazy_spectrum", "part_written_after"),
    ("lazy_spectrum", "parts_that_meet"),
    ("scatter", "scatter_reduce of rows 5x3,9,9x3 prod"),
    ("view", "views_read_after_a_write"),
]
# More of them if a rank has an empty shard.
BLOCKS_IF_EMPTY = [
    ("embedding", "embedding_bag"),
    ("embedding", "max"),
    ("grid_sample", "bicubic"),
    ("interpolate", "channels last"),  # does not block: torch's kernels round positions differently for each format
    ("lazy_pad", "without_grad"),
    ("lazy_spectrum", ""),
    ("scatter", "scatter_reduce of rows"),
    ("second_derivative", "slope of var"),
]


def may_block(name: str, row: int) -> bool:
    """Return whether a row is one of those that may block."""
    listed = BLOCKS + BLOCKS_IF_EMPTY if SWEEP else BLOCKS
    return any(name == table and part in case_tables.table(name)[row].name for table, part in listed)


def calls() -> list[tuple[list[tuple[str, int]], tuple[int, ...]]]:
    """Return the rows of each call on ranks, with its mesh: a call costs more than a row."""
    rows = [row for row in ROWS if not may_block(*row)]
    if SWEEP:
        return [([row], mesh) for mesh in MESHES for row in rows]
    samples = [rows[i * SAMPLE // len(MESHES) :: SAMPLE] for i in range(len(MESHES))]
    return [
        (sample[group::GROUPS], mesh) for sample, mesh in zip(samples, MESHES, strict=True) for group in range(GROUPS)
    ]


def call_id(call: tuple[list[tuple[str, int]], tuple[int, ...]]) -> str:
    """Return the test id of a call."""
    rows, mesh = call
    (name, row), more = rows[0], len(rows) - 1
    title = f"{name}-{case_tables.table(name)[row].name}"
    return f"{title}{f' and {more} more' if more else ''}-{'x'.join(map(str, mesh))}"


def run_rows(rows: list[tuple[str, int]], mesh: tuple[int, ...]) -> list[str]:
    """Return, on a rank, the failures of some rows."""
    return [
        failure
        for name, row in rows
        for failure in check_second_derivatives(
            case_tables.table(name)[row], mesh, range(4) if SWEEP else [0, 1], empty_shards=SWEEP
        )
    ]


CALLS = calls()


@pytest.mark.parametrize(("rows", "mesh"), CALLS, ids=map(call_id, CALLS))
def test_second_derivatives(rows, mesh):
    found = run_on_ranks(run_rows, math.prod(mesh), rows, mesh, timeout=30 if SWEEP else 120)
    failures = [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"
