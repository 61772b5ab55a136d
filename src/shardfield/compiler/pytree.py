"""Flatten arguments and results into leaves, and build them again: torch's pytrees, extended by dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor, nn

from .._compat.aot import tree_flatten, tree_unflatten

MAX_DEPTH = 4  # depth of nested objects to which `contains_tensors` searches


@dataclass(frozen=True)
class DataclassSpec:
    """Structure of a tree that has dataclasses among its leaves.

    An entry describes one dataclass: leaf index in `outer`, class, field names, spec of the field values, leaf count.
    """

    outer: Any
    entries: tuple[tuple[int, type, tuple[str, ...], Any, int], ...]


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested containers and dataclasses, and the spec from which `unflatten` rebuilds the tree."""
    leaves, spec = tree_flatten(tree)
    if not any(map(_is_dataclass_leaf, leaves)):
        return leaves, spec
    all_leaves: list[Any] = []
    entries = []
    for i, leaf in enumerate(leaves):
        if _is_dataclass_leaf(leaf):
            names = tuple(vars(leaf)) if hasattr(leaf, "__dict__") else tuple(leaf.__dataclass_fields__)
            inner, inner_spec = flatten([getattr(leaf, name) for name in names])
            entries.append((i, type(leaf), names, inner_spec, len(inner)))
            all_leaves += inner
        else:
            all_leaves.append(leaf)
    return all_leaves, DataclassSpec(spec, tuple(entries))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Rebuild the tree of `flatten` with these leaves."""
    if not isinstance(spec, DataclassSpec):
        return tree_unflatten(leaves, spec)
    rest = iter(leaves)
    dataclasses = {index: entry for index, *entry in spec.entries}
    outer_leaves: list[Any] = []
    for i in range(spec.outer.num_leaves):
        if i in dataclasses:
            kind, names, inner_spec, n = dataclasses[i]
            values = unflatten([next(rest) for _ in range(n)], inner_spec)
            instance = object.__new__(kind)
            for name, value in zip(names, values, strict=True):
                object.__setattr__(instance, name, value)
            outer_leaves.append(instance)
        else:
            outer_leaves.append(next(rest))
    return tree_unflatten(outer_leaves, spec.outer)


def _is_dataclass_leaf(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") and is_dataclass(kind) and not isinstance(value, (Tensor, nn.Module))


def contains_tensors(leaf: Any, depth: int = 0) -> bool:
    """Return whether a leaf holds tensors that `flatten` does not see; a program would keep those of the trace."""
    if isinstance(leaf, Tensor):
        return True
    if depth > MAX_DEPTH or isinstance(leaf, (nn.Module, type)):
        return False
    if isinstance(leaf, Mapping):
        items: Any = leaf.values()
    elif isinstance(leaf, (list, tuple, set)):
        items = leaf
    else:
        items = getattr(leaf, "__dict__", {}).values()
    return isinstance(leaf, Iterator) or any(contains_tensors(x, depth + 1) for x in items)
