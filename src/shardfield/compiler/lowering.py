"""Prepare a traced graph for the compiler: apply the selected passes, and keep every collective alive and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .._compat.aot import eliminate_common_calls, min_cut_partition
from . import passes
from .attribution import TracedCalls
from .backends import Backend
from .collective_ops import DEPEND, WAIT, CollectiveTracer
from .trace_consensus import TraceConsensus

PASS_NAMES = ("halos", "once", "buckets", "overlap")
MAX_REDUNDANCY = 0.1  # fraction of the work that may be computed on two ranks so that layers share a halo


class Passes:
    """The selected graph passes."""

    def __init__(self, chosen: Iterable[str] | None = None):
        self.enabled = PASS_NAMES if chosen is None else tuple(chosen)
        unknown = [n for n in self.enabled if n not in PASS_NAMES]
        if unknown:
            raise ValueError(f"compile: no pass is named {unknown[0]!r}; the passes are {', '.join(PASS_NAMES)}")

    def make_compilers(
        self,
        backend: Backend,
        tracer: CollectiveTracer,
        calls: TracedCalls,
        consensus: TraceConsensus,
        on_traced: Callable[[], None],
    ):
        """Return the partitioner of a joint graph, and the compilers of forward, backward and inference graphs.

        `on_traced` is called when a graph arrives, that is when its trace has ended.
        """
        outputs = 0

        def prepare(graph: GraphModule, num_outputs: int, forward_count: int) -> GraphModule:
            on_traced()
            chosen = [p for p in ("once", "buckets") if p in self.enabled]
            # Common subexpressions first: two collectives are identical only if their inputs are the same node.
            optimized = eliminate_common_calls(graph.graph)
            count_after, all_changes = forward_count, []
            for name in chosen:
                count_after, changes = getattr(passes, name)(optimized, count_after)
                all_changes.append(changes)
            # Every rank takes part in this check. If ranks applied different changes, collectives would not match.
            if consensus.check_graphs(passes.fingerprint(graph.graph, all_changes)) and chosen:
                graph.graph, forward_count = optimized, count_after
            keep_collectives(graph, num_outputs, forward_count)
            return graph

        def overlap(graph: GraphModule) -> GraphModule:
            if "overlap" in self.enabled:
                passes.overlap(graph.graph)
            passes.join_waits(graph.graph)
            _lint_and_recompile(graph)
            return graph

        def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any):
            nonlocal outputs
            outputs = num_fwd_outputs
            prepare(joint, num_fwd_outputs, tracer.forward_count)
            for node in joint.graph.nodes:
                if node.target is WAIT:  # a result that backward needs is saved: a token can be waited for only once
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

        def forward(graph: GraphModule, inputs: Any) -> Callable:
            return calls.instrument(backend.compile(overlap(graph), inputs, False, outputs), has_backward=True)

        def backward(graph: GraphModule, inputs: Any) -> Callable:
            return calls.instrument(backend.compile(overlap(graph), inputs, True, 0), backward=True)

        def inference(graph: GraphModule, inputs: Any) -> Callable:
            count = len(graph.graph.output_node().args[0])
            prepared = overlap(prepare(graph, count, tracer.count))
            return calls.instrument(backend.compile(prepared, inputs, False, count))

        return partition, (forward, backward, inference)


def keep_collectives(graph: GraphModule, outputs: int, forward_count: int) -> None:
    """Make results depend on the last collectives, so that none is removed as dead code.

    The first `outputs` results depend on the last of the `forward_count` collectives of the forward, and the gradients
    on the last collective of the backward. The first collective of the backward depends on an incoming gradient, so
    that the partitioner does not move it into the forward. A collective without a wait op is marked as not kept.
    """
    starts = passes.find_starts(graph.graph)
    for start in starts:
        if not any(user.target is WAIT for user in start.users):
            start.update_arg(len(start.args) - 1, False)
    (results,) = graph.graph.output_node().args
    tangents = [n for n in graph.graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")]
    if len(starts) > forward_count and tangents:
        first = starts[forward_count]
        first.update_arg(len(first.args) - 2, tangents[0])
    new_results = list(results)
    forward_range, backward_range = (0, outputs), (outputs, len(new_results))
    for chain, (low, high) in ((starts[:forward_count], forward_range), (starts[forward_count:], backward_range)):
        if chain and not _reaches_any(chain[-1], new_results[low:high]):
            added = _add_dependency(graph, chain[-1], new_results, low, high)
            assert added, "no result can depend on the last collective"
    if tangents:  # a forward collective is waited for in the forward; a partitioner could place its wait in both graphs
        for wait in [user for start in starts[:forward_count] for user in start.users if user.target is WAIT]:
            if wait.users and not _reaches_any(wait, new_results[:outputs]):
                _add_dependency(graph, wait, new_results, 0, outputs)
    graph.graph.output_node().args = (type(results)(new_results),)
    _lint_and_recompile(graph)


def _lint_and_recompile(graph: GraphModule) -> None:
    graph.graph.lint()
    graph.recompile()


def _reaches_any(node: Node, results: Sequence[Any]) -> bool:
    """Return whether any of the results depends on a node."""
    targets = {r for r in results if isinstance(r, Node)}
    to_visit, seen = [node], {node}
    while to_visit:
        current = to_visit.pop()
        if current in targets:
            return True
        for user in current.users:
            if user not in seen:
                seen.add(user)
                to_visit.append(user)
    return False


def _add_dependency(graph: GraphModule, node: Node, results: list[Any], low: int, high: int) -> bool:
    """Make the smallest tensor of `results[low:high]` depend on a node. Return False if there is no tensor."""
    tensors = [
        i for i in range(low, high) if isinstance(results[i], Node) and hasattr(results[i].meta.get("val"), "numel")
    ]
    if not tensors:
        return False
    smallest = min(tensors, key=lambda i: results[i].meta["val"].numel())
    with graph.graph.inserting_before(graph.graph.output_node()):
        dependent = graph.graph.call_function(DEPEND, (results[smallest], node))
    dependent.meta = dict(results[smallest].meta)
    results[smallest] = dependent
    return True
