"""Dispatch a torch call on ShardTensors: run a rule, fall back to a gather, or refuse.

The registry (`runtime.Registry`) maps a function object to its handler. `@rule` registers a pure planner (see
`dispatch/plan.py`); `dispatch/executor.py` looks its plans up and runs them. `@composed` registers a function with the
parameters of the torch function, written in terms of other torch calls. `@handler` does the same with the arguments as
`__torch_function__` receives them. A torch function that is implemented in Python and has no entry runs its own body,
so that the calls inside it dispatch. The operands of any other function are gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import runtime
from .._compat import OpOverload, OpOverloadPacket, select_overload, without_override_check
from .._compat.engine import backward
from ..comm import autograd_collectives
from ..errors import ShardingError
from ..redistribute import redistribute
from ..tensor import Deferred, ShardTensor, torch_function, wrap
from .arguments import as_operand, map_tensors, to_full_tensor
from .arguments import mark_consumed as mark_consumed
from .arguments import mesh_of as mesh_of
from .arguments import write_out as write_out
from .executor import Handler, make_handler
from .fallback import gather_fallback as gather_fallback
from .plan import process_groups
from .torch_aliases import aliases, function_name, torch_aliases

ALIAS_OPS = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}


# ---------------------------------------------------------------------- registering


def _function_aliases(function: Any, exact: bool) -> Iterable[Any]:
    return (function,) if exact else aliases(function)


# Called as `accept(handler, func, types, args, kwargs)` for a call whose first tensor is deferred; `handler` is the
# ordinary one, which materializes its operands.
DeferredHandler = Callable[[Handler, Any, Sequence[type], tuple, dict], Any]
AcceptsDeferred = Mapping[type[Deferred], DeferredHandler]
Around = Callable[[Handler], Handler]


def _compose(run: Handler, accepts_deferred: AcceptsDeferred | None, around: Around | None) -> Handler:
    """Return the handler `run`, preceded by the handlers of deferred operands and by `around`."""
    if around is not None:
        run = around(run)
    if not accepts_deferred:
        return run

    def accept(func, types, args, kwargs):
        first = args[0] if args else kwargs.get("input")
        if first.__class__ is ShardTensor and first._deferred is not None:
            found = accepts_deferred.get(first._deferred.__class__)
            if found is not None:
                return found(run, func, types, args, kwargs)
        return run(func, types, args, kwargs)

    return accept


def rule(
    *functions: Any,
    partial: bool = False,
    merged: bool = False,
    exact: bool = False,
    accepts_deferred: AcceptsDeferred | None = None,
    around: Around | None = None,
) -> Callable[[Callable], Callable]:
    """Register a pure planner for torch functions (and their method forms; `exact`: for these objects alone).

    The planner's parameters are the function's; a keyword-only `fn` receives the function that was called. Before the
    planner runs, Partial operands are reduced, unless `partial` is set. Dims that merge several sharded ones are
    resharded to one contiguous sharding, unless `merged` is set.

    `accepts_deferred`: class of a deferred value -> the handler of calls whose first tensor is such a value. `around`
    gets the planner's handler and returns the one to register, for operands that no plan takes (sparse matrices).
    """

    def register(planner: Callable) -> Callable:
        for function in functions:
            for alias in _function_aliases(function, exact):
                run = make_handler(planner, partial, merged, is_torch_function=True)
                run = _compose(run, accepts_deferred, around)
                runtime.active.registry.register(alias, run, planner)
        return planner

    return register


def handler(
    *functions: Any, exact: bool = False, accepts_deferred: AcceptsDeferred | None = None
) -> Callable[[Callable], Callable]:
    """Register a function `(func, types, args, kwargs)` written in terms of other calls on ShardTensors."""

    def register(function_handler: Callable) -> Callable:
        for function in functions:
            for alias in _function_aliases(function, exact):
                run = _compose(function_handler, accepts_deferred, None)
                runtime.active.registry.register(alias, run, function_handler)
        return function_handler

    return register


def composed(*functions: Any, exact: bool = False) -> Callable[[Callable], Callable]:
    """Register a Python function with the torch function's parameters, written in terms of other torch calls."""

    def register(body: Callable) -> Callable:
        def call_body(func, types, args, kwargs):
            return body(*args, **kwargs)

        for function in functions:
            for alias in _function_aliases(function, exact):
                runtime.active.registry.register(alias, call_body, body)
        return body

    return register


def register(func: Any, function_handler: Handler) -> None:
    """Set the handler of exactly this function object. It replaces any rule and drops the plans made with it."""
    runtime.active.registry.register(func, function_handler)


def handler_of(func: Any) -> Handler:
    """Return the handler that is registered for a function object."""
    return runtime.active.registry.handlers[func]


# ---------------------------------------------------------------------- dispatch


def resolve(func: Any) -> Handler:
    """Return the handler of a function that is not registered: by name, its Python body, or a gather.

    An operator (`torch.ops.aten.softmax.int`) has the handler of torch's C function, which takes the same arguments.
    """
    registry = runtime.active.registry
    named = registry.named
    if func in registry.dispatch_handlers:
        run = registry.dispatch_handlers[func]
        return lambda func, types, args, kwargs: run(*args, **kwargs)
    if isinstance(func, OpOverloadPacket):
        return lambda packet, types, args, kwargs: _call_overload(packet, types, args, kwargs)
    spelled = (function_name(func), str(func), f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}")
    for name in spelled:
        if name in named:
            return named[name]
    if isinstance(func, OpOverload):
        for function in functions_of(func):
            if function in registry.handlers and not inspect.isfunction(function):
                run = registry.handlers[function]
                return lambda func, types, args, kwargs: run(function, types, args, kwargs)
    opened = without_override_check(func)
    if opened is not None:
        return lambda func, types, args, kwargs: opened(*args, **kwargs)
    return gather_fallback


def _call_overload(packet: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Run `torch.ops.lib.op(...)` as a call of the overload that torch selects for the arguments."""
    rt = runtime.active
    overload = getattr(packet, select_overload(packet, args, kwargs) or packet.overloads()[0])
    return (rt.handlers.get(overload) or resolve(overload))(overload, types, args, kwargs)


def functions_of(op: Any) -> Iterable[Any]:
    """Return the Python functions of an aten operator; none for operators of other libraries."""
    namespace, _, name = op._schema.name.partition("::")
    return list(aliases(name)) if namespace == "aten" else []


def dispatch_or(op: Any, run: Callable, otherwise: Handler | None) -> Handler:
    """Return a handler that calls `run` where the arguments select `op`, and `otherwise` (or a gather) elsewhere."""

    def call(func, types, args, kwargs):
        if select_overload(op.overloadpacket, args, kwargs) == op._overloadname:
            return run(*args, **kwargs)
        return (otherwise or resolve(func))(func, types, args, kwargs)

    return call


def torch_dispatch(cls, func, types, args, kwargs):
    """Handle an aten operator that C++ code called on ShardTensors, bypassing `__torch_function__`.

    This runs below autograd, where the graph of the local tensors cannot be recorded, so a ShardTensor that requires
    grad raises.
    """
    rt = runtime.active
    if func in rt.registry.dispatch_handlers:
        return rt.registry.dispatch_handlers[func](*args, **kwargs)
    if rt.bridge_depth and func in ALIAS_OPS and args[0].__class__ is ShardTensor:
        # A Function returned its input unchanged. C++ makes a view of it and records the graph; only the value is
        # needed here.
        return wrap(args[0]._local_tensor.detach(), args[0]._layout)
    tensors: list[Any] = []
    map_tensors((args, kwargs), lambda t: tensors.append(t) if isinstance(t, ShardTensor) else None)
    if torch.is_grad_enabled() and any(t._local_tensor.requires_grad for t in tensors):
        raise ShardingError(
            f"{func}: reached torch's dispatcher with a ShardTensor that requires grad; call it in Python"
        )
    known = getattr(torch.Tensor, func._schema.name.split("::")[1], None)
    return torch_function(cls, known if known in rt.handlers else func, types, args, kwargs)


def run_backward(outputs, gradients, retain_graph, create_graph, inputs) -> None:
    """Run backward from ShardTensors and plain tensors; redistribute initial gradients to the outputs' layouts."""
    if inputs is not None:  # before the outputs: reading the local tensor of a sum in flight completes it
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        inputs = [t._local_for_grad() if isinstance(t, ShardTensor) else t for t in inputs]
    locals_, seeds, meshes = [], [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        local, seed = seed_gradient(output, gradient)
        locals_.append(local)
        seeds.append(seed)
        if local is not output:
            meshes.append(output._layout.mesh)
    rt = runtime.active
    before = rt.sharded_backward
    rt.sharded_backward = tuple(meshes)
    try:  # `runtime.observing`, written out: it takes as long as the rest of this function
        backward(locals_, seeds, retain_graph, create_graph, inputs)
    finally:
        rt.sharded_backward = runtime.active.sharded_backward = before


def seed_gradient(output: Any, gradient: Any) -> tuple[Tensor, Tensor | None]:
    """Return the local tensor of an output and the local tensor of the gradient that backward starts from."""
    if not isinstance(output, ShardTensor):
        return output, to_full_tensor(gradient) if isinstance(gradient, ShardTensor) else gradient
    if gradient is None:
        if output._layout.numel != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        local = output._local_for_backward()
        # For one number torch creates the seed itself, without a check of shapes. An empty shard needs an explicit
        # seed.
        return local, None if local.numel() == 1 else torch.ones_like(local)
    if gradient.shape != output.shape:
        raise RuntimeError(f"Mismatch in shape: gradient has {tuple(gradient.shape)}, output {tuple(output.shape)}")
    local, layout = as_operand(gradient, output._layout.mesh)
    seed = redistribute(local, layout, output._grad_layout)
    partial = output._layout.partial_axes
    if partial and seed.requires_grad:  # it enters each rank's work on its own partial value
        (seed,) = autograd_collectives.replicate_in([seed], process_groups(output._layout, partial))
    return output._local_tensor, seed


def _connect(registry: runtime.Registry) -> None:
    """Set the dispatcher functions that ShardTensor calls: `tensor/` cannot import this module."""
    registry.resolve, registry.torch_dispatch, registry.run_backward = resolve, torch_dispatch, run_backward
    registry.aliases = torch_aliases
    registry.functions_of, registry.dispatch_or = functions_of, dispatch_or


_connect(runtime.active.registry)
