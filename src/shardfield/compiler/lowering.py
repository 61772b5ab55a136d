"""From a traced graph to what a compiler gets: every message is sent, and the chosen passes are applied."""

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
MAX_REDUNDANCY = 0.1  # of the work may be done on two ranks so that layers share a halo


class Passes:
    """The chosen passes."""

    def __init__(self, chosen: Iterable[str] | None = None):
        self.enabled = PASS_NAMES if chosen is None else tuple(chosen)
        unknown = [n for n in self.enabled if n not in PASS_NAMES]
        if unknown:
            raise ValueError(f"compile: no pass is named {unknown[0]!r}; there are {', '.join(PASS_NAMES)}")

    def make_compilers(
        self,
        backend: Backend,
        writer: CollectiveTracer,
        calls: TracedCalls,
        together: TraceConsensus,
        done: Callable[[], None],
    ):
        """What splits a joint graph, and the compilers of forward, backward and gradient-free graphs."""
        outputs = 0

        def prepared(graph: GraphModule, results: int, forward: int) -> GraphModule:
            done()
            chosen = [p for p in ("once", "buckets") if p in self.enabled]
            fewer = eliminate_common_calls(
                graph.graph
            )  # what is computed twice once, so that equal messages are seen to be equal
            left, done_so = forward, []
            for name in chosen:
                left, changes = getattr(passes, name)(fewer, left)
                done_so.append(changes)
            # all ranks ask, for passes must change all ranks' messages alike
            if together.check_graphs(passes.fingerprint(graph.graph, done_so)) and chosen:
                graph.graph, forward = fewer, left
            keep_collectives(graph, results, forward)
            return graph

        def overlapped(graph: GraphModule) -> GraphModule:
            if "overlap" in self.enabled:
                passes.overlap(graph.graph)
                _lint_and_recompile(graph)
            return graph

        def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any):
            nonlocal outputs
            outputs = num_fwd_outputs
            prepared(joint, num_fwd_outputs, writer.forward)
            for node in joint.graph.nodes:
                if node.target is WAIT:  # what it brought is kept for backward, if it is wanted there: it lands once
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

        def forward(graph: GraphModule, inputs: Any) -> Callable:
            return calls.instrument(backend.compile(overlapped(graph), inputs, False, outputs), has_backward=True)

        def backward(graph: GraphModule, inputs: Any) -> Callable:
            return calls.instrument(backend.compile(overlapped(graph), inputs, True, 0), backward=True)

        def inference(graph: GraphModule, inputs: Any) -> Callable:
            count = len(graph.graph.output_node().args[0])
            found = overlapped(prepared(graph, count, writer.count))
            return calls.instrument(backend.compile(found, inputs, False, count))

        return partition, (forward, backward, inference)


def keep_collectives(graph: GraphModule, outputs: int, forward: int) -> None:
    """Every message is sent, whoever reads it: forward's before forward ends, backward's before backward does.

    What is not landed need not be kept, and backward's first message waits for a gradient to come.
    """
    sent = passes.find_starts(graph.graph)
    for start in sent:
        if not any(user.target is WAIT for user in start.users):
            start.update_arg(len(start.args) - 1, False)
    (results,) = graph.graph.output_node().args
    tangents = [n for n in graph.graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")]
    if len(sent) > forward and tangents:
        first = sent[forward]
        first.update_arg(len(first.args) - 2, tangents[0])
    ends = list(results)
    for chain, low, high in ((sent[:forward], 0, outputs), (sent[forward:], outputs, len(ends))):
        if chain and not _reaches_any(chain[-1], ends[low:high]):
            tied = _add_dependency(graph, chain[-1], ends, low, high)
            assert tied, "messages, and no result that could wait for them"
    if tangents:  # what forward's messages bring lands in forward, or a partitioner might have it land in both
        for landing in [user for start in sent[:forward] for user in start.users if user.target is WAIT]:
            if landing.users and not _reaches_any(landing, ends[:outputs]):
                _add_dependency(graph, landing, ends, 0, outputs)
    graph.graph.output_node().args = (type(results)(ends),)
    _lint_and_recompile(graph)


def _lint_and_recompile(graph: GraphModule) -> None:
    graph.graph.lint()
    graph.recompile()


def _reaches_any(node: Node, ends: Sequence[Any]) -> bool:
    """Whether any of the results needs a node."""
    wanted = {e for e in ends if isinstance(e, Node)}
    ahead, seen = [node], {node}
    while ahead:
        here = ahead.pop()
        if here in wanted:
            return True
        for user in here.users:
            if user not in seen:
                seen.add(user)
                ahead.append(user)
    return False


def _add_dependency(graph: GraphModule, last: Node, ends: list[Any], low: int, high: int) -> bool:
    """Make the smallest of the results wait for a message."""
    found = [i for i in range(low, high) if isinstance(ends[i], Node) and hasattr(ends[i].meta.get("val"), "numel")]
    if not found:
        return False
    at = min(found, key=lambda i: ends[i].meta["val"].numel())
    with graph.graph.inserting_before(graph.graph.output_node()):
        tied = graph.graph.call_function(DEPEND, (ends[at], last))
    tied.meta = dict(ends[at].meta)
    ends[at] = tied
    return True
