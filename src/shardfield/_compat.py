"""Every private torch name we touch: which versions have it, why we need it, when it can go.

Nothing else in the package may name a private torch attribute (a test holds this).
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed

F = TypeVar("F", bound=Callable[..., Any])

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


def beneath(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory a tensor shows while AOTAutograd traces; else the tensor itself.

    torch 2.11-2.15: `FunctionalTensor` wraps each view anew; what it wraps shares memory as views do. No public name.
    """
    return getattr(tensor, "elem", tensor)


def within_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.vmap, grad and the like have wrapped, or itself. torch 2.11-2.15; no public name."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_written(tensor: torch.Tensor) -> bool:
    """Whether a tensor has been written into since AOTAutograd began to trace. torch 2.11-2.15; no public name."""
    inner = beneath(tensor)
    return inner is not tensor and torch._functionalize_has_data_mutation(inner)  # type: ignore[attr-defined]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no data, while something is traced. torch 2.11-2.15; no public name."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory share. torch 2.11-2.15: a storage has no public name of its own."""
    return beneath(tensor).untyped_storage()._cdata


def hooks_on_saving() -> bool:
    """Whether someone else has a say in what backward keeps, or forbids that anyone has.

    torch 2.11-2.15: what `torch.autograd.graph.saved_tensors_hooks` looks at, and no public name tells.
    """
    state = torch._C._autograd
    return not state._saved_tensors_hooks_is_enabled() or state._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def without_modes() -> Iterator[None]:
    """A context in which torch functions see real tensors, whoever traces. torch 2.11-2.15; no public name.

    The Python dispatcher, which a trace switches on, is off in it too: it holds Python's lock during every C++ call. A
    message would then wait in gloo for a lock of a thread that frees the message before it, which waits for Python's.
    """
    with torch.utils._python_dispatch._disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def left_alone(function: F) -> F:
    """Have torch.compile look neither into a function nor into what it calls, at no cost to any other call of it.

    torch 2.11-2.15: what `torch.compiler.disable` does by a wrapper, which costs every call and imports the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "shardfield.compile traces what is done with ShardTensors"
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def process_group(name: str) -> Any:
    """The process group of a name, by which traced programs know it. torch 2.11-2.15; no public name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


@contextmanager
def uncounted_group() -> Iterator[None]:
    """Around `new_group(..., use_local_synchronization=True)`, which only the members of the group call.

    torch 2.15 counts such a group, on its members, and names later groups by the count: ranks would no longer agree on
    names, and groups would meet others. The group itself is named by its ranks and the count, which is given here.
    """
    world = torch.distributed.distributed_c10d._world
    before, world.group_count = world.group_count, -1
    try:
        yield
    finally:
        world.group_count = before


def world_store() -> Any:
    """The store by which the ranks of the world found each other; None where there is none, or a fake one.

    torch 2.11-2.15: a store that was made by `init_process_group` has no public name.
    """
    if not torch.distributed.is_initialized():
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return None if type(store).__name__ == "FakeStore" else store


# torch 2.11-2.15: a call that is made though nobody reads what it returns. No public name.
has_side_effect = torch.fx.node.has_side_effect


def backend_class(group: Any, device: torch.device) -> type:
    """The kind of backend that serves a device in a group. torch 2.11-2.15; no public name."""
    return type(group._get_backend(device))


# torch 2.11-2.15: the groups that a DeviceMesh makes have torch's time-outs, and init_device_mesh takes no other.
set_group_timeout = torch.distributed.distributed_c10d._set_pg_timeout


def flatten_mesh(mesh: Any, name: str) -> Any:
    """All axes of a mesh as one, named `name`. torch 2.11-2.15: no public name; it is made once a mesh.

    It looks this rank up in a tensor, which must have data even where a step is counted on tensors that have none.
    """
    with without_modes():
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


# torch 2.11-2.15: the identity that modules with full backward hooks put around what they compute. No public name.
module_hook_function = torch.nn.modules._functions.BackwardHookFunction


def set_node_hook(function: type[torch.autograd.Function], change: Callable[[Any, Callable], Callable]) -> None:
    """Have hooks that are registered on a Function's nodes be what `change(node, hook)` makes of them.

    torch 2.11-2.15: the class of the nodes has no public name.
    """
    nodes: Any = function._backward_cls  # type: ignore[attr-defined]
    nodes.register_hook = lambda self, hook: super(nodes, self).register_hook(change(self, hook))


def check_old_backward_hooks(check: Callable[[torch.nn.Module, Any, Any], None]) -> None:
    """Call `check(module, inputs, result)` when a module with hooks of `register_backward_hook` was called.

    torch 2.11-2.15: it hooks the node behind the result, whatever that is, and then looks whether to warn. No public
    name; can go when `register_backward_hook` goes.
    """
    warn = torch.nn.Module._maybe_warn_non_full_backward_hook

    def checked(self: torch.nn.Module, inputs: Any, result: Any, grad_fn: Any) -> None:
        check(self, inputs, result)
        warn(self, inputs, result, grad_fn)

    torch.nn.Module._maybe_warn_non_full_backward_hook = checked  # type: ignore[method-assign]


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
    return torch._C._storage_Use_Count(memory_of(tensor))


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

    torch 2.11-2.15: F.l1_loss leaves out its `weight`. Read off its frame, some calls up; who looks at calls on their
    way, as a trace does, calls it again, without. Can go with the bug.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is func.__code__ and frame.f_locals.get(name) is not None:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


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


# ---------------------------------------------------------------------- compiling

# torch 2.11-2.15: nested containers of arguments; torch.utils.pytree (without the underscore) is not in all of them.
tree_flatten = torch.utils._pytree.tree_flatten
tree_unflatten = torch.utils._pytree.tree_unflatten


def aot_traced(
    body: Any, inputs: list, partition: Any, compilers: tuple[Any, Any, Any], decompositions: dict, mutate: bool
) -> Any:
    """A function of tensors traced into a forward and a backward graph, or one graph without gradients, and compiled.

    `compilers`: of the forward, the backward and the gradient-free graph. `mutate`: they may write into inputs.
    torch 2.11-2.15: AOTAutograd, by the way in that torch's own backends use; no public name.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.config import patch as config
    from torch._guards import TracingContext
    from torch._guards import tracing as tracing_with
    from torch._subclasses import FakeTensorMode

    class Body(torch.nn.Module):
        def forward(self, *flat: Any) -> Any:
            return body(*flat)

    forward, backward, inference = compilers
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Donated buffers would forbid retain_graph=True, which a program that is not compiled allows.
    with tracing_with(TracingContext(fake)), config(donated_buffer=False):
        return aot_module_simplified(
            Body(),
            inputs,
            forward,
            backward,
            partition,
            decompositions,
            keep_inference_input_mutations=mutate,
            inference_compiler=inference,
        )


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    """Split a joint graph such that little is kept for backward. torch 2.11-2.15; no public name."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def boxed_graph(graph: Any) -> Any:
    """A compiled graph as AOTAutograd calls it, with a list that it may empty. torch 2.11-2.15; no public name."""
    from torch._functorch.aot_autograd import make_boxed_func

    return graph if getattr(graph, "_boxed_call", False) else make_boxed_func(graph)


def inductor_decompositions() -> dict:
    """What Inductor wants taken apart. torch 2.11-2.15; no public name."""
    import torch._inductor.lowering  # noqa: F401 (a decomposition of pools asks for it by this name)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_compile(graph: Any, inputs: Any, is_backward: bool, outputs: int, in_order: bool) -> Any:
    """A graph compiled by Inductor; `outputs` of its results keep the strides that they have.

    in_order: calls stay in the order of the graph, where Inductor would otherwise save memory by another one.

    torch 2.11-2.15: the compiler behind torch.compile; no public name. Random numbers come from torch's generators.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    graph.graph.output_node().meta["user_visible_output_idxs"] = [] if is_backward else list(range(outputs))
    with config.patch(fallback_random=True, **({"reorder_for_peak_memory": False} if in_order else {})):
        return compile_fx_inner(graph, inputs, is_backward=is_backward)


def start_fake_world(rank: int, size: int) -> None:
    """A default process group of any size in which this process is one rank and the others are not there.

    torch 2.11-2.15: the backend "fake" is torch's own, for its tests, and registered by importing this module.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def without_data() -> Any:
    """A context in which tensors have shapes, dtypes and devices and no data. torch 2.11-2.15: documented, no public
    name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def out_of_memo(tensor: Any) -> None:
    """Have the mode that made a tensor without data keep no weak reference to it: it could not be swapped.

    torch 2.15: the first result of a kind is kept so. 2.11-2.15 have the table; nothing public empties it.
    """
    mode = getattr(tensor, "fake_mode", None)
    if mode is not None:
        memo = mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [key for key, value in memo.items() if value is tensor]:
            del memo[key]


# torch 2.11-2.15: what a call raises when its result hangs on numbers that tensors without data do not have.
def data_wanted() -> tuple[type[Exception], ...]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of a call below autograd: products, convolutions, attention; 0 for all else.

    torch 2.11-2.15: `torch.utils.flop_counter` has a formula for each operator, by its packet, which has no public
    name; it lacks the attention kernel of the CPU, whose first arguments are those of CUDA's.
    """
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    packet = func._overloadpacket
    if packet is flash_cpu._overloadpacket:
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if packet is flash_cpu_backward._overloadpacket:
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    count = formula(*args, **kwargs, out_val=out)
    first = out[0] if isinstance(out, (tuple, list)) else out
    return 4 * count if first is not None and first.is_complex() else count


def group_in(args: Any) -> Any:
    """The process group among the arguments of an operator of torch.distributed.

    torch 2.11-2.15: operators get groups boxed, or by name where they are traceable; no public name unboxes them.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return torch.distributed.ProcessGroup.unbox(value)
            except RuntimeError:  # a box of something else
                continue
    return process_group(args[-1])


def mutates(target: Any) -> bool:
    """Whether a call in a traced graph writes into its arguments. torch 2.11-2.15; no public name."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def merged_graph(graph: Any) -> Any:
    """A graph in which equal calls are made once; random ones and messages stay. torch 2.11-2.15; no public name."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def forget_meshes() -> None:
    """Empty DTensor's tables, whose entries hold the groups of a mesh and are found by any mesh that equals it.

    torch 2.11-2.15: no public way; a second world in one process would send through the groups of the first.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    for name in ("propagate_op_sharding", "_propagate_tensor_meta"):
        table = getattr(propagator, name, None)
        if table is not None and hasattr(table, "cache_clear"):
            table.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and not isinstance(value, type):
                    value.cache_clear()


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in `without_data`. torch 2.11-2.15: its class has no public name."""
    return tensor.__class__.__module__ == "torch._subclasses.fake_tensor"


def asks_for_values(error: BaseException | None) -> bool:
    """Whether a trace failed because it would have had to look at values. torch 2.11-2.15; no public names."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def few_chunks() -> Iterator[None]:
    """Inside, FSDP2 cuts parameters for a thousand ranks without a thousand empty tensors each.

    torch 2.11-2.15: what it makes of a parameter's chunks is this rank's; without data each of the others takes as long
    to make as a real call. Where the name is gone, it is only slow.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param as module

    before = getattr(module, "_chunk_with_empty", None)

    def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        found = list(torch.chunk(tensor, count, dim=dim))
        return found + [tensor.new_empty(0)] * (count - len(found))

    if before is not None:
        module._chunk_with_empty = chunks
    try:
        yield
    finally:
        if before is not None:
            module._chunk_with_empty = before
