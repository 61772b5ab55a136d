"""What DistributedDataParallel sends and keeps, for steps that are only counted.

Its reducer reaches into the memory of gradients, and tensors without data have none. So there the buckets are laid out
as it lays them out, and each is summed when the last of its gradients has come.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

FIRST, LATER = 1 << 20, 25 << 20  # DDP's limits: its first bucket is small, so that messages begin early


class Buckets:
    """The buckets of a model's gradients, filled from the last parameter to the first, one dtype each."""

    def __init__(self, model: nn.Module, group: ProcessGroup):
        self.group = group
        self.left: list[int] = []  # gradients still to come, by bucket
        self.counts: list[int] = []
        self.flat: list[Tensor] = []
        open_: dict[torch.dtype, list[Tensor]] = {}
        limits: dict[torch.dtype, int] = {}
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            filling = open_.setdefault(parameter.dtype, [])
            filling.append(parameter)
            if sum(p.numel() * p.element_size() for p in filling) >= limits.get(parameter.dtype, FIRST):
                self._close(open_.pop(parameter.dtype))
                limits[parameter.dtype] = LATER
        for filling in open_.values():
            self._close(filling)
        self.buffers: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            self.buffers.setdefault(buffer.dtype, []).append(buffer)
        model.register_forward_pre_hook(self._share_buffers)

    def _close(self, parameters: list[Tensor]) -> None:
        number = len(self.flat)
        self.flat.append(parameters[0].new_empty(sum(p.numel() for p in parameters)))
        self.counts.append(len(parameters))
        self.left.append(len(parameters))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._came(number))

    def _came(self, number: int) -> None:
        self.left[number] -= 1
        if not self.left[number]:
            self.left[number] = self.counts[number]
            dist.all_reduce(self.flat[number], group=self.group)

    def _share_buffers(self, module: nn.Module, args: Any) -> None:
        """DDP gives all ranks the buffers of the first before each forward."""
        for buffers in self.buffers.values():
            flat = torch.cat([b.reshape(-1) for b in buffers])
            dist.broadcast(flat, group_src=0, group=self.group)
