"""Record a fingerprint of every module's output and every parameter's gradient, for `shardfield compare --modules`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import collectives
from ..dispatch.arguments import map_tensors
from ..tensor import ShardTensor

FILE = "modules.jsonl"


class ModuleRecorder:
    """Write one line per step to `modules.jsonl`: the fingerprints of outputs in call order, then of gradients.

    A fingerprint is (sum, sum of squares, number of elements) of the global tensor over the samples of all data ranks,
    in float64. It does not depend on the mesh, the shard sizes or the strategy. `begin(step)` arms the recorder for one
    step, `finish()` after backward writes the line; all ranks make both calls. The recorder sends messages and reads
    values: a recorded step is slow.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, folder: Path):
        self.model, self.path = model, folder / FILE
        self._data = mesh.get_group("data")
        self._step: int | None = None
        self._in_forward = False  # activation checkpointing calls modules again in backward
        self._outputs: list[tuple[str, Tensor]] = []
        model.register_forward_pre_hook(self._enter)
        for name, module in model.named_modules():
            if name not in ("", "module"):  # "module": the model inside DDP
                module.register_forward_hook(self._hook(name.removeprefix("module.")))
        model.register_forward_hook(self._leave)

    def begin(self, step: int) -> None:
        """Record the calls of the model from here on, as those of `step`."""
        self._step, self._outputs = step, []

    def finish(self) -> None:
        """Write the line of this step; gradients are complete and not yet clipped."""
        outputs = torch.stack([s for _, s in self._outputs]) if self._outputs else torch.zeros(0, 3).double()
        outputs = collectives.all_reduce(outputs, self._data).tolist()
        gradients = {}
        for name, parameter in reversed(list(self.model.named_parameters())):
            grad = parameter.grad
            if grad is not None:
                full = grad.full_tensor() if isinstance(grad, DTensor) else grad
                gradients[name.removeprefix("module.")] = _fingerprint(full).tolist()
        names = [name for name, _ in self._outputs]
        line = {"step": self._step, "outputs": list(zip(names, outputs, strict=True)), "gradients": gradients}
        if dist.get_rank() == 0:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
        self._step = None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._in_forward = self._step is not None

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._in_forward = False

    def _hook(self, name: str) -> Callable:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if self._in_forward:
                title = f"{name} ({_type_name(module)})"
                map_tensors(out, lambda tensor: self._outputs.append((title, _fingerprint(tensor))))

        return hook


def _type_name(module: nn.Module) -> str:
    """Return the name of a module's class; FSDP puts its own in front."""
    return type(module).__name__.removeprefix("FSDP")


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    value = value.double()
    count = torch.tensor(float(value.numel()), dtype=torch.float64, device=value.device)
    return torch.stack([_total(value), _total(value.square()), count])


def _total(value: Tensor) -> Tensor:
    total = value.sum()
    return total.full_tensor() if isinstance(total, ShardTensor) else total
