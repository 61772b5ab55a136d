"""The case tables in inference mode against one device, and with autograd afterwards, on virtual ranks."""

from __future__ import annotations

import math
import os

import pytest

from tests.harness.inference import check_inference_mode
from tests.harness.virtual import VirtualRanks
from tests.ops import case_tables

# `make test` runs a sample of the rows, each with one layout on one mesh. SHARDFIELD_LAYOUTS, which `make sweep` sets,
# runs every row with two layouts on every mesh.
SWEEP = "SHARDFIELD_LAYOUTS" in os.environ
SAMPLE = 8
MESHES = [(2,), (2, 2), (3,)]


@pytest.fixture(scope="module")
def ranks():
    with VirtualRanks() as ranks:
        yield ranks


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns once per process: on one of its virtual ranks
@pytest.mark.parametrize("name", case_tables.TABLES)
def test_inference_mode(name, ranks):
    failures = []
    for number, row in enumerate(case_tables.table(name)):
        draws = [(mesh, index) for mesh in MESHES for index in (0, 1)]
        if not SWEEP:
            draws = [draws[number // SAMPLE % len(draws)]] if number % SAMPLE == 0 else []
        for mesh, index in draws:
            failures += ranks.check(math.prod(mesh), check_inference_mode, row, mesh, [index])
    assert not failures, "\n".join(failures[:12]) + f"\n({len(failures)} failures)"
