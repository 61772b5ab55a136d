"""Private names for traced and compiled programs: AOTAutograd, its graphs, Inductor."""

from __future__ import annotations

from typing import Any

import torch

from .storage import unwrap_functional


def is_written(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was written since AOTAutograd began to trace. torch 2.11-2.15; no public name."""
    inner = unwrap_functional(tensor)
    return inner is not tensor and torch._functionalize_has_data_mutation(inner)  # type: ignore[attr-defined]


# torch 2.11-2.15: mark an op that stays in a graph although its result is not used. No public name.
has_side_effect = torch.fx.node.has_side_effect

# torch 2.11-2.15: nested containers of arguments; torch.utils.pytree (without the underscore) is not in all of them.
tree_flatten = torch.utils._pytree.tree_flatten
tree_unflatten = torch.utils._pytree.tree_unflatten


def aot_compile(
    body: Any, inputs: list, partition: Any, compilers: tuple[Any, Any, Any], decompositions: dict, mutate: bool
) -> Any:
    """Trace a function of tensors into a forward and a backward graph, or an inference graph, and compile them.

    `compilers` are those of the forward, the backward and the inference graph. `mutate`: graphs may write inputs.
    torch 2.11-2.15: AOTAutograd, by the entry point that torch's own backends use; no public name.
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
    # Donated buffers would forbid retain_graph=True, which an uncompiled program allows.
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
    """Split a joint graph so that few tensors are saved for backward. torch 2.11-2.15; no public name."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def boxed_graph(graph: Any) -> Any:
    """Return a compiled graph that takes a list of arguments and may clear it. torch 2.11-2.15; no public name."""
    from torch._functorch.aot_autograd import make_boxed_func

    return graph if getattr(graph, "_boxed_call", False) else make_boxed_func(graph)


def inductor_decompositions() -> dict:
    """Return Inductor's table of decompositions. torch 2.11-2.15; no public name."""
    import torch._inductor.lowering  # noqa: F401 (a decomposition of pools looks it up by this name)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_compile(graph: Any, inputs: Any, is_backward: bool, outputs: int, in_order: bool) -> Any:
    """Compile a graph with Inductor; the first `outputs` results keep their strides.

    in_order: keep the order of the calls, which Inductor would otherwise change to save memory.

    torch 2.11-2.15: the compiler behind torch.compile; no public name. Random numbers come from torch's generators.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    graph.graph.output_node().meta["user_visible_output_idxs"] = [] if is_backward else list(range(outputs))
    with config.patch(fallback_random=True, **({"reorder_for_peak_memory": False} if in_order else {})):
        return compile_fx_inner(graph, inputs, is_backward=is_backward)


def mutates(target: Any) -> bool:
    """Return whether a call in a traced graph writes its arguments. torch 2.11-2.15; no public name."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def eliminate_common_calls(graph: Any) -> Any:
    """Merge equal calls of a graph, except random ones and collectives. torch 2.11-2.15; no public name."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def is_data_dependent_error(error: BaseException | None) -> bool:
    """Return whether a trace failed because it needed values of tensors. torch 2.11-2.15; no public names."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
