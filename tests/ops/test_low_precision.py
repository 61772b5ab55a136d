"""The case tables in bf16 and under autocast: dtypes as on one device, errors at most twice those of one device."""

from __future__ import annotations

import math
import os

import pytest

from shardfield.testing import run_on_ranks
from tests.harness.precision import MODES, OTHER_HALF, check_precision
from tests.harness.virtual import VirtualRanks
from tests.ops import case_tables

# `make test` draws one layout for a sample of the rows, another one in each mode. SHARDFIELD_LAYOUTS, which
# `make sweep` sets, runs every row on every mesh.
SWEEP = "SHARDFIELD_LAYOUTS" in os.environ
SAMPLE = 30
MESHES = [(2,), (3,), (2, 2)]
# The matrices of sparse_mm are constants in fp64, which no product takes together with a bf16 tensor. torch multiplies
# no two sparse matrices in bf16 (sparse_entries).
TABLES = [name for name in case_tables.TABLES if name not in ("sparse_mm", "sparse_entries")]
# A call on ranks costs more than a row, so that each of them runs the sampled rows of several tables.
GROUPS = [[name] for name in TABLES] if SWEEP else [TABLES[i::10] for i in range(10)]
# The beginnings of names of rows that run in every mode, as their shards need care in low precision.
ALWAYS = ("low precision", "local_response_norm 2x7x3x2", "multi_margin_loss 5,0d", "trace 6x6", "quantile 8",
          "pad 2x3x5x6 (2, 3, 1, 2),reflect", "convolution", "linear_cross_entropy_in_chunks",
          "fft_ihfftn 4x5x6 dim=(0, 1)", "cdist 30x2")  # fmt: skip


def chosen(name: str, mode: str) -> list[int]:
    """Return the rows of a table that run in a mode."""
    rows = case_tables.table(name)
    offset = (list(MODES).index(mode) * SAMPLE // len(MODES) + TABLES.index(name)) % SAMPLE
    return [i for i, row in enumerate(rows) if SWEEP or i % SAMPLE == offset or row.name.startswith(ALWAYS)]


def run_tables(names: list[str], mode: str, mesh: tuple[int, ...]) -> list[str]:
    """Return, on a rank, the failures of some tables."""
    failures = []
    for name in names:
        for row in chosen(name, mode):
            indices = [0, 1] if SWEEP else [(row + len(mesh)) % 2]
            failures += check_precision(case_tables.table(name)[row], mesh, mode, indices)
    return failures


def meshes(mode: str) -> list[tuple[int, ...]]:
    """Return the meshes that a mode is run on."""
    return MESHES if SWEEP else [MESHES[list(MODES).index(mode) % len(MESHES)]]


CALLS = [(names, mode, mesh) for mode in MODES for mesh in meshes(mode) for names in GROUPS]


@pytest.mark.parametrize(("names", "mode", "mesh"), CALLS, ids=lambda x: x[0] if isinstance(x, list) else str(x))
def test_low_precision(names, mode, mesh):
    found = run_on_ranks(run_tables, math.prod(mesh), names, mode, mesh, timeout=240)
    failures = [f"rank {rank}: {failure}" for rank, listed in enumerate(found) for failure in listed]
    assert not failures, "\n".join(failures[:6]) + f"\n({len(failures)} failures)"


def run_in_other_half(rows: list[tuple[str, int]], mesh: tuple[int, ...]) -> list[str]:
    """Return, on a rank, the failures of rows in bf16 under autocast to fp16."""
    return [f for name, row in rows for f in check_precision(case_tables.table(name)[row], mesh, OTHER_HALF, [row % 2])]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns once per process: on one of its virtual ranks
def test_autocast_to_the_other_half():
    """Autocast to fp16 joins no bf16 tensors: ranks pack messages and join shards outside it, or all raise."""
    rows = [(name, row) for name in TABLES for row in range(len(case_tables.table(name)))][:: 1 if SWEEP else SAMPLE]
    with VirtualRanks() as ranks:
        for i, mesh in enumerate(MESHES[1:]):
            assert ranks.check(math.prod(mesh), run_in_other_half, rows if SWEEP else rows[i::2], mesh) == []
