"""From a torch call on ShardTensors to one of the three endings: a rule, a gather, a refusal.

`TABLE` maps a function object to its handler. `@rule` registers a pure planner (see `plan.py`): its plan is
looked up by function, layouts and static arguments. `@handler` registers a function that is written in terms of
other ShardTensor calls. A Python function of torch without either is opened, so that the calls inside it
dispatch; anything else is gathered.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from . import report
from ._compat import autocast_state, open_body, same_memory
from .comm import moves
from .errors import ShardingError
from .layout import Layout
from .names import aliases, title
from .plan import Operand, Plan, groups
from .redistribute import redistribute, simplified

Handler = Callable[[Any, Sequence[type], tuple, dict], Any]

TABLE: dict[Any, Handler] = {}
NAMED: dict[str, Handler] = {}  # users' handlers for functions known by name
BELOW: dict[Any, Callable] = {}  # users' handlers for aten operators
_RESOLVED: dict[Any, Handler] = {}  # what a function without an entry was found to be
RULES: dict[Any, Callable] = {}  # function -> the planner or handler written for it; the contents of ops/
PLANS: OrderedDict[tuple, Ready] = OrderedDict()
PLANS_BOUND = 8192

ShardTensor: Any = None  # the class; tensor.py, which stands on this module, sets it
wrap: Any = None  # (local tensor, layout) -> ShardTensor; likewise
bridging = 0  # inside a user's autograd.Function that was given ShardTensors
ALIASES = {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}


class Ready:
    """A plan bound to the positions of its tensors."""

    __slots__ = ("local", "slots", "targets", "enters", "layout", "many", "copied", "view", "aliases", "straight")

    def __init__(self, plan: Plan, bound: dict[str, Any], operands: list[Operand]):
        self.local, self.copied, self.view = plan.local, plan.copied, plan.view
        self.layout: Any = plan.layout
        self.aliases = plan.view or plan.may_view
        self.many = isinstance(plan.layout, (tuple, list))
        self.slots: list[tuple[bool, Any]] = []
        for name in plan.takes or inspect.signature(plan.local).parameters:
            value = bound[name]
            if isinstance(value, Operand):
                self.slots.append((True, value.at))
            elif isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
                self.slots.append((True, tuple((True, v.at) if isinstance(v, Operand) else (False, v) for v in value)))
            else:
                self.slots.append((False, value))
        final = [op.layout for op in operands]
        for name, target in plan.operands.items():
            value = bound[name]
            pairs: Any = [(value, target)] if isinstance(value, Operand) else zip(value, cast(Any, target), strict=True)
            for operand, layout in pairs:
                final[operand.at] = layout
        self.targets = [
            (i, op.layout, goal)
            for i, (op, goal) in enumerate(zip(operands, final, strict=True))
            if op.layout is not goal
        ]
        found: Any = plan.layout if self.many else [plan.layout]
        results: list[Layout] = [r for r in found if r is not None]
        work = {a for t in [*final, *results] for a in t.shard_axes + t.partial_axes}
        whole = {bound[n].at for n in plan.whole if isinstance(bound[n], Operand)}
        entering: dict[tuple, list[int]] = {}
        for i, layout in enumerate(final):
            idle = layout.wide(sorted(work - set(layout.shard_axes) - set(layout.partial_axes)))
            if idle and i not in whole:
                entering.setdefault(groups(layout, idle), []).append(i)
        self.enters = list(entering.items())
        in_order = self.slots == [(True, i) for i in range(len(operands))]
        self.straight = in_order and not self.targets and not self.enters and isinstance(plan.layout, Layout)

    def run(self, locals_: list[Tensor]) -> Any:
        base = locals_[0] if self.view else None
        if self.straight:  # nothing moves: the way most calls go
            return self._wrapped(self.local(*locals_), self.layout, base)
        for i, source, target in self.targets:
            locals_[i] = redistribute(locals_[i], source, target)
        for over, which in self.enters:
            for i, entered in zip(which, moves.enter([locals_[i] for i in which], over), strict=True):
                locals_[i] = entered
        arguments = []
        for is_tensor, value in self.slots:
            if not is_tensor:
                arguments.append(value)
            elif value.__class__ is int:
                arguments.append(locals_[value])
            else:
                arguments.append([locals_[v] if is_one else v for is_one, v in value])
        out = self.local(*arguments)
        if self.layout is None:
            return out
        if not self.many:
            return self._wrapped(out, self.layout, base)
        parts = [o if spec is None else self._wrapped(o, spec, base) for o, spec in zip(out, self.layout, strict=True)]
        # torch.return_types.* take one sequence; tuples and lists too
        return type(out)(parts) if isinstance(out, (tuple, list)) else tuple(parts)

    def _wrapped(self, out: Tensor, layout: Layout, base: Tensor | None) -> Any:
        assert out.shape == layout.local_shape, (
            f"local result {tuple(out.shape)}, planned {layout.local_shape} of {layout}"
        )
        result = wrap(out, layout)
        if self.copied or (base is not None and out.numel() and not same_memory(out, base)):
            result._copied_view = True
        return result

    def inherit(self, out: Any, args: tuple) -> Any:
        """A view of what is already a copy of what torch would view is no better."""
        if self.aliases and args and getattr(args[0], "_copied_view", False):
            for part in out if self.many else (out,):
                part._copied_view = same_memory(part._local_tensor, args[0]._local_tensor)
        return out


# ---------------------------------------------------------------------- registering


def _spellings(function: Any, exact: bool) -> Iterable[Any]:
    return (function,) if exact else aliases(function)


def rule(
    *functions: Any, partial: bool = False, merged: bool = False, exact: bool = False
) -> Callable[[Callable], Callable]:
    """Register a pure planner for torch functions (and their method forms; `exact`: for these objects alone).

    The planner's parameters are the function's; a keyword-only `fn` receives the function that was called. Partial
    operands are reduced and merged dims are laid out simply before it is asked, unless it says it can do with them.
    """

    def register(planner: Callable) -> Callable:
        for function in functions:
            for alias in _spellings(function, exact):
                TABLE[alias] = _planned(planner, partial, merged)
                RULES[alias] = planner
        return planner

    return register


def handler(*functions: Any, exact: bool = False) -> Callable[[Callable], Callable]:
    """Register a function `(func, types, args, kwargs)` written in terms of other calls on ShardTensors."""

    def register(function_handler: Callable) -> Callable:
        for function in functions:
            for alias in _spellings(function, exact):
                TABLE[alias] = function_handler
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
            for alias in _spellings(function, exact):
                RULES[alias] = body
        return body

    return register


# ---------------------------------------------------------------------- a planned call


def _planned(planner: Callable, partial: bool, merged: bool) -> Handler:
    signature = inspect.signature(planner)
    wants_fn = "fn" in signature.parameters and signature.parameters["fn"].kind is inspect.Parameter.KEYWORD_ONLY

    def run(func, types, args, kwargs):
        known = _quick(func, args, kwargs)
        if known is not None:
            ready = PLANS.get(known[0])
            if ready is not None:
                return ready.inherit(ready.run(known[1]), args)
        if kwargs and "out" in kwargs:
            return _into_out(run, func, types, args, kwargs)
        mesh = mesh_of(args, kwargs)
        locals_: list[Tensor] = []
        layouts: list[Layout] = []
        key: list[Any] = [func, *autocast_state()]

        def scan(value: Any) -> None:
            if isinstance(value, Tensor):
                local, layout = admit(value, mesh, partial, merged)
                locals_.append(local)
                layouts.append(layout)
                key.append(layout)
                key.append(local.dtype)
            elif isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
                key.append(len(value))
                for item in value:
                    scan(item)
            else:
                key.append(value.__class__)
                key.append(tuple((s.start, s.stop, s.step) for s in [value]) if value.__class__ is slice else value)

        for value in args:
            scan(value)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                scan(value)
        found = tuple(key)
        try:
            ready = PLANS.get(found)
        except TypeError:  # an argument that cannot be a key: plan anew
            ready, found = None, ()
        if ready is None:
            ready = _plan(planner, signature, wants_fn, func, args, kwargs, locals_, layouts)
            if ready is None:
                return gathered(func, types, args, kwargs)
            if found:
                _remember(found, ready)
        if known is not None and all(a is b for a, b in zip(locals_, known[1], strict=True)):
            _remember(known[0], ready)  # the operands came as they are: next time they need no admission
        return ready.inherit(ready.run(locals_), args)

    return run


# what stands in a key as itself
_STATIC = {int, float, bool, str, complex, type(None), torch.dtype, torch.Size}


def _quick(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, list[Tensor]] | None:
    """A key for calls on ShardTensors, plain tensors and simple arguments as they are, and the local tensors.

    None for other calls. A plan is stored under such a key only if admission changes none of the operands.
    """
    key = [func, *autocast_state()]
    locals_ = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = value.__class__
        if kind is ShardTensor:
            local = value._local_tensor
            key += (value._layout, local.dtype)
            locals_.append(local)
        elif kind is Parameter or kind is Tensor:
            key += (value.shape, value.dtype)
            locals_.append(value)
        elif kind in _STATIC:
            key += (kind, value)
        else:
            return None
    if kwargs:
        key += kwargs
    return tuple(key), locals_


def _remember(key: tuple, ready: Ready) -> None:
    PLANS[key] = ready
    if len(PLANS) > PLANS_BOUND:
        PLANS.popitem(last=False)


# torch takes numpy's names for these arguments too
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


def _plan(planner, signature, wants_fn, func, args, kwargs, locals_, layouts) -> Ready | None:
    pairs = zip(locals_, layouts, strict=True)
    operands = [Operand(layout, local.dtype, local.device, i) for i, (local, layout) in enumerate(pairs)]
    left = iter(operands)

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(left)
        if isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
            return type(value)([swap(v) for v in value]) if type(value) in (list, tuple) else [swap(v) for v in value]
        return value

    positional = [swap(v) for v in args]
    named = {k if k in signature.parameters else _NUMPY.get(k, k): swap(v) for k, v in kwargs.items()}
    extra = {"fn": func} if wants_fn else {}
    try:
        bound = signature.bind(*positional, **named, **extra)
    except TypeError:
        return None  # a call form the rule does not know: torch itself judges it, on the gathered operands
    bound.apply_defaults()
    try:
        plan = planner(*bound.args, **bound.kwargs)
    except ShardingError as error:
        raise ShardingError(f"{title(func)}: {error}\n  operands: {operands}") from None
    if plan is None:
        return None
    names = dict(bound.arguments)
    return Ready(plan, names, operands)


def mesh_of(args: Any, kwargs: Any) -> Any:
    """The mesh of the first ShardTensor among the arguments."""
    for value in args:
        if isinstance(value, ShardTensor):
            return value._layout.mesh
        if isinstance(value, (list, tuple)):
            mesh = mesh_of(value, None)
            if mesh is not None:
                return mesh
    return mesh_of(tuple(kwargs.values()), None) if kwargs else None


def admit(value: Tensor, mesh: Any, partial: bool = False, merged: bool = False) -> tuple[Tensor, Layout]:
    """A tensor argument as (local tensor, layout) on `mesh`: plain ones are Replicate, DTensors are taken over."""
    if not isinstance(value, ShardTensor):
        if not isinstance(value, DTensor):
            return value, Layout.replicate(mesh, value.shape)
        value = ShardTensor.from_dtensor(value)
    layout = value._layout
    if layout.mesh is not mesh and layout.mesh != mesh:
        raise ShardingError(f"tensors on different meshes meet: {mesh} and {layout.mesh}")
    if layout.partial and not partial:
        value = value._whole_value()
        layout = value._layout
    if not merged and not layout.is_simple:
        goal = simplified(layout)
        return redistribute(value._local_tensor, layout, goal), goal
    return value._local_tensor, layout


def replicated(value: Any) -> Tensor:
    """The whole value as a plain tensor on this rank."""
    if isinstance(value, DTensor):
        value = ShardTensor.from_dtensor(value)
    goal = Layout.replicate(value._layout.mesh, value._layout.shape)
    return redistribute(value._local_tensor, value._layout, goal)


# ---------------------------------------------------------------------- the gather, and the way in

_warned: set[Any] = set()


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor in its nested lists, tuples and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def gathered(func, types, args, kwargs):
    """No rule: the operands are gathered, the op runs on the whole tensors, the result is Replicate."""
    name = title(func)
    mesh = mesh_of(args, kwargs)
    inside: list[Any] = []

    def note(value):
        if isinstance(value, ShardTensor):
            inside.append(value)
        return value

    map_tensors((args, kwargs), note)
    cut = [t for t in inside if not t._layout.is_replicated]
    nbytes = sum(t._layout.numel * t._local_tensor.element_size() for t in cut)
    if cut:
        if report.strict_depth:
            raise ShardingError(
                f"{name}: strict() allows no gather, and there is no rule for {[t._layout for t in cut]}"
            )
        report.ending("gather")
        if name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"shardfield: no rule for {name} on {cut[0]._layout}: {nbytes} bytes are gathered on every rank. "
                f"Add one with @shardfield.rule or ShardTensor.register_function_handler.",
                stacklevel=3,
            )

    def whole(value):
        return replicated(value) if isinstance(value, (ShardTensor, DTensor)) else value

    written = _written(func, args, kwargs)
    plain_args, plain_kwargs = map_tensors(args, whole), map_tensors(kwargs or {}, whole)
    if written is not None:
        copy = plain_args[0].clone()
        func(copy, *plain_args[1:], **plain_kwargs)
        return written._write(wrap(copy, Layout.replicate(mesh, copy.shape)))
    out = func(*plain_args, **plain_kwargs)
    return map_tensors(out, lambda t: wrap(t, Layout.replicate(mesh, t.shape)))


def _written(func, args, kwargs):
    """The ShardTensor that an in-place call writes, if it is one."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") and name != "__invert__"
    in_place = in_place and name not in ("__index__", "__int__", "__iter__")
    if (in_place or name == "__setitem__") and args and isinstance(args[0], ShardTensor):
        return args[0]
    return None


def _into_out(run, func, types, args, kwargs):
    """`out=`: compute, then write."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    result = run(func, types, args, kwargs)
    if out is None:
        return result
    if isinstance(out, (tuple, list)):
        for target, part in zip(out, result, strict=True):
            write_out(target, part)
    else:
        write_out(out, result)
    return out


def write_out(target: Tensor, value: Any) -> None:
    """Write a result into an `out=` tensor of the same shape."""
    if target.shape != value.shape:
        raise ShardingError(f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}: they must agree")
    if isinstance(target, ShardTensor):
        target._write(value)
    else:
        target.copy_(replicated(value))


def register(func: Any, function_handler: Handler) -> None:
    """A user's own handler for a function; it replaces any rule."""
    TABLE[func] = function_handler


def register_named(name: str, function_handler: Handler) -> None:
    """A user's own handler for the function of that name."""
    NAMED[name] = function_handler
    _RESOLVED.clear()


def call(cls, func, types, args=(), kwargs=None):
    """`__torch_function__` of ShardTensor."""
    found = TABLE.get(func)
    if found is None:
        found = _RESOLVED.get(func)
        if found is None:
            found = _RESOLVED[func] = _resolve(func)
    if report.active is not None:
        return report.active.watch(func, found, types, args, kwargs or {})
    return found(func, types, args, kwargs or {})


def _resolve(func) -> Handler:
    spelled = (title(func), str(func), f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}")
    for name in spelled:
        if name in NAMED:
            return NAMED[name]
    opened = open_body(func)
    if opened is not None:
        return lambda func, types, args, kwargs: opened(*args, **kwargs)
    return gathered


def below(cls, func, types, args, kwargs):
    """`__torch_dispatch__`: an aten operator that C++ code called on wrappers, past every rule.

    The graph is on the local tensors and cannot be recorded from here, so a local tensor that needs it is an error.
    """
    if func in BELOW:
        return BELOW[func](*args, **kwargs)
    if bridging and func in ALIASES and args[0].__class__ is ShardTensor:
        # C++ makes a view of an input that a Function returns as it is; it keeps the graph, we keep the value
        return wrap(args[0]._local_tensor.detach(), args[0]._layout)
    tensors: list[Any] = []
    map_tensors((args, kwargs), lambda t: tensors.append(t) if isinstance(t, ShardTensor) else None)
    if torch.is_grad_enabled() and any(t._local_tensor.requires_grad for t in tensors):
        raise ShardingError(
            f"{func}: reached torch's dispatcher with a ShardTensor that requires grad; call it in Python"
        )
    known = getattr(torch.Tensor, func._schema.name.split("::")[1], None)
    return call(cls, known if known in TABLE else func, types, args, kwargs)


def run_backward(outputs, gradients, retain_graph, create_graph, inputs) -> None:
    """`backward` from ShardTensors (and plain tensors): seeds are laid out like the outputs' cotangents."""
    locals_, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        local, seed = seeded(output, gradient)
        locals_.append(local)
        seeds.append(seed)
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        inputs = [t._local_tensor if isinstance(t, ShardTensor) else t for t in inputs]
    torch.autograd.backward(locals_, seeds, retain_graph, create_graph, inputs=inputs)


def seeded(output: Any, gradient: Any) -> tuple[Tensor, Tensor | None]:
    """An output's local tensor and the local tensor of the gradient that backward starts from."""
    if not isinstance(output, ShardTensor):
        return output, replicated(gradient) if isinstance(gradient, ShardTensor) else gradient
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return output._local_tensor, torch.ones_like(output._local_tensor)
    if gradient.shape != output.shape:
        raise RuntimeError(f"Mismatch in shape: gradient has {tuple(gradient.shape)}, output {tuple(output.shape)}")
    local, layout = admit(gradient, output._layout.mesh)
    return output._local_tensor, redistribute(local, layout, output._grad_layout)
