"""From a torch call on ShardTensors to one of the three endings: a rule, a gather, a refusal.

`HANDLERS` maps a function object to its handler. `@rule` registers a pure planner (see `dispatch/plan.py`), whose plans
`dispatch/executor.py` looks up and runs. `@handler` registers a function that is written in terms of other ShardTensor
calls. A Python function of torch without either is opened, so that the calls inside it dispatch; anything else is
gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import dynamo_disable, without_override_check
from ..debug import explain
from ..errors import ShardingError
from ..redistribute import redistribute
from ..tensor import Deferred, ShardTensor, entry, wrap
from .arguments import as_operand, map_tensors, to_full_tensor
from .arguments import mesh_of as mesh_of
from .arguments import write_out as write_out
from .call_cache import CALL_CACHE, PLAIN_TENSOR_TYPES, evict_calls
from .executor import Handler, make_handler
from .fallback import gather_fallback as gather_fallback
from .torch_aliases import aliases, function_name

HANDLERS: dict[Any, Handler] = {}
NAMED_HANDLERS: dict[str, Handler] = {}  # users' handlers for functions known by name
DISPATCH_HANDLERS: dict[Any, Callable] = {}  # users' handlers for aten operators
_RESOLVED_HANDLERS: dict[Any, Handler] = {}  # what a function without an entry was found to be
RULES: dict[Any, Callable] = {}  # function -> the planner or handler written for it; the contents of ops/

elementwise: Handler | None = (
    None  # handles functions that give one element for one; ops/elementwise/pointwise.py sets it
)
bridge_depth = 0  # inside a user's autograd.Function that was given ShardTensors
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

    The planner's parameters are the function's; a keyword-only `fn` receives the function that was called. Partial
    operands are reduced and merged dims are laid out simply before it is asked, unless it says it can do with them.

    `accepts_deferred`: class of a deferred value -> the handler of calls whose first tensor is such a value. `around`
    gets the planner's handler and returns the one to register, for operands that no plan takes (sparse matrices).
    """

    def register(planner: Callable) -> Callable:
        for function in functions:
            for alias in _function_aliases(function, exact):
                run = make_handler(planner, partial, merged, is_torch_function=True)
                HANDLERS[alias] = _compose(run, accepts_deferred, around)
                RULES[alias] = planner
        return planner

    return register


def handler(
    *functions: Any, exact: bool = False, accepts_deferred: AcceptsDeferred | None = None
) -> Callable[[Callable], Callable]:
    """Register a function `(func, types, args, kwargs)` written in terms of other calls on ShardTensors."""

    def register(function_handler: Callable) -> Callable:
        for function in functions:
            for alias in _function_aliases(function, exact):
                HANDLERS[alias] = _compose(function_handler, accepts_deferred, None)
                RULES[alias] = function_handler
        return function_handler

    return register


def composed(*functions: Any, exact: bool = False) -> Callable[[Callable], Callable]:
    """Register a plain Python function with the torch function's own parameters, made of other ShardTensor calls."""

    def register(body: Callable) -> Callable:
        def call_body(func, types, args, kwargs):
            return body(*args, **kwargs)

        handler(*functions, exact=exact)(call_body)
        for function in functions:
            for alias in _function_aliases(function, exact):
                RULES[alias] = body
        return body

    return register


# ---------------------------------------------------------------------- the way in


def register(func: Any, function_handler: Handler) -> None:
    """A user's own handler for a function; it replaces any rule."""
    evict_calls(func)
    HANDLERS[func] = function_handler


def register_named(name: str, function_handler: Handler) -> None:
    """A user's own handler for the function of that name."""
    NAMED_HANDLERS[name] = function_handler
    _RESOLVED_HANDLERS.clear()


def register_dispatch(op: Any, function_handler: Callable) -> None:
    """A user's own handler for an aten operator."""
    DISPATCH_HANDLERS[op] = function_handler


@dynamo_disable
def torch_function(cls, func, types, args=(), kwargs=None):
    """`__torch_function__` of ShardTensor."""
    if args and explain.active is None and args[0].__class__ is cls:
        # weight_of(args, kwargs), here so that it costs no call
        weight = (
            args[1]
            if len(args) > 1 and args[1].__class__ in PLAIN_TENSOR_TYPES
            else kwargs.get("weight")
            if kwargs
            else None
        )
        if weight is not None:
            ask = CALL_CACHE.get((func, args[0]._layout, id(weight)))
            if ask is not None:
                out = ask(args, kwargs)
                if out is not None:
                    return out
        elif len(args) == 1 and not kwargs and HANDLERS.get(func) is elementwise and not args[0]._layout.partial:
            return wrap(func(args[0]._local_tensor), args[0]._layout)  # as the handler would, a call less
    found = HANDLERS.get(func)
    if found is None:
        found = _RESOLVED_HANDLERS.get(func)
        if found is None:
            found = _RESOLVED_HANDLERS[func] = _resolve(func)
    if explain.active is not None:
        return explain.active.run_call(func, found, types, args, kwargs or {})
    return found(func, types, args, kwargs or {})


def _resolve(func) -> Handler:
    spelled = (function_name(func), str(func), f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}")
    for name in spelled:
        if name in NAMED_HANDLERS:
            return NAMED_HANDLERS[name]
    opened = without_override_check(func)
    if opened is not None:
        return lambda func, types, args, kwargs: opened(*args, **kwargs)
    return gather_fallback


def torch_dispatch(cls, func, types, args, kwargs):
    """`__torch_dispatch__`: an aten operator that C++ code called on wrappers, past every rule.

    The graph is on the local tensors and cannot be recorded from here, so a local tensor that needs it is an error.
    """
    if func in DISPATCH_HANDLERS:
        return DISPATCH_HANDLERS[func](*args, **kwargs)
    if bridge_depth and func in ALIAS_OPS and args[0].__class__ is ShardTensor:
        # C++ makes a view of an input that a Function returns as it is; it keeps the graph, we keep the value
        return wrap(args[0]._local_tensor.detach(), args[0]._layout)
    tensors: list[Any] = []
    map_tensors((args, kwargs), lambda t: tensors.append(t) if isinstance(t, ShardTensor) else None)
    if torch.is_grad_enabled() and any(t._local_tensor.requires_grad for t in tensors):
        raise ShardingError(
            f"{func}: reached torch's dispatcher with a ShardTensor that requires grad; call it in Python"
        )
    known = getattr(torch.Tensor, func._schema.name.split("::")[1], None)
    return torch_function(cls, known if known in HANDLERS else func, types, args, kwargs)


def run_backward(outputs, gradients, retain_graph, create_graph, inputs) -> None:
    """`backward` from ShardTensors (and plain tensors): seeds are laid out like the outputs' cotangents."""
    locals_, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        local, seed = seed_gradient(output, gradient)
        locals_.append(local)
        seeds.append(seed)
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        inputs = [t._local_for_grad() if isinstance(t, ShardTensor) else t for t in inputs]
    torch.autograd.backward(locals_, seeds, retain_graph, create_graph, inputs=inputs)


def seed_gradient(output: Any, gradient: Any) -> tuple[Tensor, Tensor | None]:
    """An output's local tensor and the local tensor of the gradient that backward starts from."""
    if not isinstance(output, ShardTensor):
        return output, to_full_tensor(gradient) if isinstance(gradient, ShardTensor) else gradient
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return output._local_tensor, torch.ones_like(output._local_tensor)
    if gradient.shape != output.shape:
        raise RuntimeError(f"Mismatch in shape: gradient has {tuple(gradient.shape)}, output {tuple(output.shape)}")
    local, layout = as_operand(gradient, output._layout.mesh)
    return output._local_tensor, redistribute(local, layout, output._grad_layout)


entry.torch_function, entry.torch_dispatch, entry.run_backward = torch_function, torch_dispatch, run_backward
entry.register, entry.register_named, entry.register_dispatch = register, register_named, register_dispatch
