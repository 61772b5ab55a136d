"""Run an unmodified TFNO of neuraloperator on a field that is sharded along its rows; print results and bytes sent.

torchrun --nproc-per-node 2 examples/tfno.py
"""

from collections import Counter

import torch
from neuralop.losses import LpLoss
from neuralop.models import TFNO
from torch.distributed.tensor import Shard

from shardfield import explain, scatter_tensor
from shardfield.distributed import DistributedManager


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), mesh_dim_names=("rows",))

    torch.manual_seed(0)  # the same model on every rank
    model = TFNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2, rank=0.3).to(
        manager.device
    )
    field, target = torch.randn(2, 1, 1, 64, 64, device=manager.device).unbind()
    x, y = (scatter_tensor(t, 0, mesh, (Shard(2),)) for t in (field, target))

    with explain() as report:
        out = model(x)
        loss = LpLoss(d=2)(out, y)
        loss.backward()
    single = LpLoss(d=2)(model(field), target)
    sent: Counter[str] = Counter()
    for row in report.rows:
        if row.bytes and row.module:
            sent[row.module.split("/")[-1]] += row.bytes
    print(f"rank {manager.rank}: {tuple(out.to_local().shape)} of {tuple(out.shape)}, {out.placements}")
    print(f"rank {manager.rank}: loss {loss.item():.4f}, on one device {single.item():.4f}; forward bytes {dict(sent)}")


if __name__ == "__main__":
    main()
