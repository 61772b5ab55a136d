"""Data-parallel training that runs unchanged on one process or many.

python examples/train_ddp.py
torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
mpirun -np 2 python examples/train_ddp.py
srun -n 2 python examples/train_ddp.py
"""

import torch
from shardfield.models.mlp.fully_connected import FullyConnected
from torch.nn.parallel import DistributedDataParallel

from shardfield.distributed import DistributedManager


def main():
    # Initialize the DistributedManager. This will automatically
    # detect the number of processes the job was launched with and
    # set those configuration parameters appropriately. Currently
    # torchrun (or any other pytorch compatible launcher), mpirun (OpenMPI)
    # and SLURM based launchers are supported.
    DistributedManager.initialize()

    # Since this is a singleton class, you can just get an instance
    # of it anytime after initialization and not need to reinitialize
    # each time.
    dist = DistributedManager()

    # Set up model on the appropriate device. DistributedManager
    # figures out what device should be used on this process
    arch = FullyConnected(in_features=32, out_features=64).to(dist.device)

    # Set up DistributedDataParallel if using more than a single process.
    # The `distributed` property of DistributedManager can be used to
    # check this.
    if dist.distributed:
        # A CPU has no streams: there, None makes the context do nothing.
        ddps = torch.cuda.Stream() if dist.cuda else None
        with torch.cuda.stream(ddps):
            arch = DistributedDataParallel(
                arch,
                # On a GPU, set the device_id to be the local rank of this process on this node
                device_ids=[dist.local_rank] if dist.cuda else None,
                output_device=dist.device if dist.cuda else None,
                broadcast_buffers=dist.broadcast_buffers,
                find_unused_parameters=dist.find_unused_parameters,
            )
        if dist.cuda:
            torch.cuda.current_stream().wait_stream(ddps)

    # Set up the optimizer
    optimizer = torch.optim.Adam(
        arch.parameters(),
        lr=0.001,
    )

    def training_step(input, target):
        optimizer.zero_grad()
        pred = arch(input)
        loss = torch.sum(torch.pow(pred - target, 2))
        loss.backward()
        optimizer.step()
        return loss

    # Sample training loop
    for i in range(20):
        # Random inputs and targets for simplicity
        input = torch.randn(128, 32, device=dist.device)
        target = torch.randn(128, 64, device=dist.device)

        # Training step
        loss = training_step(input, target)
        if dist.rank == 0:
            print(f"step {i + 1:2d} of 20 on {dist.world_size} x {dist.device}: loss {loss.item():.1f}")


if __name__ == "__main__":
    main()
