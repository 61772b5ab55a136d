"""Buffers that differ between ranks are refused on all ranks, when a model is wrapped, evaluated and saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardfield import ShardingError, parallelize, sync_module_over_mesh
from shardfield.testing import run_on_ranks
from shardfield.train import Checkpoints
from shardfield.train.buffers import check_buffers


def normalized(mean) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    model.register_buffer("mean", torch.as_tensor(mean))
    return model


def wraps():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
    rank = dist.get_rank()
    for strategy in ("fsdp", "hsdp", "ddp"):
        parallelize(normalized([1.0, float("nan")]), mesh, strategy=strategy)
        parallelize(normalized([1.0, 1.0 + 1e-15 * rank]).double(), mesh, strategy=strategy)  # rounding
        for sync in (True, False):
            with pytest.raises(ShardingError, match="parallelize: buffer 'mean' differs between ranks, by up to 3"):
                parallelize(normalized([1.0, float(rank)]), mesh, strategy=strategy, sync=sync)
    for differing in (torch.tensor([rank == 2]), torch.tensor([7 + rank]), torch.tensor([1.0, torch.nan][rank // 3])):
        with pytest.raises(ShardingError, match="buffer 'mean' differs"):
            parallelize(normalized(differing), mesh)
    with pytest.raises(ShardingError, match="do not agree on buffers"):
        parallelize(normalized(torch.zeros(2 + rank)), mesh)
    parallelize(sync_module_over_mesh(normalized([float(rank)]), mesh), mesh)


def test_refused_when_wrapped():
    run_on_ranks(wraps, 4)


def saves(folder, strategy):
    """Train with a batch norm on two data ranks: each has the statistics of its own samples."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "spatial"))
    torch.manual_seed(0)
    checkpoints = Checkpoints(folder, 1)
    for norm, differs in ((nn.BatchNorm1d(3), True), (nn.LayerNorm(3), False)):
        model = parallelize(nn.Sequential(nn.Linear(3, 3), norm), mesh, strategy=strategy)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        if differs:
            with pytest.raises(ShardingError, match="checkpoint of step 2: buffer '.*running_mean' differs"):
                checkpoints.save(2, model)
            with pytest.raises(ShardingError, match="evaluate: buffer"):
                check_buffers(model, mesh, "evaluate")
        else:
            checkpoints.save(2, model)
    checkpoints.wait()


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_refused_when_saved(tmp_path, strategy):
    run_on_ranks(saves, 2, tmp_path, strategy)
