"""Attention on a sharded sequence: memory and bytes of each strategy, by the number of ranks.

One simulated rank of a world of P ranks, forward and backward, without data: its messages are counted and not sent, and
memory is what its tensors would take, inputs and gradients included. 65,536 tokens, 8 heads of 128 features, float32.
Heads can be sharded over at most 8 ranks.

What is found. The memory of a ring and of sharded heads falls with the ranks, from 1.9 GB on one device to 0.94 and
0.37 GB on 8 ranks; on 2 ranks a ring takes 2.6 GB. Gathered keys, values and their gradients are 2.1 GB on every rank.
A ring sends keys and values twice and their gradients once, 1.5 times the bytes of a gather. What sharded heads send
falls with the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from ..debug import explain
from ..layout import Layout
from ..ops.attention import attention_strategy
from ..planning import simulated, watch, without_data
from ..tensor import ShardTensor
from .ranks import rank_label
from .table import Table

STRATEGIES = ("ring", "heads", "gather")


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    length: int = 65536
    heads: int = 8
    width: int = 128

    quick: ClassVar[dict[str, Any]] = {"length": 1024, "ranks": (1, 2)}


def count(strategy: str, ranks: int, settings: Settings) -> tuple[int, int]:
    """Return the peak memory of a rank and the bytes that it sends, forward and backward."""
    with simulated(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
        layout = Layout.of(mesh, [Shard(2)], (1, settings.heads, settings.length, settings.width))
        with without_data(), watch() as seen, explain.explain() as report, attention_strategy(strategy):
            q, k, v = (ShardTensor(torch.zeros(layout.local_shape, requires_grad=True), layout) for _ in range(3))
            F.scaled_dot_product_attention(q, k, v).sum().backward()
            return seen.peak, report.bytes


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        names = [name for name in STRATEGIES if name != "heads" or settings.heads % ranks == 0]
        counts = {name: count(name, ranks, settings) for name in names}
        table.add_counts(f"{rank_label(ranks)}: memory", {n: c[0] for n, c in counts.items()}, "MB")
        table.add_counts(f"{rank_label(ranks)}: sent", {n: c[1] for n, c in counts.items()}, "MB")
