"""A virtual rank's copy of a model: modules and buffers of its own, and the memory of the caller's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm

from ..comm.grad_deferral import defer_to_average
from ..errors import ShardfieldError
from ..tensor import ShardTensor
from .segment import recomputed

_PLAIN = (int, float, complex, str, bool, type(None))


class Replica:
    """A rank's copy of a model.

    Each rank needs modules of its own, since programs of several ranks are under way at the same time, parameters of
    its own, since each has a gradient of its own, and buffers of its own, since each rank updates them. Parameters
    share the memory of the caller's.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, recompute: bool, on_grad: Callable[[Tensor, Tensor], None]):
        self.mesh = mesh
        self.originals = dict(model.named_parameters())
        memo: dict[int, Any] = {}
        for name, parameter in self.originals.items():
            if is_lazy(parameter) or type(parameter) is not nn.Parameter:
                raise ShardfieldError(
                    f"virtualize: parameter {name} is a {type(parameter).__name__}, and only nn.Parameter is supported"
                    "; call a model with lazy modules once before"
                )
            memo[id(parameter)] = nn.Parameter(parameter.data, parameter.requires_grad)
        self.parameters = {name: memo[id(p)] for name, p in self.originals.items()}
        memo |= {id(weight): weight.detach().clone() for weight in _normed_weights(model)}
        self.model = copy.deepcopy(model, memo)
        for name, parameter in self.parameters.items():
            defer_to_average(parameter, [mesh.get_group()])  # no message in backward: the caller sums
            parameter._summed_by_virtualize = True  # type: ignore[attr-defined]
            original = self.originals[name]
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(lambda mine, of=original: on_grad(of, mine))
        if recompute:
            for block in blocks_of(self.model):
                block.forward = recomputed(block)  # type: ignore[method-assign]

    def update(self, model: nn.Module) -> None:
        """Take over the caller's parameters, buffers and training modes."""
        for name, original in self.originals.items():
            mine = self.parameters[name]
            mine.data, mine.grad = original.data, None
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
        for copied, module in zip(self.model.modules(), model.modules(), strict=True):
            copied.training = module.training

    def gather_buffers(self) -> None:
        """Make plain tensors of buffers that the model has replaced by ShardTensors. Every rank calls it."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, ShardTensor):
                    module._buffers[name] = buffer.detach().full_tensor()

    def return_buffers(self, model: nn.Module) -> None:
        """Give the caller's model the buffers of this rank, which are those of every rank."""
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            theirs.copy_(mine)


def _normed_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights that `nn.utils.weight_norm` computes before each call: deepcopy refuses them."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                yield getattr(module, hook.name)


def settings_of(model: nn.Module) -> list[Any]:
    """Return what a model is made of except for the values of its tensors: replicas are made anew when it changes."""
    parameters = model.named_parameters(remove_duplicate=False)
    found: list[Any] = [sorted((name, id(p), p.requires_grad) for name, p in parameters)]
    for name, module in model.named_modules():
        plain = {k: _copied(v) for k, v in vars(module).items() if k != "training" and _is_setting(v)}
        hooks = {k: list(v) for k, v in vars(module).items() if k.endswith("_hooks") and v}
        buffers = [(k, b.shape, b.dtype) for k, b in module.named_buffers(recurse=False)]
        found.append((name, id(module), plain, hooks, buffers))
    return found


def _is_setting(value: Any) -> bool:
    """Return whether an attribute is a number, a text, a function, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_setting, value))
    return isinstance(value, _PLAIN) or callable(value)


def _copied(value: Any) -> Any:
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the children of a model that are called, and those of lists among them: the units of recomputing."""
    found: list[nn.Module] = []
    for child in model.children():
        if type(child).forward is nn.Module.forward:  # a ModuleList or ModuleDict
            found += blocks_of(child)
        else:
            found.append(child)
    return found
