"""Arguments and results as their leaves: nested containers and dataclasses are opened, and can be built again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor, nn

from .._compat.aot import tree_flatten, tree_unflatten

MAX_DEPTH = 4  # objects inside each other in which tensors are looked for


@dataclass(frozen=True)
class DataclassSpec:
    """Dataclasses among the leaves of a tree: where they are, of what class, and what they are made of."""

    outer: Any
    entries: tuple[
        tuple[int, type, tuple[str, ...], Any, int], ...
    ]  # place, class, names, tree of values, leaves of it


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers and dataclasses, and what `unflatten` builds them from again."""
    leaves, spec = tree_flatten(tree)
    if not any(map(_is_dataclass_leaf, leaves)):
        return leaves, spec
    found: list[Any] = []
    at = []
    for i, leaf in enumerate(leaves):
        if _is_dataclass_leaf(leaf):
            names = tuple(vars(leaf)) if hasattr(leaf, "__dict__") else tuple(leaf.__dataclass_fields__)
            inner, inner_spec = flatten([getattr(leaf, name) for name in names])
            at.append((i, type(leaf), names, inner_spec, len(inner)))
            found += inner
        else:
            found.append(leaf)
    return found, DataclassSpec(spec, tuple(at))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The tree that has these leaves."""
    if not isinstance(spec, DataclassSpec):
        return tree_unflatten(leaves, spec)
    rest = iter(leaves)
    records = {place: made_of for place, *made_of in spec.entries}
    count = spec.outer.num_leaves
    found: list[Any] = []
    for i in range(count):
        if i in records:
            kind, names, inner, n = records[i]
            values = unflatten([next(rest) for _ in range(n)], inner)
            made = object.__new__(kind)
            for name, value in zip(names, values, strict=True):
                object.__setattr__(made, name, value)
            found.append(made)
        else:
            found.append(next(rest))
    return tree_unflatten(found, spec.outer)


def _is_dataclass_leaf(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") and is_dataclass(kind) and not isinstance(value, (Tensor, nn.Module))


def contains_tensors(leaf: Any, depth: int = 0) -> bool:
    """Whether something that is no container to us holds tensors, which a program would keep as they were."""
    if isinstance(leaf, Tensor):
        return True
    if depth > MAX_DEPTH or isinstance(leaf, (nn.Module, type)):
        return False
    if isinstance(leaf, Mapping):
        inside: Any = leaf.values()
    elif isinstance(leaf, (list, tuple, set)):
        inside = leaf
    else:
        inside = getattr(leaf, "__dict__", {}).values()
    return isinstance(leaf, Iterator) or any(contains_tensors(x, depth + 1) for x in inside)
