"""Private torch names for the memory of tensors: who else uses a storage, and which writes it has seen."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

# torch 2.11-2.15: whether two tensors share memory. Unlike data_ptr, it works for tensors without data too.
same_memory = torch._C._is_alias_of


def unwrap_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside a FunctionalTensor of AOTAutograd; any other tensor itself.

    torch 2.11-2.15: `FunctionalTensor` wraps each view separately; inner tensors share memory as views do. No public
    name.
    """
    return getattr(tensor, "elem", tensor)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor. Function modes do not see it: they take it for code that reads the memory.

    torch 2.11-2.15; no public name.
    """
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a tensor. torch 2.11-2.15: no public name."""
    return storage_of(unwrap_functional(tensor))._cdata


def shares_memory(tensor: torch.Tensor) -> bool:
    """Return whether another object (a view, a detached tensor, an array) uses the storage of a plain tensor.

    torch 2.11-2.15: there is no public use count. The count of a tensor with a storage of its own is the baseline.
    """
    return _storage_users(tensor) > _storage_users(torch.empty(1))


def is_sole_reference(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor and its storage have no other user, so that it can be swapped for another.

    torch 2.11-2.15: `torch.utils.swap_tensors` refuses tensors that C++ code or a weak reference holds.
    """
    return tensor._use_count() == 1 and not weakref.getweakrefs(tensor) and not shares_memory(tensor)


def is_viewed_once(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether a plain tensor and one view of it are the only users of its storage, so that both can be swapped.

    torch 2.11-2.15: a view holds its base in C++ (twice if it has no data), and each of them the storage. In inference
    mode it holds the storage alone. The counts of a new tensor and a view of it are the baseline.
    """
    known = view._base is base or (view.is_inference() and storage_id(view) == storage_id(base))
    if not known or weakref.getweakrefs(base) or weakref.getweakrefs(view):
        return False
    other, other_view = _viewed_tensor(base.is_inference())
    pairs = ((base, other), (view, other_view))
    return _storage_users(base) == _storage_users(other) and all(a._use_count() == b._use_count() for a, b in pairs)


def is_sole_holder(attributes: dict[str, Any], name: str, viewed: bool = False) -> bool:
    """Return whether no Python object but this dict refers to its entry `name`. `viewed`: a tensor that has views.

    Python 3.11-3.14: the count includes references of the interpreter, fewer of them in 3.14. torch 2.13: a tensor
    that a view refers to in C++ has one more. The count of a new object, referred to in the same way, is the baseline.
    """
    like, view = _viewed_tensor(attributes[name].is_inference()) if viewed else (object(), None)
    held = {name: like}
    del like  # `view` refers to it while references are counted
    return _references(attributes, name) <= _references(held, name)


def _viewed_tensor(inference: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new tensor and a view of it."""
    with torch.inference_mode(inference):
        made = torch.empty(1)
        return made, made[:]


def _references(attributes: dict[str, Any], name: str) -> int:
    return sys.getrefcount(attributes[name])


def _storage_users(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(storage_id(tensor))


def base_and_version(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return the base of a view (or the tensor itself) and its version; None in inference mode, which counts no writes.

    torch 2.11-2.15: autograd's own base and version counter.
    """
    if tensor.is_inference():
        return None
    return (tensor if tensor._base is None else tensor._base), tensor._version
