"""Full backward hooks of modules whose inputs or outputs are ShardTensors.

torch passes a module's inputs and outputs through an identity Function, finds the node of that Function by its name and
hooks it. Here an identity of the same name is recorded on the local tensors, and its hooks are wrapped so that they get
ShardTensors with the layouts of the inputs or outputs. DDP, too, is told where the graph of a module's outputs is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import function_apply, set_node_hook
from ..._compat.patches import check_legacy_backward_hooks, replace_ddp_outputs
from ...dispatch.registry import as_operand, map_tensors, to_full_tensor
from ...dispatch.write_tracking import set_copied_view
from ...errors import ShardingError
from ...layout import Layout
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap

Layouts = tuple[Layout | None, ...]


class BackwardHookFunction(torch.autograd.Function):
    """Forward and adjoint: identity of local and plain tensors. `layouts` of the gradients: None for plain."""

    apply = function_apply

    @staticmethod
    def forward(ctx, layouts, *tensors):
        ctx.layouts = layouts
        ctx.mark_non_differentiable(*[t for t in tensors if not t.requires_grad])
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


def apply_hook_identity(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Run torch's `BackwardHookFunction.apply` on tensors that include ShardTensors."""
    layouts = tuple(t._grad_layout if isinstance(t, ShardTensor) else None for t in tensors)
    passed = BackwardHookFunction.apply(
        layouts, *[t._local_tensor if isinstance(t, ShardTensor) else t for t in tensors]
    )
    return tuple(_rewrap(t, p) if isinstance(t, ShardTensor) else p for t, p in zip(tensors, passed, strict=True))


def _rewrap(tensor: ShardTensor, local: Tensor) -> ShardTensor:
    if not tensor.requires_grad:
        return tensor
    made = wrap(local, tensor._layout)
    set_copied_view(made, tensor._copied_view)
    made._narrowed = tensor._narrowed
    return made


def _wrap_hook(layouts: Layouts, hook: Callable) -> Callable:
    """Turn a hook on ShardTensors into a hook on the local gradients of the node."""

    def run(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Any:
        changed = hook(_wrap_grads(grad_inputs, layouts), _wrap_grads(grad_outputs, layouts))
        if changed is None:
            return None
        return tuple(_grad_to_local(g, layout) for g, layout in zip(changed, layouts, strict=True))

    return run


def _wrap_grads(grads: Sequence[Tensor | None], layouts: Layouts) -> tuple[Tensor | None, ...]:
    return tuple(
        g if g is None or layout is None else wrap(g, layout) for g, layout in zip(grads, layouts, strict=True)
    )


def _grad_to_local(grad: Tensor | None, layout: Layout | None) -> Tensor | None:
    if grad is None:
        return None
    if layout is None:
        return to_full_tensor(grad) if isinstance(grad, ShardTensor) else grad
    if grad.shape != layout.shape:
        raise RuntimeError(f"a backward hook returned a gradient of shape {tuple(grad.shape)} for {layout}")
    local, now = as_operand(grad, layout.mesh)
    return redistribute(local, now, layout)


def _refuse_old_hooks(module: nn.Module, inputs: Any, result: Any) -> None:
    found: list[Tensor] = []
    map_tensors((inputs, result), lambda t: found.append(t) if isinstance(t, ShardTensor) else None)
    if found:
        raise ShardingError(
            f"{type(module).__name__}: register_backward_hook returns gradients of the last local call, not of the "
            f"module, if its tensors are sharded; use register_full_backward_hook"
        )


set_node_hook(BackwardHookFunction, lambda node, hook: _wrap_hook(node.layouts, hook))
check_legacy_backward_hooks(_refuse_old_hooks)
replace_ddp_outputs(ShardTensor, lambda result: result._local_tensor)
