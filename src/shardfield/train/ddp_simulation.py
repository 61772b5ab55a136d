"""Send the messages of DistributedDataParallel in a simulated step.

DDP's reducer accesses the memory of gradients, and fake tensors have none. `SimulatedDDP` fills the same buckets in the
same order and all-reduces each of them when its last gradient is ready. Its messages go to torch.distributed directly,
as those of DDP do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# DDP's limits: its first bucket is small, so that communication starts early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


class SimulatedDDP:
    """The buckets of a model's gradients, filled from the last parameter to the first, one dtype each."""

    def __init__(self, model: nn.Module, group: ProcessGroup):
        self.group = group
        self.pending: list[int] = []  # gradients that are not ready yet, by bucket
        self.bucket_counts: list[int] = []
        self.flat_buckets: list[Tensor] = []
        open_: dict[torch.dtype, list[Tensor]] = {}
        limits: dict[torch.dtype, int] = {}
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            filling = open_.setdefault(parameter.dtype, [])
            filling.append(parameter)
            if sum(p.numel() * p.element_size() for p in filling) >= limits.get(parameter.dtype, FIRST_BUCKET_BYTES):
                self._close_bucket(open_.pop(parameter.dtype))
                limits[parameter.dtype] = BUCKET_BYTES
        for filling in open_.values():
            self._close_bucket(filling)

    def _close_bucket(self, parameters: list[Tensor]) -> None:
        number = len(self.flat_buckets)
        self.flat_buckets.append(parameters[0].new_empty(sum(p.numel() for p in parameters)))
        self.bucket_counts.append(len(parameters))
        self.pending.append(len(parameters))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._gradient_ready(number))

    def _gradient_ready(self, number: int) -> None:
        self.pending[number] -= 1
        if not self.pending[number]:
            self.pending[number] = self.bucket_counts[number]
            dist.all_reduce(self.flat_buckets[number], group=self.group)
