"""Graph passes that make collectives cheaper without changing results.

"once" merges identical collectives. "buckets" coalesces small all_reduces of gradients. "overlap" starts a collective
as soon as its input is computed, and waits for it after computation that does not need its result. A fourth pass,
"halos", works on modules before the trace (see `program`). At the end `join_waits` makes one op of a start and a wait
that no computation separates.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, Node

from .._compat.aot import mutates
from .collective_ops import AT_ONCE, DEPEND, OPS, START_OPS, WAIT

ALL_REDUCE = OPS.start_all_reduce.default
aten = torch.ops.aten

MAX_SMALL_BYTES = 1 << 20  # largest all_reduce that is coalesced
BUCKET_BYTES = 4 << 20  # largest coalesced all_reduce
MAX_JOINED_BYTES = 4 << 20  # largest result of a collective that is started and waited for by one op
MAX_MOVE = 400  # number of nodes by which a wait is postponed at most
MAX_OVERLAP_OPS = 2  # number of compute ops that one collective overlaps with at most
COMPUTE_OPS = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._fft_c2c.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
}
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.permute.default,
    aten.expand.default,
    aten.t.default,
    operator.getitem,
}


def find_starts(graph: Graph) -> list[Node]:
    """Return the ordered ops of a graph (the starts of its collectives), in order."""
    return [n for n in graph.nodes if n.target in START_OPS]


def find_waits(start: Node) -> list[Node]:
    """Return the wait ops of a collective."""
    return [user for user in start.users if user.target is WAIT]


def remove_start(start: Node) -> None:
    """Remove a collective from the graph, and link its successor to its predecessor."""
    predecessor = start.args[-2]
    for user in list(start.users):
        assert user.target in START_OPS, user
        user.update_arg(len(user.args) - 2, predecessor)
    start.graph.erase_node(start)


def merge_calls(starts: Iterable[Node]) -> list[int]:
    """Return the numbers of all calls to which the collectives belong, each once."""
    return list(dict.fromkeys(call for start in starts for call in start.args[-3]))  # type: ignore[union-attr]


Changes = list[tuple[int, ...]]  # effect of a pass: positions of the collectives that were merged into one


def once(graph: Graph, forward_count: int) -> tuple[int, Changes]:
    """Merge identical collectives, within forward and within backward. Return the new `forward_count` and the changes.

    The first `forward_count` collectives of the graph belong to the forward.
    """
    first_seen: dict[tuple, tuple[int, Node]] = {}
    remaining = forward_count
    changes: Changes = []
    for i, start in enumerate(find_starts(graph)):
        key = (i < forward_count, start.target, *map(_hashable, start.args[:-3]))
        position, first = first_seen.setdefault(key, (i, start))
        if first is start:
            continue
        waits, first_waits = find_waits(start), find_waits(first)
        if waits and not first_waits:
            continue  # the first one has no wait op whose result could be used
        for wait in waits:
            first_wait = first_waits[0]
            if wait < first_wait:  # in the order of the graph
                wait.prepend(first_wait)
            wait.replace_all_uses_with(first_wait)
            graph.erase_node(wait)
        first.update_arg(len(first.args) - 3, merge_calls([first, start]))
        remove_start(start)
        remaining -= i < forward_count
        changes.append((position, i))
    return remaining, changes


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value


def buckets(graph: Graph, forward_count: int) -> tuple[int, Changes]:
    """Coalesce small, mutually independent all_reduces of the backward. Return `forward_count` and the changes."""
    opened: dict[tuple, list[Node]] = {}
    closed: list[list[Node]] = []
    dependents: dict[Node, set[Node]] = {}  # start op -> start ops that depend on its result

    def close(key: tuple) -> None:
        closed.append(opened.pop(key))

    starts = find_starts(graph)
    for start in starts[forward_count:]:
        for key, members in list(opened.items()):
            if any(start in dependents[m] for m in members):
                close(key)
        if start.target is not ALL_REDUCE or start.args[1] != "sum":
            continue
        value = start.args[0].meta["val"]
        size = value.numel() * value.element_size()
        if size > MAX_SMALL_BYTES or not find_waits(start):
            continue
        dependents[start] = _dependent_starts(find_waits(start))
        # An all_reduce that others depend on is not delayed by one that none depends on (the gradient of a weight).
        key = (start.args[2], value.dtype, value.device, bool(dependents[start]))
        if key in opened and sum(_nbytes(m) for m in opened[key]) + size > BUCKET_BYTES:
            close(key)
        opened.setdefault(key, []).append(start)
    merged = [members for members in [*closed, *opened.values()] if len(members) > 1]
    changes = [tuple(starts.index(m) for m in members) for members in merged]
    for members in merged:
        _merge_all_reduces(graph, members)
    return forward_count, changes


def _nbytes(start: Node) -> int:
    value = start.args[0].meta["val"]
    return value.numel() * value.element_size()


def _dependent_starts(nodes: Iterable[Node]) -> set[Node]:
    """Return the start ops that depend on any of the nodes."""
    return {n for n in _transitive_users(nodes) if n.target in START_OPS}


def _transitive_users(nodes: Iterable[Node]) -> set[Node]:
    seen, to_visit = set(nodes), list(nodes)
    while to_visit:
        for user in to_visit.pop().users:
            if user not in seen:
                seen.add(user)
                to_visit.append(user)
    return seen


def _merge_all_reduces(graph: Graph, members: list[Node]) -> None:
    """Replace all_reduces by one over their concatenated inputs, at the position of the last one."""
    last = members[-1]
    values = [m.args[0].meta["val"] for m in members]

    def add(target, args, value):
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    with graph.inserting_before(last):
        flat = [
            add(aten.reshape.default, (m.args[0], [-1]), v.new_empty(v.numel()))
            for m, v in zip(members, values, strict=True)
        ]
        total = sum(v.numel() for v in values)
        joined = add(aten.cat.default, (flat,), values[0].new_empty(total))
        options = (*last.args[1:-3], merge_calls(members), *last.args[-2:])
        start = add(ALL_REDUCE, (joined, *options), last.meta["val"])
    first_wait = min(wait for m in members for wait in find_waits(m))
    with graph.inserting_after(start):
        merged_wait = add(WAIT, (start, joined, [total]), values[0].new_empty(total))
    if first_wait < last:  # move users of the waits after the merged wait; no start op is among them
        _move_after(graph, [wait for m in members for wait in find_waits(m)], merged_wait)
    offset, after = 0, merged_wait
    for member, value in zip(members, values, strict=True):
        stop = offset + value.numel()
        with graph.inserting_after(after):
            part = add(aten.slice.Tensor, (merged_wait, 0, offset, stop), value.new_empty(value.numel()))
        with graph.inserting_after(part):
            shaped = after = add(aten.reshape.default, (part, list(value.shape)), value.new_empty(value.shape))
        for old in find_waits(member):
            old.replace_all_uses_with(shaped)
            graph.erase_node(old)
        offset = stop
    for user in list(last.users):
        user.update_arg(len(user.args) - 2, start)
    for member in members:
        remove_start(member)


def _move_after(graph: Graph, waits: list[Node], target: Node) -> None:
    """Move wait ops and all nodes that depend on them to after the target, in their present order."""
    moved = _transitive_users(waits)
    previous = target
    for node in [n for n in graph.nodes if n in moved and n < target]:
        previous.append(node)
        previous = node


def overlap(graph: Graph) -> None:
    """Start each collective as soon as its input is computed, and wait for it after independent computation."""
    for start in find_starts(graph):
        _hoist(graph, start)
    for wait in [n for n in graph.nodes if n.target is WAIT]:
        _sink(graph, wait)
    _rebalance_overlap(graph)


def _rebalance_overlap(graph: Graph) -> None:
    """Move a compute op from a collective that overlaps with several to a later collective that overlaps with none.

    The backward of a convolution has two compute ops, for the gradients of input and weight, and both overlap with the
    halo exchange. Only the gradient of the input is needed next. The gradient of the weight can be postponed to overlap
    with a later collective, for example the all_reduce of the preceding norm.
    """
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    pairs = [(wait.args[0], wait) for wait in nodes if wait.target is WAIT]
    overlapped = {
        wait: [n for n in nodes[index[start] : index[wait]] if n.target in COMPUTE_OPS] for start, wait in pairs
    }
    for start, wait in pairs:
        if overlapped[wait]:
            continue
        for donor in reversed([w for _, w in pairs if index[w] < index[start] and len(overlapped[w]) > 1]):
            candidates = (_deferrable_nodes(op, start, wait, nodes, index) for op in overlapped[donor])
            moved = next(filter(None, candidates), None)
            if moved is None:
                continue
            for node in moved:
                wait.prepend(node)
            overlapped[donor].remove(moved[0])
            overlapped[wait].append(moved[0])
            nodes = list(graph.nodes)
            index = {node: i for i, node in enumerate(nodes)}
            break


def _deferrable_nodes(
    compute: Node, start: Node, wait: Node, nodes: list[Node], index: dict[Node, int]
) -> list[Node] | None:
    """Return a compute op and its dependents before `wait`, or None if they cannot move to after `start`."""
    if index[wait] - index[compute] > MAX_MOVE:
        return None
    moved = {compute}
    for node in nodes[index[compute] + 1 : index[wait]]:
        if mutates(node.target):
            return None
        if any(n in moved for n in node.all_input_nodes):
            if node.target in START_OPS or node.target is WAIT:
                return None
            moved.add(node)
    return None if any(n in moved for n in wait.all_input_nodes) else sorted(moved, key=index.__getitem__)


def _hoist(graph: Graph, start: Node) -> None:
    """Move a start op up to right after its last input, with the cheap nodes that only prepare that input."""
    moved, to_visit = {start}, [start]
    while to_visit:
        for needed in to_visit.pop().all_input_nodes:
            if needed.op == "call_function" and needed.target not in COMPUTE_OPS and needed.target not in START_OPS:
                if needed.target is not WAIT and all(user in moved for user in needed.users) and needed not in moved:
                    moved.add(needed)
                    to_visit.append(needed)
    inputs = {needed for n in moved for needed in n.all_input_nodes if needed not in moved}
    if not inputs:
        return
    previous = max(inputs)
    if previous.op == "placeholder":
        previous = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in [n for n in graph.nodes if n in moved]:
        if node < previous:
            continue
        if previous.next is not node:
            previous.append(node)
        previous = node


def _sink(graph: Graph, wait: Node) -> None:
    """Delay a wait op: move up to MAX_OVERLAP_OPS later compute ops that do not depend on it to before it."""
    dependents, independent, compute_count, last = {wait}, [], 0, None
    node, seen = wait.next, 0
    while node.op != "output" and seen < MAX_MOVE and compute_count < MAX_OVERLAP_OPS:
        if mutates(node.target):
            break
        if any(n in dependents for n in node.all_input_nodes):
            dependents.add(node)
        else:
            independent.append(node)
            if node.target in COMPUTE_OPS:
                compute_count, last = compute_count + 1, node
        node, seen = node.next, seen + 1
    if last is None:
        return
    candidates = [n for n in independent if n <= last]
    # Move only what the compute ops need: anything else would only occupy memory for longer.
    needed: set[Node] = set()
    for n in reversed(candidates):
        if n.target in COMPUTE_OPS or n.target in START_OPS or any(user in needed for user in n.users):
            needed.add(n)
    for n in candidates:
        if n in needed:
            wait.prepend(n)


def join_waits(graph: Graph) -> None:
    """Replace a start and its wait by one op where no computation stands between them. The last of all passes.

    The next collective takes the result as its token, so that it occupies memory until then: large ones are left alone.
    """
    for start in find_starts(graph):
        waits = find_waits(start)
        if start.target not in AT_ONCE or len(waits) != 1:
            continue
        (wait,) = waits
        value = wait.meta["val"]
        if value.numel() * value.element_size() > MAX_JOINED_BYTES:
            continue
        node = start.next
        while node is not wait and (node.target in VIEWS or node.op != "call_function"):
            node = node.next
        if node is not wait or any(u.target not in (*START_OPS, *AT_ONCE.values(), WAIT, DEPEND) for u in start.users):
            continue
        with graph.inserting_before(start):
            joined = graph.call_function(AT_ONCE[start.target], start.args[:-1])
        joined.meta = dict(wait.meta)
        wait.replace_all_uses_with(joined)
        graph.erase_node(wait)
        start.replace_all_uses_with(joined)
        graph.erase_node(start)


def fingerprint(graph: Graph, changes: Sequence[Changes]) -> int:
    """Return a hash of the sequence of collectives and of the changes that the passes made.

    Local computation is not part of it, since it may differ between ranks: a rank at the boundary of the domain pads, a
    rank with an empty shard computes little.
    """
    starts = [(str(s.target), _reduction_meta(s) if s.target is ALL_REDUCE else ()) for s in find_starts(graph)]
    return int.from_bytes(hashlib.blake2b(repr((starts, changes)).encode(), digest_size=7).digest(), "big")


def _reduction_meta(start: Node) -> tuple[int, str]:
    value = start.args[0].meta["val"]  # type: ignore[union-attr]
    return value.numel(), str(value.dtype)
