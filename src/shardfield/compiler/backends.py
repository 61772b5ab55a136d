"""What makes a traced graph run: Inductor, the graph as it is, or a user's own compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .._compat.aot import boxed_graph, inductor_compile, inductor_decompositions
from .collective_ops import WAIT

BACKEND_NAMES = ("inductor", "aot_eager")


class Backend:
    """A compiler of local graphs: `(graph, example inputs) -> callable` of tensors."""

    def __init__(self, chosen: str | Callable):
        if isinstance(chosen, str) and chosen not in BACKEND_NAMES:
            raise ValueError(f"compile: backend {chosen!r} is not one of {', '.join(BACKEND_NAMES)}, nor a function")
        self.name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "custom")
        self._chosen = chosen
        self.mutates = chosen == "inductor"  # writes into inputs are part of the graph

    def decompositions(self) -> dict[Any, Callable]:
        """What the compiler wants taken apart."""
        return inductor_decompositions() if self._chosen == "inductor" else {}

    def compile(self, graph: GraphModule, inputs: Sequence[Any], is_backward: bool, outputs: int) -> Callable:
        """`outputs` of the graph's results are the user's; the others are kept for backward."""
        if self._chosen == "inductor":
            travels = any(node.target is WAIT for node in graph.graph.nodes)  # then work is where it hides messages
            return inductor_compile(graph, inputs, is_backward, outputs, travels)
        _views_to_reshapes(graph)
        if self._chosen == "aot_eager":
            return boxed_graph(graph)
        assert callable(self._chosen)
        return boxed_graph(self._chosen(graph, inputs))


def _views_to_reshapes(graph: GraphModule) -> None:
    """A kernel's results may lie otherwise than its trace says (Fourier transforms of torch 2.11 do).

    So what is a view in the trace copies where it can be none. Inductor looks at what comes, and raises.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
