"""Second derivatives of the case tables against one device, in float64, on virtual ranks."""

from __future__ import annotations

import math
import os

import pytest

from tests.harness.second_derivatives import check_second_derivatives
from tests.harness.virtual import VirtualRanks
from tests.ops import case_tables

# `make test` runs a sample of the rows, each with one layout on one mesh. SHARDFIELD_LAYOUTS, which `make sweep` sets,
# runs every row with two layouts on every mesh. Layouts may be uneven and have empty shards.
SWEEP = "SHARDFIELD_LAYOUTS" in os.environ
SAMPLE = 6
MESHES = [(2,), (2, 2), (3,)]

# Rows whose second backward is refused on all ranks with some of the layouts (docs/shardtensor.md): table, part of the
# name. Most of these layouts have empty shards. All others must be right.
REFUSED = [
    ("adaptive_pool", "adaptive_avg_pool2d 1x2x9x8 (1, 5)"),
    ("basic_index", "grow_through"),
    ("conv", "a pool and a stride, double backward"),
    ("conv", "adaptive pool and nearest"),
    ("flex", "flex"),
    ("interpolate", "interpolate 2x4x6x5 size=(3, 8),mode=area"),
    ("lazy_pad", "without_grad"),
    ("lazy_spectrum", "double backward"),
    ("lazy_spectrum", "overlapping_parts"),
    ("lazy_spectrum", "written"),
    ("packed", "packed"),
    ("scan", "cummax"),
    ("scan", "cummin"),
    ("scatter", "scatter_reduce of rows 5x3,9,9x3 prod"),
    ("scatter", "transposed"),
    ("sdpa", "attention of a field's patches"),  # torch's CPU kernel has no second derivative, for other strides it has
    ("sdpa", "causal 1x4x5x4"),
    ("second_derivative", "slope of std"),
    ("second_derivative", "slope of var"),
    ("sort_topk", "quantile"),
    ("view", "strided_and_written"),
    ("view", "view_of_view"),
    ("view", "views_read_after_a_write"),
    ("view", "write_after_contiguous"),
    ("view", "writes_into_split_dims"),
]


@pytest.fixture(scope="module")
def ranks():
    with VirtualRanks() as ranks:
        yield ranks


def may_refuse(name: str, row: str) -> bool:
    """Return whether a row is one of those whose second derivative may be refused."""
    return any(name == table and part in row for table, part in REFUSED)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns once per process: on one of its virtual ranks
@pytest.mark.parametrize("name", case_tables.TABLES)
def test_second_derivatives(name, ranks):
    failures = []
    for number, row in enumerate(case_tables.table(name)):
        draws = [(mesh, index) for mesh in MESHES for index in (0, 1)]
        if not SWEEP:
            draws = [draws[number // SAMPLE % len(draws)]] if number % SAMPLE == 0 else []
        for mesh, index in draws:
            failures += ranks.check(
                math.prod(mesh), check_second_derivatives, row, mesh, [index], may_refuse(name, row.name)
            )
    assert not failures, "\n".join(failures[:12]) + f"\n({len(failures)} failures)"
