"""Bind the arguments of a call to the parameters of a planner, and name the parameters of a local function.

Sizes that change in every step are planned in every step: `inspect.signature` and `Signature.bind` would take a tenth
of the time of a plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

# torch also accepts numpy's names of these arguments
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
BY_ORDER, BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
REST, NAMED_REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

# The arguments by parameter, defaults included, and as the planner takes them: by position and by name.
Bound = tuple[dict[str, Any], Sequence[Any], Mapping[str, Any]]


def make_binder(signature: inspect.Signature) -> Callable[[Sequence[Any], dict[str, Any]], Bound | None]:
    """Return a function that binds (positional, named) arguments; it returns None if the planner does not take them."""
    parameters = tuple(signature.parameters.values())
    names = frozenset(signature.parameters)
    ordered = tuple(p.name for p in parameters if p.kind is BY_ORDER)
    others = tuple((p.name, p.kind, p.default) for p in parameters)
    rest = any(p.kind is REST for p in parameters)

    def by_signature(positional: Sequence[Any], named: dict[str, Any]) -> Bound | None:
        try:
            bound = signature.bind(*positional, **_in_torch_names(named, names))
        except TypeError:
            return None
        bound.apply_defaults()
        return dict(bound.arguments), bound.args, bound.kwargs

    def bind(positional: Sequence[Any], named: dict[str, Any]) -> Bound | None:
        if len(positional) > len(ordered) and not rest:
            return None
        left = _in_torch_names(named, names)
        arguments: dict[str, Any] = {}
        taken = 0
        for name, kind, default in others:
            if kind is REST:
                arguments[name] = tuple(positional[taken:])
                taken = len(positional)
            elif kind is BY_ORDER and taken < len(positional):
                if name in left:
                    return None  # given twice
                arguments[name] = positional[taken]
                taken += 1
            elif kind is NAMED_REST:  # the last parameter
                arguments[name], left = left, {}
            elif name in left:
                arguments[name] = left.pop(name)
            elif default is not inspect.Parameter.empty:
                arguments[name] = default
            else:
                return None
        if left:
            return None
        given = [arguments[name] for name in ordered]
        by_name = {}
        for name, kind, _ in others:
            if kind is REST:
                given += arguments[name]
            elif kind is BY_NAME:
                by_name[name] = arguments[name]
            elif kind is NAMED_REST:
                by_name |= arguments[name]
        return arguments, given, by_name

    return bind if all(p.kind in (BY_ORDER, BY_NAME, REST, NAMED_REST) for p in parameters) else by_signature


def _in_torch_names(named: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {k if k in names else NUMPY_NAMES.get(k, k): v for k, v in named.items()}


def parameter_names(function: Callable) -> Sequence[str]:
    """Return the names of a function's parameters, as `inspect.signature` has them."""
    if type(function) is FunctionType and not vars(function):  # no __wrapped__ and no __signature__
        code = function.__code__
        if not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return tuple(inspect.signature(function).parameters)
