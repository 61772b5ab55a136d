"""Stand-ins of operands: torch is asked once for all sizes, and again where its answer may be another."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardfield.dispatch.plan import Operand
from shardfield.layout import Layout
from shardfield.ops._common.probe import probe
from shardfield.planning import simulated


def test_torch_is_asked_once_for_all_sizes():
    asked = []

    def scaled(x, factor):
        asked.append((tuple(x.shape), factor))
        return x * factor

    def dtype_of(shape, factor, dtype=torch.int64, **options):
        return probe(
            scaled, Operand(Layout.replicate(mesh, shape), dtype, torch.device("cpu"), 0), factor, **options
        ).dtype

    with simulated(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
        assert {dtype_of((n, 3), 2) for n in (4, 5, 600)} == {torch.int64} and len(asked) == 1
        assert dtype_of((4, 3), 2.0) is torch.float32 and dtype_of((4, 3), True) is torch.int64  # equal numbers
        assert dtype_of((4, 3), 2, torch.float16) is torch.float16 and len(asked) == 4
        assert dtype_of((0, 3), 2) is dtype_of((1, 3), 2) and asked[-2:] == [((0, 2), 2), ((1, 2), 2)]
        assert dtype_of((0, 7), 2, single=True) is torch.int64 and asked[-1] == ((1, 1), 2)
        torch.set_default_dtype(torch.float64)
        try:
            assert dtype_of((4, 3), 2.0) is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        for _ in range(2):  # an error is raised every time
            with pytest.raises(TypeError):
                dtype_of((4, 3), None)
