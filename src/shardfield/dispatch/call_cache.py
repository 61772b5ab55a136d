"""The arguments of a call at a glance: what its plan is known by, and its local tensors.

Most of what a call costs is looking at its arguments one by one, so it is not done by a loop: for every list of kinds
of arguments that is met (a ShardTensor, a parameter, two tuples, a number) a reader is written once, as a Python
function that takes just these apart. On one rank, calls with parameters (so of a module, which gives the same objects
every time) are known by their weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._compat import make_wrapper
from ..layout import Layout
from ..tensor import ShardTensor

CACHE_SIZE = 4096  # of plans that one reader remembers, and of calls of one function that are known by their arguments

PLAIN_TENSOR_TYPES = {Tensor, Parameter}
# what stands in a key as itself
CONSTANT_TYPES = {int, float, bool, str, complex, type(None), torch.dtype, torch.Size}
INTS = {int}
NON_TORCH_ARGUMENTS = {"pre_pad", "smoothing"}  # arguments that rules know and torch does not


class ArgumentReader:
    """For calls of one function with arguments of these kinds.

    read: called with the arguments (those by name, too, without their names): the key of the call among `plans` and the
        local tensors, in order; None where an argument is anything but ShardTensors, plain tensors and parameters,
        simple values, and lists and tuples of these.
    plans: by key.
    form: where the local tensors stand if one rank calls the function with them: "first" is one ShardTensor before
        anything else (plain tensors are local tensors), "each" are they all, before the rest, "list" one list of them
        that is the first argument; "" otherwise.
    lasting: it is a call as modules make them, with objects that are the same every time.
    """

    __slots__ = ("read", "plans", "form", "cache_by_identity")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        kinds = [type(v) for v in (*args, *kwargs.values())]
        self.read = _compile_reader(kinds)
        self.plans: dict[tuple, Any] = {}
        self.form = "" if kwargs.keys() & NON_TORCH_ARGUMENTS else _operand_form(args, list(kwargs.values()))
        self.cache_by_identity = self.form == "first" and Parameter in kinds

    def cache_plan(self, key: tuple, plan: Any) -> None:
        if len(self.plans) >= CACHE_SIZE:
            self.plans.clear()
        self.plans[key] = plan


READERS: dict[tuple, ArgumentReader] = {}


def make_reader(key: tuple, args: tuple, kwargs: dict) -> ArgumentReader:
    """A new reader for the calls with this key: the function, the kinds of arguments, and names of those by name."""
    made = READERS[key] = ArgumentReader(args, kwargs)
    return made


def _compile_reader(kinds: Sequence[type]) -> Callable[..., tuple[tuple, list[Tensor]] | None]:
    if not all(_is_supported(kind) for kind in kinds):
        return lambda *values: None
    names = [f"v{i}" for i in range(len(kinds))]
    lines, key, given = [], [], []
    nested = any(kind is list or kind is tuple for kind in kinds)
    for name, kind in zip(names, kinds, strict=True):
        if kind is ShardTensor:
            key += [f"{name}._layout", f"{name}._dtype"]
            given.append(f"{name}._local_tensor")
        elif kind is Tensor or kind is Parameter:
            key += [f"{name}.shape", f"{name}.dtype"]
            given.append(name)
        elif kind is list or kind is tuple:
            if given:
                lines.append(f"given += {', '.join(given)},")
                given = []
            lines += [f"k{name} = listed({name}, given)", f"if k{name} is None: return None"]
            if kind is tuple:  # how strides and paddings are given
                lines[-2:] = [f"k{name} = {name}", f"if not ints(map(type, {name})):"] + [f" {x}" for x in lines[-2:]]
            key.append(f"k{name}")
        else:
            key.append(name)
    found = f"[{', '.join(given)}]"
    if nested:
        lines = ["given = []", *lines]
        found = f"given + {found}" if given else "given"
    body = "".join(f" {line}\n" for line in [*lines, f"return ({''.join(k + ', ' for k in key)}), {found}"])
    space: dict[str, Any] = {"listed": _sequence_key, "ints": INTS.issuperset}
    exec(f"def read({', '.join(names)}):\n{body}", space)
    return space["read"]


def _operand_form(args: Sequence[Any], named: list[Any]) -> str:
    def tensors(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(map(tensors, value))
        return isinstance(value, Tensor)

    if not args:
        return ""
    first, rest = args[0], [*args[1:], *named]
    if first.__class__ is ShardTensor:
        if all(v.__class__ in PLAIN_TENSOR_TYPES or not tensors(v) for v in rest):
            return "first"
    elif isinstance(first, (list, tuple)):
        return "list" if first and len(first) == tensors(first) and not tensors(rest) else ""
    count = tensors(args)
    return "each" if all(isinstance(v, Tensor) for v in args[:count]) and not tensors(named) else ""


def _is_supported(kind: type) -> bool:
    return kind in CONSTANT_TYPES or kind in (ShardTensor, Tensor, Parameter, list, tuple)


def _sequence_key(values: Sequence[Any], given: list[Tensor]) -> tuple | None:
    """The part of a key that a list or tuple makes; its tensors are added to `given`."""
    key: list[Any] = [type(values)]
    for value in values:
        kind = value.__class__
        key.append(kind)
        if kind is ShardTensor:
            key += value._layout, value._dtype
            given.append(value._local_tensor)
        elif kind is Tensor or kind is Parameter:
            key += value.shape, value.dtype
            given.append(value)
        elif kind in CONSTANT_TYPES:
            key.append(value)
        elif kind is list or kind is tuple:
            inner = _sequence_key(value, given)
            if inner is None:
                return None
            key.append(inner)
        else:
            return None
    return tuple(key)


# ---------------------------------------------------------------------- by identity


# The function, the layout of the first argument and who the weight is (`weight_argument`) -> the call: given all
# arguments,
# it returns the result, or None where any but the first is of another kind, or another value, than it was. The weight
# is only asked for by its address: no weak reference is taken, for torch does not swap tensors that have one.
CALL_CACHE: dict[tuple, Callable[[tuple, dict | None], Any]] = {}


def weight_argument(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that tells calls of a function apart: the second argument, or that of the usual name."""
    return args[1] if len(args) > 1 and args[1].__class__ in PLAIN_TENSOR_TYPES else kwargs.get("weight")


def cache_call(func: Any, args: tuple, kwargs: dict[str, Any], layout: Layout) -> None:
    """Know a call of a ShardTensor and plain arguments, one a parameter, again by these."""
    weight = weight_argument(args, kwargs)
    if (
        weight is None or weight.__class__ not in PLAIN_TENSOR_TYPES or weight.grad_fn is not None
    ):  # what is computed is always new
        return
    key = (func, args[0]._layout, id(weight))
    if len(CALL_CACHE) >= CACHE_SIZE:
        CALL_CACHE.clear()
    rest = (*args[1:], *kwargs.values())
    looks = tuple("kind" if v.__class__ in PLAIN_TENSOR_TYPES else "is" for v in rest)
    fixed = [None if look == "kind" else v for v, look in zip(rest, looks, strict=True)]
    passed = _argument_source(func, [*[("", v) for v in args[1:]], *kwargs.items()])
    CALL_CACHE[key] = _compile_call(looks, len(args), tuple(kwargs), passed)(func, layout, fixed)


CALL_TEMPLATE = """
def make(func, layout, fixed):
    shape = layout.shape
    [{fixed}] = fixed
    def call(args, named):
        if len(args) != {count} or {amiss}:
            return None
        [first, {by_place}] = args
        try:
            {by_name}
        except KeyError:
            return None
        if {differ}:
            return None
        local = first.__dict__.get("_local_tensor")
        if local is None:
            return None
        out = func(local, {passed})
        if out.shape != shape:  # a parameter may have got another, or there is a new one at its address
            return None
        dtype, device = out.dtype, out.device
        made = make_wrapper(ShardTensor, shape, None, None, None, dtype, strided, device)
        made.__dict__ = {{"_local_tensor": out, "_layout": layout, "_dtype": dtype, "_device": device}}
        return made
    return call
"""


@functools.cache
def _compile_call(looks: tuple[str, ...], count: int, names: tuple[str, ...], passed: str) -> Callable[..., Callable]:
    """What makes calls for `CALL_CACHE`, of `count` arguments and some by name, given how to look at all but the first.

    `passed` is what the function is given behind its first argument. The calls wrap the result themselves, as
    `tensor.wrap` does: every step less shows.
    """
    values = [f"v{i}" for i in range(len(looks))]
    named = list(zip(values[count - 1 :], names, strict=True))
    tests = {"kind": "{0}.__class__ not in PLAIN", "is": "{0} is not k{0}"}
    text = CALL_TEMPLATE.format(
        fixed=", ".join(f"k{v}" for v in values),
        count=count,
        amiss=f"not named or len(named) != {len(names)}" if names else "named",
        by_place=", ".join(values[: count - 1]),
        by_name="; ".join(f"{v} = named[{n!r}]" for v, n in named) or "pass",
        differ=" or ".join(tests[how].format(v) for v, how in zip(values, looks, strict=True)),
        passed=passed,
    )
    space = dict(make_wrapper=make_wrapper, ShardTensor=ShardTensor, strided=torch.strided, PLAIN=PLAIN_TENSOR_TYPES)
    exec(text, space)
    return space["make"]


# What torch's convolutions take behind the field, in order, and the defaults.
_CONVOLUTION = {"weight": "", "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED = {"weight": "", "bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
SIGNATURES: dict[Any, dict[str, Any]] = {f: _CONVOLUTION for f in (torch.conv1d, torch.conv2d, torch.conv3d)} | {
    f: _TRANSPOSED for f in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
}


def _argument_source(func: Any, given: list[tuple[str, Any]]) -> str:
    """The arguments behind the first, as text of a call; `v0` is the first of those given, with their names or "".

    Those of a convolution are spelled as torch reads them fastest: by place, (1, 1) as 1, and without defaults at the
    end. That saves a third of what the wrapper costs: a module gives seven arguments.
    """
    order = SIGNATURES.get(func)
    if order is None:
        return ", ".join(f"{name}=v{i}" if name else f"v{i}" for i, (name, _) in enumerate(given))
    texts = {name: repr(default) for name, default in order.items()}
    needed = 0
    for i, (place, (name, value)) in enumerate(zip(order, given, strict=False)):
        if value.__class__ is tuple and len(set(value)) == 1 and value[0].__class__ is int:
            value = value[0]
        simple = value is None or value.__class__ is int
        texts[name or place] = repr(value) if simple else f"v{i}"
        if not simple or value != order[name or place]:
            needed = max(needed, 1 + list(order).index(name or place))
    return ", ".join(list(texts.values())[:needed])


def evict_calls(func: Any) -> None:
    """Know no call of a function by its arguments."""
    for key in [key for key in CALL_CACHE if key[0] is func]:
        del CALL_CACHE[key]
