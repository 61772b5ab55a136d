"""Enter autograd's engine, and its nodes, in fewer calls than torch's own Python code."""

from __future__ import annotations

from typing import Any

import torch

from . import override_modes, transforms_active


def backward(outputs: list[torch.Tensor], seeds: list, retain_graph: Any, create_graph: bool, inputs: Any) -> None:
    """Call `torch.autograd.backward`; for the gradients of one real number, the part of it that such a call needs.

    torch 2.11-2.15: its checks take as long as the engine needs for a small graph. The name of the engine's call is
    private, and `patches.replace_engine_call` replaces it.
    """
    first = outputs[0]
    simple = len(outputs) == 1 and seeds[0] is None and inputs is None and first.requires_grad
    if not simple or not first.is_floating_point() or override_modes() or transforms_active():
        torch.autograd.backward(outputs, seeds, retain_graph, create_graph, inputs=inputs)
        return
    keep = create_graph if retain_graph is None else retain_graph
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    run((first,), (torch.ones_like(first),), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True)


class DirectBackward(torch.autograd.function.FunctionMeta):
    """Metaclass of Functions whose nodes are their `backward`.

    torch 2.11-2.15: the engine calls `apply` of a node, which searches the Function for `backward` or `vjp` each time.
    The class of the nodes has no public name.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]):
        super().__init__(name, bases, attributes)
        cls._backward_cls.apply = cls.backward  # type: ignore[attr-defined]
