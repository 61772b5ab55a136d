"""Run a model once for `check`: outputs, gradients, parameters and buffers, what it sends, and its work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import runtime
from ..dispatch.arguments import map_tensors
from .differences import is_number
from .explain import explain
from .model_inputs import Inputs
from .work import WorkCounter

Value = tuple[str, str, Any]  # kind, name, tensor or None


class ModelRun:
    """One run of a model, forward and backward, and steps of gradient descent.

    values: everything that is compared, by kind and name. parts: outputs of submodules in call order. is_random:
    whether the forward and backward drew random numbers. report: of this forward and backward.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, seed: int, steps: int):
        self.model, self.inputs, self.seed = model, inputs, seed
        self.parts: list[tuple[str, Any]] = []
        handles = [m.register_forward_hook(self._watch(n)) for n, m in model.named_modules() if n]
        with explain() as self.report:
            leaves, outputs, self.is_random = _forward_backward(model, inputs, seed, handles)
        # Calls of the hooks above, which the model does not make.
        self.report.rows = [row for row in self.report.rows if row.op != "detach" or row.messages]
        self.values: list[Value] = [("output", str(i), v.detach()) for i, v in enumerate(outputs)]
        self.values += [("input gradient", path, t.grad) for path, t in leaves.tensors().items()]
        self.values += [("parameter gradient", n, p.grad) for n, p in model.named_parameters()]
        self.values += [("buffer", n, b.clone()) for n, b in model.named_buffers()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if steps else None
        for step in range(steps):
            assert optimizer is not None
            if step:  # the first step uses the gradients above
                optimizer.zero_grad()
                _forward_backward(model, inputs, seed)
            optimizer.step()
        if steps:
            self.values += [("parameter after", n, p.detach()) for n, p in model.named_parameters()]
            self.values += [("buffer after", n, b.clone()) for n, b in model.named_buffers()]

    def count_work(self) -> int:
        """Return the work of one more forward and backward, after the values have been taken.

        The first one also plans: it reads index tensors and tables that later steps find in caches.
        """
        self.model.zero_grad()
        work = WorkCounter()
        _forward_backward(self.model, self.inputs, self.seed, counter=work)
        return work.total

    def _watch(self, name: str) -> Callable:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            title = f"{name} ({type(module).__name__})"
            map_tensors(_to_nested(out), lambda tensor: self.parts.append((title, tensor.detach())))

        return runtime.of_this_rank(hook)


def _forward_backward(
    model: nn.Module, inputs: Inputs, seed: int, handles: Sequence[Any] = (), counter: WorkCounter | None = None
) -> tuple[Inputs, list[Tensor], bool]:
    """Return inputs with gradients, outputs, and whether random numbers were drawn; remove the hooks after forward."""
    leaves = inputs.map(lambda path, t: t.detach().requires_grad_() if is_number(t) else t)
    random.seed(seed + 1)
    np.random.seed(seed + 1)
    torch.manual_seed(seed + 1)
    state = torch.get_rng_state()
    with counter or nullcontext():
        out = leaves.call(model)
    for handle in handles:
        handle.remove()
    outputs: list[Tensor] = []
    map_tensors(_to_nested(out), outputs.append)
    total: Any = 0.0
    for i, value in enumerate(outputs):
        if value.requires_grad:
            real = value.abs().square() if value.is_complex() else value
            generator = torch.Generator().manual_seed(seed + 2 + i)
            total = total + (real * torch.randn(value.shape, dtype=real.dtype, generator=generator)).sum()
    if isinstance(total, Tensor):
        with counter or nullcontext():
            total.backward()
    return leaves, outputs, not torch.equal(state, torch.get_rng_state())


def _to_nested(out: Any) -> Any:
    """Convert output objects that contain tensors, such as dataclasses, to lists."""
    if hasattr(out, "to_tuple"):
        return list(out.to_tuple())
    return list(vars(out).values()) if hasattr(out, "__dataclass_fields__") else out
