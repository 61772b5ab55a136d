"""Backends that compile a traced graph: Inductor, none (the graph runs as traced), or a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .._compat.aot import boxed_graph, inductor_compile, inductor_decompositions
from .collective_ops import AT_ONCE, START_OPS

BACKEND_NAMES = ("inductor", "aot_eager")


class Backend:
    """Compile local graphs: `(graph, example inputs) -> callable` of tensors."""

    def __init__(self, chosen: str | Callable):
        if isinstance(chosen, str) and chosen not in BACKEND_NAMES:
            raise ValueError(f"compile: backend {chosen!r} is not one of {', '.join(BACKEND_NAMES)}, nor a callable")
        self.name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "custom")
        self._chosen = chosen
        self.mutates = chosen == "inductor"  # whether the graph itself contains the writes into its inputs

    def decompositions(self) -> dict[Any, Callable]:
        """Return the decompositions that the compiler expects to be applied before it gets a graph."""
        return inductor_decompositions() if self._chosen == "inductor" else {}

    def compile(self, graph: GraphModule, inputs: Sequence[Any], is_backward: bool, outputs: int) -> Callable:
        """Compile a graph. Its first `outputs` results are returned to the user; the others are saved for backward."""
        if self._chosen == "inductor":
            # Inductor must not reorder a graph with collectives: the order overlaps them with computation.
            has_collectives = any(node.target in (*START_OPS, *AT_ONCE.values()) for node in graph.graph.nodes)
            return inductor_compile(graph, inputs, is_backward, outputs, has_collectives)
        _views_to_reshapes(graph)
        if self._chosen == "aot_eager":
            return boxed_graph(graph)
        assert callable(self._chosen)
        return boxed_graph(self._chosen(graph, inputs))


def _views_to_reshapes(graph: GraphModule) -> None:
    """Replace every `view` by `reshape`, which copies where a view is impossible.

    The strides of a kernel's result may differ from those in its trace: FFTs of torch 2.11 do so, and `view` raises
    then. Inductor does not need this: its code asserts strides.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
