"""The inputs that `check` calls a model with: tensors in tuples, dicts, dataclasses and graph objects, by path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..errors import ShardfieldError
from ..layout import Layout, balanced, starts
from ..tensor import ShardTensor, wrap

Change = Callable[[str, Tensor], Any]


def map_inputs(value: Any, change: Change, path: str = "") -> Any:
    """Return `value` with `change(path, tensor)` in place of each tensor; containers are copied.

    Containers are lists, tuples, dicts, graphs of torch_geometric (objects with `stores`), and other objects that have
    tensors as attributes, as dataclasses. The path of a tensor joins positions, keys and attribute names with dots.
    """

    def inner(name: Any, item: Any) -> Any:
        return map_inputs(item, change, f"{path}.{name}" if path else str(name))

    made: Any
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        made = {key: inner(key, item) for key, item in value.items()}
        return made if type(value) is dict else _updated(value, made)
    if isinstance(value, (list, tuple)):
        items = [inner(i, item) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "stores"):
        made = copy.copy(value)
        for store in made.stores:
            for key, item in list(store.items()):
                store[key] = inner(key if store._key is None else f"{_joined(store._key)}.{key}", item)
        return made
    attributes = getattr(value, "__dict__", {})
    if any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in attributes.values()):
        made = copy.copy(value)
        for name, item in attributes.items():
            object.__setattr__(made, name, inner(name, item))  # of a frozen dataclass too
        return made
    return value


def _updated(value: Any, items: dict) -> Any:
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made


def _joined(key: Any) -> str:
    return key if isinstance(key, str) else "-".join(key)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model."""

    args: tuple
    kwargs: dict

    @staticmethod
    def of(given: Any) -> Inputs:
        """Return the arguments a factory gives: a tuple or list of them, a dict by keyword, or else a single one."""
        if isinstance(given, (tuple, list)) and not hasattr(given, "_fields"):
            return Inputs(tuple(given), {})
        return Inputs((), given) if type(given) is dict else Inputs((given,), {})

    def map(self, change: Change) -> Inputs:
        """Return the inputs with `change(path, tensor)` in place of each tensor."""
        return Inputs(map_inputs(self.args, change), map_inputs(self.kwargs, change))

    def tensors(self) -> dict[str, Any]:
        """Return the tensors by path."""
        found: dict[str, Any] = {}
        self.map(lambda path, tensor: found.setdefault(path, tensor))
        return found

    def call(self, model: Callable) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


def choose_sharded(tensors: Mapping[str, Tensor], dims: Sequence[int], shard: Any) -> dict[str, tuple[int, ...]]:
    """Return the dims that mesh axes shard, by path: those of `shard`, or `dims` of the first floating-point tensor."""
    if shard:
        unknown = [path for path in shard if path not in tensors]
        if unknown:
            raise ShardfieldError(f"check: no input tensor {', '.join(unknown)}; there are {', '.join(tensors)}")
        found = {path: tuple(given) for path, given in shard.items()}
    else:
        paths = [path for path, t in tensors.items() if t.is_floating_point() or t.is_complex()] or list(tensors)
        if not paths:
            raise ShardfieldError("check: the model has no input tensors")
        found = {paths[0]: tuple(dims)}
    for path, chosen in found.items():
        if len(chosen) != len(dims):
            raise ShardfieldError(f"check: {len(chosen)} dims {chosen} of {path} for a mesh of {len(dims)} axes")
    return found


def shard_input(tensor: Tensor, mesh: Any, dims: Sequence[int], even: bool) -> ShardTensor:
    """Return the tensor sharded along `dims`, one for each mesh axis, unevenly unless `even`."""
    placements, block = [], tensor
    for axis, dim in enumerate(dims):
        dim %= tensor.ndim
        size, ranks = tensor.shape[dim], mesh.size(axis)
        shard_sizes = list(balanced(size, ranks))
        if not even and ranks > 1 and shard_sizes[-1] > 1:
            moved = max(shard_sizes[-1] // 3, 1)
            shard_sizes[0], shard_sizes[-1] = shard_sizes[0] + moved, shard_sizes[-1] - moved
        coord = mesh.get_local_rank(axis)
        block = block.narrow(dim, starts(shard_sizes)[coord], shard_sizes[coord])
        placements.append(Shard(dim) if ranks > 1 else Replicate())
    return ShardTensor.from_local(block.clone(), mesh, placements)


def replicate_input(tensor: Tensor, mesh: Any) -> ShardTensor:
    """Return the tensor as a ShardTensor that every rank has in full."""
    return wrap(tensor.clone(), Layout.replicate(mesh, tensor.shape))
