"""The process world of a command: started before it runs, ended after it, also without a launcher."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .manager import DistributedManager


@contextmanager
def process_world() -> Iterator[DistributedManager]:
    """Initialize the manager, and end its world with the block.

    A process that no launcher started gets a world of one rank, so that meshes and collectives work there too.
    """
    DistributedManager.initialize()
    alone = not dist.is_initialized()
    try:
        if alone:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield DistributedManager()
    finally:
        DistributedManager.cleanup()
        if alone and dist.is_initialized():
            dist.destroy_process_group()
