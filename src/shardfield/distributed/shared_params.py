"""Parameters that several ranks share, each on its own part of the data: sum their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from .. import runtime
from ..comm import collectives
from .manager import DistributedManager
from .vcollective_args import resolve_group


def mark_module_as_shared(
    module: nn.Module, process_group: str | None, recurse: bool = True, use_fp32_reduction: bool = True
) -> nn.Module:
    """Sum the gradients of the module's parameters over the group of that name (None: all ranks), in backward.

    Every backward pass adds the sum over all ranks to `.grad`, so passes may be accumulated; DDP over other ranks
    reduces afterwards. A module may be marked for several groups. Every rank of a group must use the same parameters in
    a backward pass. Half precision is summed in fp32; with `use_fp32_reduction=False` it is sent in half precision,
    which halves the bytes and rounds once more.
    """
    group, size, _ = resolve_group(DistributedManager().group(process_group))
    named = list(module.named_parameters(recurse=recurse))
    hooks = runtime.active.reduce_hooks  # not on the parameter, so that a marked model can be pickled
    for name, parameter in named:
        if process_group in hooks.get(parameter, {}):
            raise RuntimeError(f"parameter {name} is marked as shared over {process_group!r} already")
    for _, parameter in named:
        marks = hooks.setdefault(parameter, {})
        marks[process_group] = _register_reduce_hook(parameter, group if size > 1 else None, use_fp32_reduction)
    return module


def unmark_module_as_shared(module: nn.Module, recurse: bool = True) -> nn.Module:
    """Undo every `mark_module_as_shared` of the module's parameters."""
    named = list(module.named_parameters(recurse=recurse))
    hooks = runtime.active.reduce_hooks
    for name, parameter in named:
        if parameter not in hooks:
            raise RuntimeError(f"parameter {name} is not marked as shared")
    for _, parameter in named:
        for handle in hooks.pop(parameter).values():
            handle.remove()
    return module


def _register_reduce_hook(parameter: nn.Parameter, group: ProcessGroup | None, use_fp32: bool) -> RemovableHandle:
    """Register a hook on the gradient before it is added to `.grad`; a later hook would sum earlier passes again."""

    def hook(grad: Tensor) -> Tensor:
        if group is None:
            return grad
        return collectives.all_reduce(grad, group) if use_fp32 else collectives.all_reduce_half(grad, group)

    # A frozen parameter may be unfrozen later, and torch refuses hooks on frozen ones.
    frozen = not parameter.requires_grad
    with torch.no_grad():
        parameter.requires_grad_(True)
        handle = parameter.register_hook(hook)
        parameter.requires_grad_(not frozen)
    return handle
