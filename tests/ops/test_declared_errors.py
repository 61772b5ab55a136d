"""Every row raises on plain tensors exactly what it declares: one process, no ranks."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.harness import check_declared_error, run_plain
from tests.harness.draw import draw_values
from tests.ops import case_tables


@pytest.mark.parametrize("name", case_tables.TABLES)
def test_rows_raise_what_they_declare(name):
    failures = []
    for index, row in enumerate(case_tables.table(name)):
        values = [
            v.requires_grad_(row.grad and t.requires_grad(v))
            for t, v in zip(row.tensors, draw_values(row), strict=True)
        ]
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            why = check_declared_error(row, run_plain(row, values, "cpu"))
        if why:
            failures.append(f"row {index}, {row.name}: {why}")
    assert not failures, "\n".join(failures)
