"""Every private torch name that the package uses: which versions have it, why it is needed, when it can go.

This module has the names for tensors and calls. Of the others, `storage` has those for the memory of tensors,
`attention` its kernels, `autocast` those for autocast, `lists` functions of lists of tensors, `saved` those for tensors
saved for backward, `engine` those for a quick backward, `world` those for groups and meshes, `virtual` those for
virtual ranks, `fake` those for tensors without data, `aot` those for traces and compilers, `patches` the attributes of
torch that are replaced. No other module of the package may use a private name of torch (a test checks this).
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# torch 2.11-2.15: torch's own `Function.apply` (a classmethod in 2.13, a C method descriptor in 2.15), for Functions of
# this package, which need no bridge. Read from the class's __dict__ because an attribute access would bind it.
_torch_apply = torch.autograd.Function.__dict__["apply"]
_c_apply = torch._C._FunctionBase.__dict__["apply"]

# torch 2.11-2.15: whether a transform of torch.func is active, and the tensor inside an ended one. No public names.
transforms_active = torch._C._are_functorch_transforms_active
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def _apply(cls: Any, *args: Any) -> Any:
    """Call the C++ part of `Function.apply`; torch's Python part, where it has one, takes as long as the C++ part.

    torch 2.11-2.13. What that part does is done here: a tensor that outlived its transform is unwrapped, and transforms
    of torch.func are refused, as torch refuses Functions without `setup_context`.
    """
    if transforms_active():
        raise RuntimeError(
            "torch.func (grad, vjp, jvp, jacrev, jacfwd, vmap) cannot transform a call on ShardTensors that "
            "communicates: use torch.autograd.grad or torch.autograd.functional instead"
        )
    return _c_apply.__get__(None, cls)(*[_unwrap_if_dead(a) if a.__class__ is torch.Tensor else a for a in args])


function_apply: Any = classmethod(_apply) if isinstance(_torch_apply, classmethod) else _torch_apply

# torch 2.11-2.15: view a flat tensor as tensors of other shapes in one call, the inverse of `autocast.flatten_tensors`.
# DDP uses it; no public name.
unflatten_tensors = torch._C._nn.unflatten_dense_tensors

# torch 2.11-2.15: multiply each tensor of a list, set each to zero, add one to each, in one kernel. No public names.
multiply_all, zero_all, add_to_all = torch._foreach_mul, torch._foreach_zero_, torch._foreach_add_

# torch 2.11-2.15: constructor of a tensor subclass that has a shape but no storage of its own. No public name.
make_wrapper = torch.Tensor._make_wrapper_subclass

# torch 2.11-2.15: the operator that `torch.sparse_coo_tensor` of tensors with a `__torch_dispatch__` calls.
build_sparse_coo = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default

# torch 2.11-2.15: run torch functions below __torch_function__ (public as torch._C since 2.0, no other name).
no_torch_function = torch._C.DisableTorchFunctionSubclass

# torch 2.11-2.15: the number of active torch function modes, and whether overrides of subclasses are on.
override_modes = torch._C._len_torch_function_stack
overrides_on = torch._C._is_torch_function_enabled

# torch 2.11-2.15: a mode that gets every call below autograd, collectives too; documented, under no public name.
DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode

# torch 2.11-2.15: multiply many tensors by one, in a few launches. No public name.
foreach_mul_ = torch._foreach_mul_

# torch 2.11-2.15: copy many tensors in a few launches. No public name.
foreach_copy_ = torch._foreach_copy_


# torch 2.11-2.15: the types of `torch.ops.lib.op`, which has all its overloads, and of one overload. No public names.
OpOverloadPacket: Any = type(torch.ops.aten.add)
OpOverload: Any = type(torch.ops.aten.add.Tensor)


def select_overload(packet: Any, args: tuple, kwargs: dict) -> str | None:
    """Return the name of the overload that torch selects for the arguments, None if none fits.

    torch 2.11-2.15: `_jit_resolve_packet`, which the call of a packet uses; no public name.
    """
    try:
        return torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None


def in_backward() -> bool:
    """Return whether autograd's engine runs in this thread. torch 2.11-2.15; no public name."""
    return torch._C._current_graph_task_id() != -1


def is_foreign_thread(thread: threading.Thread) -> bool:
    """Return whether C++ started a thread: autograd's engine has one per device. Python 3.10-3.14; no public name."""
    return isinstance(thread, threading._DummyThread)


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside wrappers of torch.func (vmap, grad). torch 2.11-2.15; no public name."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a FakeTensor, with a shape and no data. torch 2.11-2.15; no public name."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def without_functions() -> Any:
    """Return a context in which function modes and subclasses do not see calls. torch 2.11-2.15; no public name."""
    return torch._C.DisableTorchFunction()


# torch 2.11-2.15: the state that `torch.autograd.graph.saved_tensors_hooks` reads; no public name.
_saved_hooks_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled
_top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def has_saved_tensor_hooks() -> bool:
    """Return whether other code has saved-tensor hooks active, or has disabled them."""
    return not _saved_hooks_enabled() or _top_saved_hooks(False) is not None


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the (pack, unpack) hooks by which a tensor is saved for backward now, or None."""
    return _top_saved_hooks(False)


@contextmanager
def without_modes() -> Iterator[None]:
    """Return a context without dispatch modes, so that calls see real tensors inside a trace.

    torch 2.11-2.15; no public name. The Python dispatcher, which a trace enables, is off too: it holds the GIL during
    every C++ call. A collective would block in gloo on a lock held by the thread that frees the previous one, and that
    thread blocks on the GIL.
    """
    with torch.utils._python_dispatch._disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def dynamo_disable(function: F) -> F:
    """Exclude a function and its callees from torch.compile, without a wrapper around the function.

    torch 2.11-2.15: `torch.compiler.disable` uses a wrapper, which costs every call, and imports the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "shardfield.compile traces what is done with ShardTensors"
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def module_of_call(function: Any) -> Any:
    """Return the module if a function is the method by which a module calls its hooks and `forward`, else None.

    torch 2.11-2.15: `nn.Module.compile` passes it to `torch.compile`, and calls the result from then on.
    """
    return function.__self__ if getattr(function, "__func__", None) is torch.nn.Module._call_impl else None


def call_of_module(module: torch.nn.Module) -> Callable:
    """Return the method of `module_of_call`, which does not call what `nn.Module.compile` has stored."""
    return module._call_impl


def without_override_check(func: Any) -> Any:
    """Return a Python function of torch without its `__torch_function__` check, so that the calls inside it dispatch.

    torch 2.11-2.15: the checks are globals, looked up by name, or names of `torch.overrides` (in nn.init). Returns None
    if there is no such check.
    """
    if not isinstance(func, types.FunctionType) or not any(
        n.startswith("has_torch_function") for n in func.__code__.co_names
    ):
        return None
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = dict(func.__globals__) | dict.fromkeys(checks, _return_false)
    if "overrides" in func.__code__.co_names:
        unchecked = types.SimpleNamespace(**dict.fromkeys(checks, _return_false))
        scope["torch"] = types.SimpleNamespace(**vars(torch) | {"overrides": unchecked})
    opened = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _return_false(*args: Any) -> bool:
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


# torch 2.11-2.15: whether a tensor is "efficient zeros" without storage (see `materialize_zeros`). No public name.
is_zero_tensor = torch.Tensor._is_zerotensor


def materialize_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with storage: some backward formulas (of sgn, for example) return "efficient zeros" without.

    torch 2.11-2.15; no public name identifies them. A program of torch.compile has none.
    """
    if torch.compiler.is_compiling():
        return tensor
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format) + 0 if is_zero_tensor(tensor) else tensor


def keeps_graph() -> bool:
    """Return whether the backward that runs now was called with `retain_graph`. torch 2.11-2.15; no public name."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def after_backward(call: Callable[[], Any]) -> None:
    """Call a function when the running backward ends. torch 2.11-2.15; FSDP uses it; no public name."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def scripted_source(function: Any) -> Any:
    """Return the Python function of a scripted one, or None. torch 2.11-2.15 keep it for torch.compile."""
    return getattr(function, "_torchdynamo_inline", None)


# torch 2.11-2.15: the identity Function around the inputs and outputs of modules with full backward hooks.
module_hook_function = torch.nn.modules._functions.BackwardHookFunction


def set_node_hook(function: type[torch.autograd.Function], change: Callable[[Any, Callable], Callable]) -> None:
    """Wrap every hook registered on the nodes of this Function, one of ours, with `change(node, hook)`.

    torch 2.11-2.15: the class of the nodes has no public name.
    """
    nodes: Any = function._backward_cls  # type: ignore[attr-defined]
    nodes.register_hook = lambda self, hook: super(nodes, self).register_hook(change(self, hook))


def tensor_getter(name: str, method: str = "__get__") -> Any:
    """Return the function object that `__torch_function__` gets when an attribute of Tensor is read (or set).

    torch 2.11-2.15: attributes are C descriptors of TensorBase; newer versions have some that older ones lack (None).
    """
    found = torch._C.TensorBase.__dict__.get(name)
    return None if found is None else getattr(found, method, None)


def caller_argument(func: Any, name: str) -> Any:
    """Return an argument of the current call of `func` that it did not pass to `__torch_function__`.

    torch 2.11-2.15: F.l1_loss omits its `weight`. It is read from the frame of `func`, some calls up; modes that repeat
    the call, as a trace does, drop it again. Can go when F.l1_loss passes it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is func.__code__ and frame.f_locals.get(name) is not None:
            return frame.f_locals[name]
        frame = frame.f_back
    return None
