"""`stencil` and `local`: run a function whose body is opaque to shardfield on sharded tensors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import runtime
from ..._compat import OpOverload, OpOverloadPacket
from ...dispatch.executor import make_handler
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import mesh_of
from ...errors import ShardingError
from ...tensor import ShardTensor
from .opaque import EDGES, FieldCall, Reach, plan_opaque

Radius = int | tuple[int, int]
Radii = Radius | Mapping[int, Radius]
Edge = str | Mapping[int, str]


def stencil(
    *,
    radius: Radii | Callable[..., Radii],
    edge: Edge = "same",
    fields: Sequence[str] | None = None,
    out_dims: Mapping[int, int] | None = None,
    rebind: bool = False,
) -> Callable[[Any], Any]:
    """Run a function on sharded tensors with halos: an output reads the cells within `radius` of its own cell.

    The body of the function is opaque: it may launch a CUDA or Triton kernel, or be an operator of another library.
    Each rank calls it on its cells and the halo around them and keeps its own outputs; gradients of the halo are sent
    back. Plain tensors are passed to the function as they are.

    radius: dim -> cells that an output reads to each side, or (before, after). 0 means that cells along this dim are
        independent. A dim that is not named is never sharded in the local call. A number is the radius of all dims
        after the second of (N, C, ...), with independent samples. A function gets the arguments of the call and
        returns one of these; a function that ends in `**options` gets them by name.
    edge: what the function does at the edge of the field, for all dims or dim -> edge. "same": anything (zero padding,
        one-sided differences, windows that shift inward), with as many outputs as cells; the function gets the real
        edge. "periodic": it wraps around. "valid": it returns outputs for full windows only.
    fields: names of the parameters that are fields, by default the first tensor. Fields have equal sizes along the dims
        of `radius` and are sharded in the same way. All other tensors are replicated, and their gradients are summed
        over ranks.
    out_dims: dim of the fields -> dim of the results, where they differ.
    rebind: also replace the function in every imported module that has it, for modules that call it by name.

    >>> @stencil(radius={-1: 1})
    ... def slope(x):
    ...     return torch.gradient(x, dim=-1)[0]
    >>> slope(torch.tensor([0.0, 1.0, 4.0]))
    tensor([1., 2., 3.])

    A Python function is wrapped. A `torch.autograd.Function`, or an operator of `torch.ops`, is registered and returned
    as it is: its callers do not change.
    """
    if not isinstance(radius, (int, tuple, Mapping)) and not callable(radius):
        raise ShardingError(f"stencil: radius must be a number, a pair, a dict or a function, not {radius!r}")

    def state(first: Operand, args: tuple, kwargs: dict, bound: dict[str, Any], name: str) -> dict[int, Reach]:
        found = _call_radius(radius, args, kwargs, bound) if callable(radius) else radius
        return _reaches(name, found, edge, first.ndim)

    if not callable(radius):
        _reaches("stencil", radius, edge, 3)  # raise now
    return lambda function: _register(function, state, fields, out_dims or {}, rebind)


def local(
    function: Any = None,
    *,
    dims: Sequence[int] | None = None,
    fields: Sequence[str] | None = None,
    out_dims: Mapping[int, int] | None = None,
    rebind: bool = False,
) -> Any:
    """Run a function on sharded tensors without communication: its outputs read no neighbors along `dims`.

    By default these are all dims, as for an activation. `local` is `stencil` with radius 0 and has its other arguments.

    >>> @local
    ... def double(x):
    ...     return 2 * x
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """

    def state(first: Operand, args: tuple, kwargs: dict, bound: dict[str, Any], name: str) -> dict[int, Reach]:
        return {d: Reach(0, 0) for d in (range(first.ndim) if dims is None else dims)}

    def register(function: Any) -> Any:
        return _register(function, state, fields, out_dims or {}, rebind)

    return register if function is None else register(function)


def _call_radius(radius: Callable[..., Any], args: tuple, kwargs: dict, bound: dict[str, Any]) -> Any:
    """Return the radius of a call. `bound`: its arguments by name, those that were not passed included."""
    by_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(radius).parameters.values())
    return radius(**bound) if by_name else radius(*args, **kwargs)


def _reaches(name: str, radius: Any, edge: Edge, ndim: int) -> dict[int, Reach]:
    """Return dim -> reach, as it was stated."""
    if not isinstance(radius, Mapping):
        if ndim < 3:
            raise ShardingError(f"{name}: radius={radius} is for (N, C, ...); name the dims: radius={{dim: {radius}}}")
        radius = {0: 0, **{d: radius for d in range(2, ndim)}}
    found = {}
    for dim, value in radius.items():
        pair = (value, value) if isinstance(value, int) else value
        if not isinstance(dim, int) or len(pair) != 2 or not all(isinstance(n, int) and n >= 0 for n in pair):
            raise ShardingError(f"{name}: the radius of dim {dim} must be a number or a pair of numbers, not {value!r}")
        at = edge.get(dim, "same") if isinstance(edge, Mapping) else edge if any(pair) else "same"
        if at not in EDGES:
            raise ShardingError(f"{name}: edge must be one of {', '.join(EDGES)}, not {at!r}")
        found[dim] = Reach(pair[0], pair[1], at)
    return found


def _register(
    function: Any,
    state: Callable[..., dict[int, Reach]],
    fields: Sequence[str] | None,
    out_dims: Mapping[int, int],
    rebind: bool,
) -> Any:
    """Register a handler for the function, and return the object to call in its place."""
    name = getattr(function, "__name__", str(function))
    is_function_class = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    signature = _signature(function, is_function_class)
    for field in fields or ():
        if field not in signature.parameters:
            raise ShardingError(f"{name}: fields names {field!r}, and its parameters are {list(signature.parameters)}")
    run_plain = function.apply if is_function_class else function

    def planner(*args: Any, **kwargs: Any) -> Plan:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        bound = dict(arguments.arguments)
        chosen = list(fields) if fields else _first_tensor(name, bound)
        first = next((bound[f] for f in chosen if isinstance(bound[f], Operand)), None)
        if first is None:
            raise ShardingError(f"{name}: none of its fields {chosen} is a tensor")
        reach = state(first, args, kwargs, bound, name)
        if not fields:
            _refuse_ambiguous(name, bound, chosen[0], reach)
        return plan_opaque(
            run_plain, FieldCall(name, reach, chosen, {d: out_dims.get(d, d) for d in reach}), signature, bound
        )

    planner.__signature__ = signature  # type: ignore[attr-defined]
    handler = make_handler(planner, partial=False, merged=False)
    registry = runtime.active.registry
    if is_function_class:
        registry.register(function, handler)
        return function
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        packet = getattr(function, "overloadpacket", function)
        for op in (packet, *(getattr(packet, overload) for overload in packet.overloads())):
            registry.register(op, handler)
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if mesh_of(args, kwargs) is None:
            return function(*args, **kwargs)
        return ShardTensor.__torch_function__(call, (ShardTensor,), args, kwargs)

    registry.register(call, handler)
    if rebind:
        _replace_everywhere(function, call)
    return call


def _signature(function: Any, is_function_class: bool) -> inspect.Signature:
    """Return the parameters of a function, of an operator (from its schema), or of a Function's `apply`."""
    kinds = inspect.Parameter
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        op = function if isinstance(function, OpOverload) else getattr(function, function.overloads()[0])
        return inspect.Signature(
            [
                kinds(
                    a.name,
                    kinds.KEYWORD_ONLY if a.kwarg_only else kinds.POSITIONAL_OR_KEYWORD,
                    default=a.default_value if a.has_default_value() else kinds.empty,
                )
                for a in op._schema.arguments
            ]
        )
    if is_function_class:
        parameters = list(inspect.signature(function.forward).parameters.values())
        skip = 0 if function.setup_context is not torch.autograd.Function.setup_context else 1  # ctx
        return inspect.Signature(parameters[skip:])
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ShardingError(f"{function}: its parameters are unknown; wrap it in a Python function") from None


def _first_tensor(name: str, bound: dict[str, Any]) -> list[str]:
    found = [key for key, value in bound.items() if isinstance(value, Operand)]
    if not found:
        raise ShardingError(f"{name}: it has no tensor argument; name the fields: fields=(...)")
    return found[:1]


def _refuse_ambiguous(name: str, bound: dict[str, Any], first: str, reach: Mapping[int, Reach]) -> None:
    """Refuse a second tensor of the field's sizes unless the user says whether it is a field."""
    field = bound[first]
    for key, value in bound.items():
        if key == first or not isinstance(value, Operand) or value.ndim != field.ndim:
            continue
        if all(value.shape[d] == field.shape[d] for d in reach if -field.ndim <= d < field.ndim):
            raise ShardingError(
                f"{name}: {key!r} has the sizes of the field {first!r}; say whether it is a field: "
                f"fields=({first!r}, {key!r}) or fields=({first!r},)"
            )


def _replace_everywhere(function: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        for key, value in list(vars(module).items()) if module is not None and hasattr(module, "__dict__") else ():
            if value is function:
                setattr(module, key, replacement)
