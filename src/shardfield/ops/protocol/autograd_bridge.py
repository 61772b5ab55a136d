"""Autograd's entry points on ShardTensors: `autograd.grad`, `autograd.backward`, users' `autograd.Function`s.

The graph is recorded on local tensors, so `grad` and `backward` run on those. C++ records a user's `autograd.Function`
on the tensors it is called with; for ShardTensors, a node on either side connects it with the local graph:

    local --_ToWrapper--> wrapper --the Function--> wrapper --_ToLocal--> local
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ..._compat import function_apply, module_hook_function
from ..._compat.autocast import stack
from ..._compat.patches import replace_engine_call, replace_function_apply
from ..._compat.saved import recorded_by_cpp, replace_saved_tensors
from ...comm import autograd_collectives
from ...dispatch.plan import process_groups
from ...dispatch.recorded_backward import run_engine
from ...dispatch.registry import as_operand, handler, map_tensors, run_backward, seed_gradient, to_full_tensor
from ...dispatch.saved_tensors import before_engine_run
from ...redistribute import redistribute
from ...tensor import ShardTensor, wrap
from .module_hooks import apply_hook_identity

replace_engine_call(before_engine_run, run_engine)


@handler(torch.autograd.backward)
def backward(func, types, args, kwargs):
    _backward(*args, **kwargs)


def _backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None):
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if grad_tensors is None:
        gradients = [None] * len(outputs)
    else:
        gradients = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors)
    run_backward(outputs, gradients, retain_graph, create_graph, inputs)


@handler(torch.autograd.grad)
def grad(func, types, args, kwargs):
    return _grad(*args, **kwargs)


def _grad(
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
):
    """Return gradients with the layouts of their inputs, Partial axes as Replicate."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if grad_outputs is None:
        grad_outputs = [None] * len(outputs)
    seeds = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    if is_grads_batched:
        return _batched_grad(outputs, inputs, seeds, retain_graph, create_graph, allow_unused, materialize_grads)
    # Inputs first: reading the local tensor of a sum in flight completes it.
    locals_ = [t._local_for_grad() if isinstance(t, ShardTensor) else t for t in inputs]
    pairs = [seed_gradient(o, s) for o, s in zip(outputs, seeds, strict=True)]
    meshes = tuple(t._layout.mesh for t in (*outputs, *inputs) if isinstance(t, ShardTensor))
    with runtime.observing(sharded_backward=meshes):
        grads = torch.autograd.grad(
            [local for local, _ in pairs],
            locals_,
            [seed for _, seed in pairs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )

    def placed(t: Any, g: Any) -> Any:
        if g is None or not isinstance(t, ShardTensor):
            return g
        return wrap(
            autograd_collectives.replicate_out(g, process_groups(t._layout, t._layout.partial_axes)), t._grad_layout
        )

    return tuple(placed(t, g) for t, g in zip(inputs, grads, strict=True))


def _batched_grad(outputs, inputs, seeds, retain_graph, create_graph, allow_unused, materialize):
    """Return the stacked gradients for each row of the seeds. Collectives cannot be vmapped, so rows run one by one."""
    counts = {0 if s is None or not s.ndim else s.shape[0] for s in seeds}
    if len(counts) > 1 or 0 in counts:
        shapes = [None if s is None else tuple(s.shape) for s in seeds]
        raise RuntimeError(
            f"autograd.grad: is_grads_batched needs grad_outputs with equal numbers of rows, not {shapes}"
        )
    (count,) = counts
    keep = create_graph if retain_graph is None else retain_graph
    how = {"create_graph": create_graph, "allow_unused": allow_unused, "materialize_grads": materialize}
    rows = [
        _grad(outputs, inputs, [s[i] for s in seeds], retain_graph=keep or i < count - 1, **how) for i in range(count)
    ]
    return tuple(None if grads[0] is None else stack(grads) for grads in zip(*rows, strict=True))


# ---------------------------------------------------------------------- users' Functions


class _ToWrapper(torch.autograd.Function):
    """Forward: wrap a local tensor, recorded by C++ on the wrapper. Adjoint: the local tensor of the gradient."""

    apply = function_apply

    @staticmethod
    def forward(ctx, local, source):
        ctx.layout, ctx.groups = source._grad_layout, process_groups(source._layout, source._layout.partial_axes)
        return wrap(source._local_tensor, source._layout)

    @staticmethod
    def backward(ctx, grad):
        local, layout = as_operand(grad, ctx.layout.mesh)
        return autograd_collectives.replicate_in([redistribute(local, layout, ctx.layout)], ctx.groups)[0], None


class _ToLocal(torch.autograd.Function):
    """Forward: the local tensor of a wrapper. Adjoint: wrap the gradient."""

    apply = function_apply

    @staticmethod
    def forward(ctx, wrapper):
        ctx.layout, ctx.groups = wrapper._grad_layout, process_groups(wrapper._layout, wrapper._layout.partial_axes)
        return wrapper._local_tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return wrap(autograd_collectives.replicate_out(grad, ctx.groups), ctx.layout)


class _ToPlain(torch.autograd.Function):
    """Forward: identity of a plain operand of a Function on ShardTensors. Adjoint: gather a sharded gradient."""

    apply = function_apply

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return to_full_tensor(grad) if isinstance(grad, ShardTensor) else grad


def make_apply(before: Any) -> Any:
    """Return the `Function.apply` that calls `apply` for ShardTensors, and torch's own, `before`, for all others."""

    def apply_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = before.__get__(None, function)
        for arg in args:
            if isinstance(arg, ShardTensor):
                registry = runtime.active.registry
                name = f"{function.__module__}.{function.__qualname__}"
                known = registry.handlers.get(function) or registry.named.get(name)
                if known is not None:  # registered by `shardfield.stencil` or `local`, or by name
                    return known(function, (ShardTensor,), args, kwargs)
                return apply(function, plain, *args, **kwargs)
        return plain(*args, **kwargs)

    return classmethod(apply_function)


def apply(function: Any, plain: Callable, *args: Any, **kwargs: Any) -> Any:
    """Apply a Function to ShardTensors; `plain` is torch's own `apply` of it."""
    needed = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    if not needed or not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    if function is module_hook_function:
        return apply_hook_identity(*args)

    def record(value: Any) -> Any:
        if isinstance(value, ShardTensor) and value.requires_grad:
            value._consumed = True
            return _ToWrapper.apply(value._local_tensor, value)
        if isinstance(value, Tensor) and not isinstance(value, ShardTensor) and value.requires_grad:
            return _ToPlain.apply(value)
        return value

    replace_saved_tensors(function, with_graph)
    runtime.active.bridge_depth += 1
    try:
        out = plain(*[record(a) for a in args], **kwargs)
    finally:
        runtime.active.bridge_depth -= 1
    return map_tensors(out, lambda t: wrap(_ToLocal.apply(t), t._layout) if isinstance(t, ShardTensor) else t)


def with_graph(saved: Any) -> Any:
    """Return a tensor that a Function saved, with its graph on the local tensor.

    Of a result, and of an operand that went through saved-tensor hooks, torch restores the graph of the wrapper only: a
    checkpoint inside would not see that it requires grad, and second derivatives would lack its part.
    """
    if not isinstance(saved, ShardTensor) or saved.requires_grad or not recorded_by_cpp(saved):
        return saved
    with torch.enable_grad():
        return wrap(_ToLocal.apply(saved), saved._layout)


replace_function_apply(make_apply)
