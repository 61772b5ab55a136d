"""Every private torch name we touch: which versions have it, why we need it, when it can go.

Nothing else in the package may name a private torch attribute (a test holds this).
"""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import torch
import torch.distributed

# torch 2.11-2.15: `Function.apply` as torch has it (a classmethod in 2.13, a C method descriptor in 2.15), before
# `bridge` replaces it. Reached through the class's __dict__ because an attribute access would bind it.
function_apply = torch.autograd.Function.__dict__["apply"]

# torch 2.11-2.12 have all_gather_into_tensor; 2.13 renames it all_gather_single and warns. Until 2.13 is the oldest.
all_gather_flat = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor

# torch 2.11-2.15: the only way to make a tensor subclass that has a shape but no storage of its own.
make_wrapper = torch.Tensor._make_wrapper_subclass

# torch 2.11-2.15: run torch functions below __torch_function__ (public as torch._C since 2.0, no other name).
no_torch_function = torch._C.DisableTorchFunctionSubclass

# torch 2.11-2.15: how many modes want to see torch functions first, and whether subclasses see them at all.
override_modes = torch._C._len_torch_function_stack
overrides_on = torch._C._is_torch_function_enabled

# torch 2.11-2.15: a context that sees every call below autograd, collectives too; documented, under no public name.
DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode

# torch 2.11-2.15: do two tensors share memory? Unlike data_ptr, it answers for tensors without data too.
same_memory = torch._C._is_alias_of


def hooks_on_saving() -> bool:
    """Whether someone else has a say in what backward keeps, or forbids that anyone has.

    torch 2.11-2.15: what `torch.autograd.graph.saved_tensors_hooks` looks at, and no public name tells.
    """
    state = torch._C._autograd
    return not state._saved_tensors_hooks_is_enabled() or state._top_saved_tensors_default_hooks(False) is not None


def backend_class(group: Any, device: torch.device) -> type:
    """The kind of backend that serves a device in a group. torch 2.11-2.15; no public name."""
    return type(group._get_backend(device))


# torch 2.11-2.15: the groups that a DeviceMesh makes have torch's time-outs, and init_device_mesh takes no other.
set_group_timeout = torch.distributed.distributed_c10d._set_pg_timeout


def flatten_mesh(mesh: Any, name: str) -> Any:
    """All axes of a mesh as one, named `name`. torch 2.11-2.15: no public name; it is made once a mesh."""
    return mesh._flatten(name)


def open_body(func: Any) -> Any:
    """A Python function of torch without its own `__torch_function__` check, so that the calls inside it dispatch.

    torch 2.11-2.15: the checks are the globals below, looked up by name. Returns None where there is no such check.
    """
    if not isinstance(func, types.FunctionType) or not any(
        n.startswith("has_torch_function") for n in func.__code__.co_names
    ):
        return None
    scope = dict(func.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = _never
    opened = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _never(*args: Any) -> bool:
    return False


# torch 2.11-2.15: the C functions behind torch.* and torch.nn.functional.*, which Python wrappers call by these names.
NAMESPACES = (
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C._special,
    torch._C._linalg,
    torch._C._fft,
    torch.Tensor,
)


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with memory: some backward formulas (of sgn, say) give "efficient zeros" that have none to send.

    torch 2.11-2.15; no public name tells them.
    """
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format) + 0 if tensor._is_zerotensor() else tensor


def replace_function_apply(apply: Any) -> None:
    """Make `autograd.Function.apply` call `apply(function_class, *args)`.

    torch 2.11-2.15 record a Function on the tensors it is given below every override; there is no hook to see
    ShardTensors go in. Can go when Function.apply honours `__torch_function__`.
    """
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


def tensor_getter(name: str, method: str = "__get__") -> Any:
    """The function object under which `__torch_function__` sees an attribute of Tensor being read (or set).

    torch 2.11-2.15: attributes are C descriptors of TensorBase; newer versions have some that older ones lack (None).
    """
    found = torch._C.TensorBase.__dict__.get(name)
    return None if found is None else getattr(found, method, None)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether something else (a view, a detached tensor, an array) uses the memory of a plain tensor.

    torch 2.11-2.15: there is no public count of a storage's users. A tensor of its own sets the measure.
    """
    return _storage_users(tensor) > _storage_users(torch.empty(1))


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing but its Python name knows a plain tensor or its memory, so that it can be swapped for another.

    torch 2.11-2.15: `torch.utils.swap_tensors` refuses what C++ code holds, or a weak reference.
    """
    return tensor._use_count() == 1 and not weakref.getweakrefs(tensor) and not shares_memory(tensor)


def _storage_users(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def root_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The tensor that a plain tensor is a view of (or itself) and how often its memory was written; None if nobody
    counts, as in inference mode.

    torch 2.11-2.15: the base of a view and the count of writes, by which autograd tells what was written since.
    """
    if tensor.is_inference():
        return None
    return (tensor if tensor._base is None else tensor._base), tensor._version


# torch 2.11-2.15: the public question must name a device type; this one does not and costs a few nanoseconds.
autocast_on = torch._C._is_any_autocast_enabled


def autocast_state() -> tuple:
    """What autocast makes of dtypes now, for keys of what depends on it; () when it is off."""
    if not autocast_on():
        return ()
    kinds = ("cpu", torch.accelerator.current_accelerator().type) if torch.accelerator.is_available() else ("cpu",)
    return tuple(torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in kinds)


def caller_argument(func: Any, name: str) -> Any:
    """An argument that `func` was just called with and that it did not hand on to `__torch_function__`.

    torch 2.11-2.15: F.l1_loss leaves out its `weight`. Read off its frame, a few calls up. Can go with the bug.
    """
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code is func.__code__:
            break
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None and frame.f_code is func.__code__ else None


# torch 2.11-2.15: the attention kernels under F.scaled_dot_product_attention, which alone tell the log-sum-exp of each
# row, and their backward, which takes one. They go when a public function returns it (flex_attention compiles first).
_aten = torch.ops.aten
flash_cpu, flash_cpu_backward = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
flash_cuda, flash_cuda_backward = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
)
efficient_cuda, efficient_cuda_backward = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)

# torch 2.11-2.15: nn.TransformerEncoder asks it, before its fast path, whether a padding mask could make ragged rows.
left_aligned = torch._nested_tensor_from_mask_left_aligned
