"""Passes over traced graphs that make messages cheap and change nothing but time. (Another, "halos", is in `program`.)

once: identical messages are sent once. buckets: small sums of gradients share a message. overlap: messages start as
early as their contents are known, and land behind work that does not need them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, Node

from .._compat.aot import mutates
from .collective_ops import OPS, START_OPS, WAIT

ALL_REDUCE = OPS.start_all_reduce.default
aten = torch.ops.aten

MAX_SMALL_BYTES = 1 << 20  # bytes of a sum that may share a message
BUCKET_BYTES = 4 << 20  # bytes of a message that sums share
MAX_MOVE = 400  # nodes that a landing may be put off by
MAX_OVERLAP_OPS = 2  # heavy calls behind which a message hides
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
    """The messages of a graph, in order."""
    return [n for n in graph.nodes if n.target in START_OPS]


def find_waits(start: Node) -> list[Node]:
    """Where what a message brings is asked for."""
    return [user for user in start.users if user.target is WAIT]


def remove_start(start: Node) -> None:
    """Take a message out of the order of messages, and out of the graph."""
    before = start.args[-2]
    for user in list(start.users):
        assert user.target in START_OPS, user
        user.update_arg(len(user.args) - 2, before)
    start.graph.erase_node(start)


def merge_calls(starts: Iterable[Node]) -> list[int]:
    """The calls for which messages are sent."""
    return list(dict.fromkeys(call for start in starts for call in start.args[-3]))  # type: ignore[union-attr]


Changes = list[tuple[int, ...]]  # what a pass has done: messages that are one now, by their places in the order


def once(graph: Graph, forward: int) -> tuple[int, Changes]:
    """Send identical messages once, within forward and within backward; returns how many are left in forward."""
    known: dict[tuple, tuple[int, Node]] = {}
    left = forward
    changes: Changes = []
    for i, start in enumerate(find_starts(graph)):
        key = (i < forward, start.target, *map(_hashable, start.args[:-3]))
        place, first = known.setdefault(key, (i, start))
        if first is start:
            continue
        mine, others = find_waits(start), find_waits(first)
        if mine and not others:
            continue  # nobody has asked for the first one yet
        for land in mine:
            other = others[0]
            if land < other:  # in the order of the graph
                land.prepend(other)
            land.replace_all_uses_with(other)
            graph.erase_node(land)
        first.update_arg(len(first.args) - 3, merge_calls([first, start]))
        remove_start(start)
        left -= i < forward
        changes.append((place, i))
    return left, changes


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value


def buckets(graph: Graph, forward: int) -> tuple[int, Changes]:
    """Let small sums of backward that do not wait for each other share messages; returns forward's messages."""
    opened: dict[tuple, list[Node]] = {}
    full: list[list[Node]] = []
    behind: dict[Node, set[Node]] = {}  # a start -> the starts that wait for what it brings

    def close(key: tuple) -> None:
        full.append(opened.pop(key))

    sent = find_starts(graph)
    for start in sent[forward:]:
        for key, members in list(opened.items()):
            if any(start in behind[m] for m in members):
                close(key)
        if start.target is not ALL_REDUCE or start.args[1] != "sum":
            continue
        value = start.args[0].meta["val"]
        size = value.numel() * value.element_size()
        if size > MAX_SMALL_BYTES or not find_waits(start):
            continue
        behind[start] = _dependent_starts(find_waits(start))
        # what others wait for does not itself wait for what nobody waits for, the gradient of a kernel, say
        key = (start.args[2], value.dtype, value.device, bool(behind[start]))
        if key in opened and sum(_nbytes(m) for m in opened[key]) + size > BUCKET_BYTES:
            close(key)
        opened.setdefault(key, []).append(start)
    together = [members for members in [*full, *opened.values()] if len(members) > 1]
    changes = [tuple(sent.index(m) for m in members) for members in together]
    for members in together:
        _merge_all_reduces(graph, members)
    return forward, changes


def _nbytes(start: Node) -> int:
    value = start.args[0].meta["val"]
    return value.numel() * value.element_size()


def _dependent_starts(nodes: Iterable[Node]) -> set[Node]:
    """The starts that need any of the nodes."""
    return {n for n in _transitive_users(nodes) if n.target in START_OPS}


def _transitive_users(nodes: Iterable[Node]) -> set[Node]:
    seen, ahead = set(nodes), list(nodes)
    while ahead:
        for user in ahead.pop().users:
            if user not in seen:
                seen.add(user)
                ahead.append(user)
    return seen


def _merge_all_reduces(graph: Graph, members: list[Node]) -> None:
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
        how = (*last.args[1:-3], merge_calls(members), *last.args[-2:])
        start = add(ALL_REDUCE, (joined, *how), last.meta["val"])
    first_land = min(land for m in members for land in find_waits(m))
    with graph.inserting_after(start):
        land = add(WAIT, (start, joined, [total]), values[0].new_empty(total))
    if first_land < last:  # its users must come behind: nothing that starts a message is among them
        _move_after(graph, [land for m in members for land in find_waits(m)], land)
    at, after = 0, land
    for member, value in zip(members, values, strict=True):
        with graph.inserting_after(after):
            part = add(aten.slice.Tensor, (land, 0, at, at + value.numel()), value.new_empty(value.numel()))
        with graph.inserting_after(part):
            shaped = after = add(aten.reshape.default, (part, list(value.shape)), value.new_empty(value.shape))
        for old in find_waits(member):
            old.replace_all_uses_with(shaped)
            graph.erase_node(old)
        at += value.numel()
    for user in list(last.users):
        user.update_arg(len(user.args) - 2, start)
    for member in members:
        remove_start(member)


def _move_after(graph: Graph, lands: list[Node], behind: Node) -> None:
    """Move landings and all that needs them behind a node, in their order."""
    moved = _transitive_users(lands)
    place = behind
    for node in [n for n in graph.nodes if n in moved and n < behind]:
        place.append(node)
        place = node


def overlap(graph: Graph) -> None:
    """Start messages as soon as what they carry is there, and land them behind work that does not need them."""
    for start in find_starts(graph):
        _hoist(graph, start)
    for land in [n for n in graph.nodes if n.target is WAIT]:
        _sink(graph, land)
    _rebalance_overlap(graph)


def _rebalance_overlap(graph: Graph) -> None:
    """Give messages that hide behind nothing a heavy call of those that hide behind several.

    A convolution's backward has two, of its input and its kernel, and a halo that travels meanwhile; only the first is
    waited for. So the second is put off until something else travels: the sums of the norm before it, say.
    """
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    pairs = [(land.args[0], land) for land in nodes if land.target is WAIT]
    behind = {land: [n for n in nodes[at[start] : at[land]] if n.target in COMPUTE_OPS] for start, land in pairs}
    for start, land in pairs:
        if behind[land]:
            continue
        for other in reversed([land for _, land in pairs if at[land] < at[start] and len(behind[land]) > 1]):
            moved = next(filter(None, (_deferrable_nodes(h, start, land, nodes, at) for h in behind[other])), None)
            if moved is None:
                continue
            for node in moved:
                land.prepend(node)
            behind[other].remove(moved[0])
            behind[land].append(moved[0])
            nodes = list(graph.nodes)
            at = {node: i for i, node in enumerate(nodes)}
            break


def _deferrable_nodes(
    heavy: Node, start: Node, land: Node, nodes: list[Node], at: dict[Node, int]
) -> list[Node] | None:
    """A heavy call and what needs it, if all of that can wait until `start` has left."""
    if at[land] - at[heavy] > MAX_MOVE:
        return None
    moved = {heavy}
    for node in nodes[at[heavy] + 1 : at[land]]:
        if mutates(node.target):
            return None
        if any(n in moved for n in node.all_input_nodes):
            if node.target in START_OPS or node.target is WAIT:
                return None
            moved.add(node)
    return None if any(n in moved for n in land.all_input_nodes) else sorted(moved, key=at.__getitem__)


def _hoist(graph: Graph, start: Node) -> None:
    """Move a start, and what is only made for it, up to the last node that it really waits for."""
    own, ahead = {start}, [start]
    while ahead:
        for needed in ahead.pop().all_input_nodes:
            if needed.op == "call_function" and needed.target not in COMPUTE_OPS and needed.target not in START_OPS:
                if needed.target is not WAIT and all(user in own for user in needed.users) and needed not in own:
                    own.add(needed)
                    ahead.append(needed)
    waits = {needed for n in own for needed in n.all_input_nodes if needed not in own}
    if not waits:
        return
    place = max(waits)
    if place.op == "placeholder":
        place = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in [n for n in graph.nodes if n in own]:
        if node < place:
            continue
        if place.next is not node:
            place.append(node)
        place = node


def _sink(graph: Graph, land: Node) -> None:
    """Put a landing and what needs it behind up to HEAVY_WANTED heavy calls that follow and do not need it."""
    needing, free, heavy, last = {land}, [], 0, None
    node, seen = land.next, 0
    while node.op != "output" and seen < MAX_MOVE and heavy < MAX_OVERLAP_OPS:
        if mutates(node.target):
            break
        if any(n in needing for n in node.all_input_nodes):
            needing.add(node)
        else:
            free.append(node)
            if node.target in COMPUTE_OPS:
                heavy, last = heavy + 1, node
        node, seen = node.next, seen + 1
    if last is None:
        return
    moved = [n for n in free if n <= last]
    # only those that the heavy calls need: what is merely early would live longer for nothing
    wanted: set[Node] = set()
    for n in reversed(moved):
        if n.target in COMPUTE_OPS or n.target in START_OPS or any(user in wanted for user in n.users):
            wanted.add(n)
    for n in moved:
        if n in wanted:
            land.prepend(n)


def fingerprint(graph: Graph, changes: Sequence[Changes]) -> int:
    """A number that is the same on ranks whose messages are of the same kinds and have been changed in the same way.

    What is computed between them may differ: a rank at the border of a field pads, one with an empty piece does little.
    """
    sent = [(str(s.target), _reduction_meta(s) if s.target is ALL_REDUCE else ()) for s in find_starts(graph)]
    return int.from_bytes(hashlib.blake2b(repr((sent, changes)).encode(), digest_size=7).digest(), "big")


def _reduction_meta(start: Node) -> tuple[int, str]:
    value = start.args[0].meta["val"]  # type: ignore[union-attr]
    return value.numel(), str(value.dtype)
