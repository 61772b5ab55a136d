"""Data-parallel training that runs unchanged under python, torchrun, mpirun and srun.

torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
"""

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from shardfield.distributed import DistributedManager
from shardfield.models.mlp.fully_connected import FullyConnected

warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # torch 2.13 is about to rename it


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
        ddps = torch.cuda.Stream() if dist.cuda else None  # a CPU has no streams
        with torch.cuda.stream(ddps):
            arch = DistributedDataParallel(
                arch,
                device_ids=[dist.local_rank] if dist.cuda else None,  # Set the device_id to be
                # the local rank of this process on this node
                output_device=dist.device if dist.cuda else None,
                broadcast_buffers=dist.broadcast_buffers,
                find_unused_parameters=dist.find_unused_parameters,
            )
        if dist.cuda:
            torch.cuda.current_stream().wait_stream(ddps)

    # Set up the optimizer
    optimizer = torch.optim.Adam(arch.parameters(), lr=0.001)

    def training_step(input, target):
        optimizer.zero_grad()
        pred = arch(input)
        loss = torch.sum(torch.pow(pred - target, 2))
        loss.backward()
        optimizer.step()
        return loss

    # Sample training loop
    for _ in range(20):
        # Random inputs and targets for simplicity
        input = torch.randn(128, 32, device=dist.device)
        target = torch.randn(128, 64, device=dist.device)

        # Training step
        loss = training_step(input, target)

    # Targets are noise, so the loss stays at their variance; ranks end with the same parameters
    norm = torch.nn.utils.parameters_to_vector(arch.parameters()).norm().item()
    print(f"rank {dist.rank} of {dist.world_size} on {dist.device}: loss {loss.item():.1f}, |parameters| {norm:.6f}")


if __name__ == "__main__":
    main()
