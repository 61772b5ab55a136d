"""explain() reports every byte and every gather; strict() refuses gathers."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import Shard

from shardfield import ShardingError, explain, runtime, scatter_tensor, strict
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def forward(self, x):
        return self.layers(x).sum()


def explained():
    mesh = world_mesh((2,))
    x = scatter_tensor(torch.randn(6, 4, dtype=torch.float64), 0, mesh, [Shard(0)])
    net = Net().double()
    sent = []
    with explain() as seen:
        loss = net(x)
        loss.backward()
        loss.item()
    net(x)
    table = {r.op: r for r in seen.rows}
    assert table["linear"].module == "Net/layers.0" or table["linear"].module == "Net/layers/0"
    # backward of linear: weight (12) and bias (3) gradients in one all-reduce over 2 ranks
    assert (table["linear"].messages, table["linear"].back_messages) == (0, 1)
    assert table["linear"].back_bytes == 15 * 8
    assert table["relu"].messages == table["relu"].back_messages == 0
    assert "Replicate" in repr(table["sum"].output)
    assert (table["sum"].messages, table["sum"].bytes) == (1, 8)  # the loss: item() sends nothing more
    assert seen.messages == 2 and seen.bytes == 15 * 8 + 8
    text = str(seen)
    assert "linear" in text and "total" in text and "Shard(0) as 3+3" in text and "0 gathered" in text
    assert runtime.active.meter is None and runtime.active.observer is None and not sent
    return text


def test_explain():
    run_on_ranks(explained, 2)


def gathers():
    mesh = world_mesh((2,))
    x = scatter_tensor(torch.randn(6, 6, dtype=torch.float64), 0, mesh, [Shard(0)])
    with pytest.warns(UserWarning, match="no rule for lu_factor|no rule for linalg_lu_factor"):
        with explain() as seen:
            torch.linalg.lu_factor(x)
    assert len(seen.gathers) == 1 and seen.gathers[0].bytes == 3 * 6 * 8
    with pytest.raises(ShardingError, match="strict"), strict():
        torch.linalg.lu_factor(x)
    with strict():
        torch.relu(x)


def test_gathers():
    run_on_ranks(gathers, 2)
