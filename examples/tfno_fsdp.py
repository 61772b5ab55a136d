"""Scale TFNO training with Fully Sharded Data Parallel (FSDP): samples and parameters are sharded over the ranks.

torchrun --standalone --nproc-per-node 2 examples/tfno_fsdp.py
"""

import argparse
from itertools import islice

import torch
from neuralop import H1Loss, LpLoss
from neuralop.models import TFNO
from neuralop.utils import count_model_params
from torch.distributed.fsdp import FullyShardedDataParallel

from shardfield.data import Darcy, ShardedLoader, UnitGaussian
from shardfield.distributed import DistributedManager
from shardfield.train import real_pairs


def load_darcy_flow_small(mesh, n_train, batch_size, test_resolutions, n_tests):
    """Return train and test loaders and normalizers. Samples are generated on first use and sharded over the ranks."""

    def loader(n, resolution, start, **options):
        darcy = Darcy(n, resolution=resolution, fine=91, start=start, cache="cache").prepare(mesh)
        return ShardedLoader(darcy, batch_size, mesh, **options)

    train_loader = loader(n_train, test_resolutions[0], 0, drop_last=True)
    test_loaders = {r: loader(n, r, n_train, shuffle=False) for r, n in zip(test_resolutions, n_tests, strict=True)}
    return train_loader, test_loaders, {key: UnitGaussian.fit(train_loader, key).to(mesh.device_type) for key in "xy"}


def benchmark(rank, args, world_size):
    device = DistributedManager().device
    mesh = DistributedManager().initialize_mesh((world_size,), mesh_dim_names=("data",))
    train_loader, test_loaders, data_processor = load_darcy_flow_small(
        mesh, n_train=32, batch_size=4, test_resolutions=[16, 46], n_tests=[8, 8]
    )
    torch.manual_seed(0)
    model = TFNO(n_modes=(12, 12), hidden_channels=16, in_channels=1, out_channels=1, factorization="tucker", rank=0.42)
    model = real_pairs(model.to(device))  # FSDP needs parameters of one dtype, and spectral weights are complex
    n_params = count_model_params(model)
    model = FullyShardedDataParallel(model, device_id=device)

    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    l2loss, h1loss = LpLoss(d=2, p=2), H1Loss(d=2)
    train_loss, eval_losses = h1loss, {"h1": h1loss, "l2": l2loss}

    def predict(sample):
        return data_processor["y"].inverse_transform(model(data_processor["x"].transform(sample["x"])))

    for epoch in range(args.epochs):
        model.train()
        for sample in islice(train_loader, args.max_batch):
            optimizer.zero_grad()
            train_loss(predict(sample), sample["y"]).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        for resolution, loader in test_loaders.items():
            with torch.no_grad():  # each loss is a sum over samples
                losses = [[loss(predict(s), s["y"]) for loss in eval_losses.values()] for s in loader.sweep()]
            sums = torch.tensor(losses, device=device).sum(0)
            torch.distributed.all_reduce(sums)
            if rank == 0:
                means = [f"{name} {v / len(loader.dataset):.4f}" for name, v in zip(eval_losses, sums, strict=True)]
                print(f"epoch {epoch}, {resolution} x {resolution}:", *means)
    print(f"rank {rank} holds {sum(p.numel() for p in model.parameters())} of {n_params} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="benchmark")
    parser.add_argument("--max_batch", type=int, default=4, help="Max number of batches")
    parser.add_argument("--epochs", type=int, default=4)
    DistributedManager.initialize()
    benchmark(DistributedManager().rank, parser.parse_args(), DistributedManager().world_size)
