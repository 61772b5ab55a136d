"""Agree, before a backward through gradients, on the collectives that it issues.

`create_graph=True` records the formulas of backward, so that gradients can be differentiated again. Which formulas
torch records depends on shapes: of an empty shard it may record none. Where the graphs of two ranks reach different
collectives, one rank would block in a message that the other never sends. So while such a graph is alive, a backward
begins with one small message that compares the collectives of all ranks, in the order in which the engine runs them:
all ranks raise or none does. Ranks also agree on which gradients exist (zeros where another rank has one) and which of
them require grad. Programs without `create_graph` send nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime, trace_state
from .._compat import in_backward
from ..comm import collectives
from ..comm.adjoints import Collective, Exchange
from ..comm.consensus import any_rank, group_device, mesh_groups
from ..comm.grad_deferral import refuse_shares
from ..comm.route import Route
from ..errors import ShardingError
from .empty_shards import sum_of_nothing

_TOKEN = "shardfield"  # key of a node's metadata
# Nodes of torch that only raise: derivatives that it has not. `Error` stands for a backward that found a value
# for which there is none.
_MISSING = (
    "torch::autograd::NotImplemented",
    "torch::autograd::Error",
    "CdistBackwardBackward",
    "PdistBackwardBackward",
    "EmbeddingBagBackwardBackward",
    "EmbeddingBagDenseBackwardBackward",
)


class _Alive:
    """Live as long as the node that holds it."""


@dataclass
class Recorded:
    """The graphs of gradients of one world: `groups` of the backwards that recorded them, while `tokens` live.

    `leaves` holds the token of the gradients of leaves, whose nodes are not known.
    """

    groups: dict[ProcessGroup, None] = field(default_factory=dict)
    tokens: WeakSet[_Alive] = field(default_factory=WeakSet)
    leaves: _Alive | None = None


def run_engine(
    run: Callable[..., Any],
    outputs: Sequence[Tensor],
    gradients: Any,
    keep: Any,
    create_graph: Any,
    inputs: Sequence[Tensor],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Call torch's engine; of a backward through gradients, compare the ranks before and after."""
    rt = runtime.active
    if rt.virtual is not None and inputs and not accumulate_grad:
        refuse_shares(inputs)
    recorded = rt.recorded
    if not create_graph and (recorded is None or not recorded.groups):
        return run(outputs, gradients, keep, create_graph, inputs, allow_unreachable, accumulate_grad=accumulate_grad)
    if recorded is None:
        recorded = rt.recorded = Recorded()
    nested = in_backward() or rt.tracer is not None
    sharded = not nested and _on_all_ranks(outputs)
    checked = sharded and bool(recorded.groups) and _agree(recorded, outputs, inputs)
    if create_graph and sharded:
        recorded.groups.update(dict.fromkeys(_groups(outputs)))
    records = bool(create_graph and sharded and recorded.groups)
    compared = (checked or records) and not accumulate_grad
    unreachable = compared or allow_unreachable
    found = run(outputs, gradients, keep, create_graph, inputs, unreachable, accumulate_grad=accumulate_grad)
    if compared:
        found = _equal_on_all_ranks(found, inputs, allow_unreachable, list(recorded.groups))
    if records:
        _keep_alive(recorded, found)
    return found


def _on_all_ranks(outputs: Sequence[Tensor]) -> bool:
    """Return whether a backward runs on all ranks: it was called on ShardTensors, or sends messages."""
    return bool(runtime.active.sharded_backward) or communicates(outputs)


def communicates(outputs: Sequence[Tensor]) -> bool:
    """Return whether backward from `outputs` sends messages."""
    return any(map(is_collective, graph_nodes(outputs)))


def is_collective(node: Any) -> bool:
    """Return whether a node of the graph may send messages."""
    return issubclass(getattr(type(node), "_forward_cls", object), Collective)


def graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph of `outputs`."""
    starts = (t.grad_fn if isinstance(t, Tensor) else t.node for t in outputs)
    stack = [node for node in starts if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _agree(recorded: Recorded, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Raise on all ranks unless all are about to issue the same collectives; return whether to compare the results."""
    nodes = _executed(outputs, inputs)
    names, pairs = _messages(nodes, recorded.groups)
    # torch has no second derivative of some functions. Its error comes in the middle of backward, where data is.
    missing = int(any(node.name().startswith(_MISSING) for node in nodes))
    alive, differs = int(len(recorded.tokens) > 0), 0
    with trace_state.concrete():
        for group in recorded.groups:
            code = _hash(names[group], 7)
            sent = torch.tensor([code, -code, alive, missing, differs], device=group_device(group))
            high, low, alive, missing, differs = collectives.all_reduce(sent, group, "max").tolist()
            differs |= high != -low
            pairs = int(collectives.all_reduce(torch.tensor([pairs], device=sent.device), group).item())
    if not alive:  # no rank has a graph of gradients any more
        recorded.groups.clear()
    if missing:
        raise ShardingError("backward: the derivative of a gradient (create_graph=True) is not implemented in torch")
    if differs or pairs:
        own = ", ".join(f"{len(of)} over {dist.get_process_group_ranks(group)}" for group, of in names.items())
        raise ShardingError(
            f"backward: the graph of a gradient (create_graph=True) differs from rank to rank. This rank would run "
            f"these collectives: {own or 'none'}\n  Which formulas torch records depends on the local shapes. What "
            "works: shards that are not empty on any rank, or redistribute to Replicate before the call whose second "
            "derivative is needed"
        )
    return bool(alive)


def _messages(nodes: Iterable[Any], recorded: Iterable[ProcessGroup]) -> tuple[dict[ProcessGroup, list[str]], int]:
    """Return the collectives of each group, the recorded ones first, and a number for the messages between two ranks.

    Only ranks that exchange something need a node for it. Each message adds a number on one of its ranks and subtracts
    the same on the other, so that the sum over all ranks is 0 if every message has both.
    """
    names: dict[ProcessGroup, list[str]] = {group: [] for group in recorded}
    pairs, between = 0, Counter[tuple[int, ...]]()
    for function, node in ((type(n)._forward_cls, n) for n in nodes if is_collective(n)):
        groups = list(_groups_of(node))
        if function is Exchange:
            (group, *_), ranks = (groups, dist.get_process_group_ranks(groups[0])) if groups else ([None], ())
            for sign, source, target in _sends(node.how[0], node.block):
                ends = ranks[source], ranks[target]
                between[ends] += 1
                pairs += sign * _hash([*map(str, ends), str(between[ends]), str(len(names.get(group, ())))], 4)
        elif function.backward_sends:
            for group in groups if any(_process_groups(node)) else names:
                names.setdefault(group, []).append(function.__name__)
    return names, pairs


def _sends(route: Route, block: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield the messages of backward, (1, sender, this rank) and (-1, this rank, receiver), without empty ones."""
    for sign, peers, shape in ((1, route.send, block), (-1, route.recv, route.shapes_for(block).result)):
        for peer, regions in peers:
            if any(math.prod(region.shape(shape)) for region in regions):
                yield (sign, peer, route.coord) if sign == 1 else (sign, route.coord, peer)


def _hash(words: list[str], size: int) -> int:
    return int.from_bytes(hashlib.blake2b("|".join(words).encode(), digest_size=size).digest(), "big")


def _executed(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
    """Return the nodes that the engine runs, in its order: the node that was recorded last comes first."""
    nodes = sorted(graph_nodes(outputs), key=lambda node: node._sequence_nr(), reverse=True)
    if not inputs:
        return nodes
    edge = torch.autograd.graph.get_gradient_edge
    targets = {edge(t).node if isinstance(t, Tensor) else t.node for t in inputs}
    runs: set[Any] = set()  # nodes on a way to an input
    for node in reversed(nodes):
        if any(n in runs or n in targets for n, _ in node.next_functions):
            runs.add(node)
    return [node for node in nodes if node in runs]


def _equal_on_all_ranks(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor], allow_unused: bool, groups: Sequence[ProcessGroup]
) -> tuple[Tensor | None, ...]:
    """Return gradients that exist and require grad on all ranks or on none. Raise torch's error if one is missing."""
    facts = [fact for g in found for fact in (g is not None, g is not None and g.requires_grad)]
    agreed = any_rank(facts, groups)
    exist, require_grad = agreed[::2], agreed[1::2]
    if not (allow_unused or all(exist)):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(
        _with_graph(torch.zeros_like(x) if g is None else g, x, required) if exists and isinstance(x, Tensor) else g
        for g, x, exists, required in zip(found, inputs, exist, require_grad, strict=True)
    )


def _with_graph(gradient: Tensor, source: Tensor, required: bool) -> Tensor:
    """Return a gradient that requires grad if it does on another rank."""
    if gradient.requires_grad or not required:
        return gradient
    with torch.enable_grad():
        return gradient + sum_of_nothing(source).to(gradient.dtype)


def _groups(outputs: Sequence[Tensor]) -> Iterator[ProcessGroup]:
    """Yield the groups of the ShardTensors and those of the graph's collectives, which are equal on all ranks."""
    for mesh in runtime.active.sharded_backward:
        yield from mesh_groups(runtime.mesh_state(mesh).mesh)
    for node in sorted(filter(is_collective, graph_nodes(outputs)), key=lambda n: n._sequence_nr()):
        yield from _groups_of(node)


def _groups_of(node: Any) -> Iterator[ProcessGroup]:
    """Yield the groups of several ranks that a collective names."""
    return (group for group in _process_groups(node) if group.size() > 1)


def _process_groups(node: Any) -> Iterator[ProcessGroup]:
    stack = list(vars(node).values())
    while stack:
        value = stack.pop()
        if isinstance(value, ProcessGroup):
            yield value
        elif isinstance(value, (tuple, list)):
            stack += value


def _keep_alive(recorded: Recorded, found: Sequence[Tensor | None] | None) -> None:
    """Note that the graph of these gradients may be differentiated while one of them, or a result of it, exists."""
    token = _Alive()
    recorded.tokens.add(token)
    if found is None:  # gradients of leaves, which are not known here
        recorded.leaves = token
        return
    for gradient in found:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.metadata[_TOKEN] = token
