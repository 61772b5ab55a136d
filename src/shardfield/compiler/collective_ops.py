"""Collectives as custom ops of a traced graph: a start op issues the collective, a wait op returns its result.

A start op returns a token, an integer tensor that identifies the collective in flight. It also takes the token of the
preceding start op, without reading it. This data dependency fixes the order of the collectives, which must be the same
on all ranks, so that no compiler can reorder them. Any computation may stand between a start and its wait. If none
does, both become one op (`AT_ONCE`), which costs half as much on the host. When the program runs, the ops communicate
through `comm.collectives`, like eager code.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat.aot import has_side_effect
from .._compat.world import process_group
from ..comm import collectives
from . import attribution as calling
from .trace_facts import is_zeros

LIBRARY = torch.library.Library("shardfield", "FRAGMENT")
OPS = torch.ops.shardfield


def _notify(numbers: list[int]) -> None:
    if runtime.active.on_send is not None:
        runtime.active.on_send(numbers)


def _register(pending: collectives.Pending, keep: bool, received: Tensor | None = None) -> Tensor:
    """Return the token of a message. `received`: what its wait op returns, if it is not the value of `pending`."""
    token = next(runtime.active.tokens)
    if keep:
        runtime.active.in_flight[token] = pending, received
    else:  # the graph has no wait op for it, and it must complete before the program ends
        pending.wait()
    return torch.tensor(token)


class Route(NamedTuple):
    """Messages of one exchange: the peers that get or send at least one element, and their numbers of elements."""

    to: list[int]
    sends: list[int]
    receives: list[tuple[int, tuple[int]]]
    counts: list[int]
    total: int


def encode_route(to: Sequence[int], sends: Sequence[int], source: Sequence[int], receives: Sequence[int]) -> str:
    """Return an exchange as text: an argument that the dispatcher passes on faster than four lists."""
    return f"{_encode_pairs(to, sends)}>{_encode_pairs(source, receives)}"


def _encode_pairs(peers: Sequence[int], counts: Sequence[int]) -> str:
    return ",".join(f"{peer}:{n}" for peer, n in zip(peers, counts, strict=True) if n)


@functools.lru_cache(maxsize=4096)
def decode_route(text: str) -> Route:
    """Return the exchange that `encode_route` has encoded."""
    sent, received = (
        [(int(peer), int(n)) for peer, _, n in (pair.partition(":") for pair in side.split(",") if pair)]
        for side in text.split(">")
    )
    counts = [n for _, n in received]
    return Route([p for p, _ in sent], [n for _, n in sent], [(p, (n,)) for p, n in received], counts, sum(counts))


def _all_reduce(x: Tensor, op: str, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    return _register(collectives.start_all_reduce(x, process_group(group), op), keep)


def _all_reduce_at_once(x: Tensor, op: str, group: str, calls: list[int], after: Tensor | None) -> Tensor:
    _notify(calls)
    return collectives.start_all_reduce(x, process_group(group), op).wait()


def _all_gather(x: Tensor, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    out = collectives.all_gather_even(x, process_group(group))
    return _register(collectives.Pending((), (), lambda: out), keep)


def _broadcast(x: Tensor, source: int, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    out = collectives.broadcast(x, source, process_group(group))
    return _register(collectives.Pending((), (), lambda: out.clone() if out is x else out), keep)


def _exchange(x: Tensor, route: str, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    pending, received = _start_exchange(x, route, group)
    return _register(pending, keep, received)


def _exchange_at_once(x: Tensor, route: str, group: str, calls: list[int], after: Tensor | None) -> Tensor:
    _notify(calls)
    pending, received = _start_exchange(x, route, group)
    pending.wait()
    return received


def _start_exchange(x: Tensor, route: str, group: str) -> tuple[collectives.Pending, Tensor]:
    to, sends, receives, counts, total = decode_route(route)
    received = x.new_empty(total)
    x = collectives.contiguous(x)
    outgoing = torch.split_with_sizes(x, sends) if len(sends) > 1 else (x,) * len(sends)
    incoming = torch.split_with_sizes(received, counts) if len(counts) > 1 else (received,) * len(counts)
    pending = collectives.start_sends(
        list(zip(to, outgoing, strict=True)), receives, process_group(group), x, into=incoming, packed=True
    )
    return pending, received


def _wait(token: Tensor, sent: Tensor, shape: list[int]) -> Tensor:
    pending, received = runtime.active.in_flight.pop(int(token))
    value = pending.wait()
    if received is not None:
        return received
    return value if list(value.shape) == shape else value.view(shape)


def _depend(x: Tensor, token: Tensor) -> Tensor:
    return x.clone()


def _raise_if(x: Tensor, error: str, why: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    if x.item():
        raise getattr(builtins, error)(why)
    return torch.tensor(0)


def _random_key(serial: int, device: str) -> Tensor:
    return torch.randint(1 << 62, (1,), device=device)


def _define(schema: str, run: Callable, shape: Callable, *, effect: bool = False, tags: Sequence[Any] = ()) -> None:
    name = LIBRARY.define(schema, tags=(torch.Tag.flexible_layout, *tags))  # any strides: the compiler chooses
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfield::{name}", shape, lib=LIBRARY)
    if effect:
        has_side_effect(getattr(OPS, name).default)


def _fake_token(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


# The last arguments of every ordered op: the numbers of the calls that it belongs to, the token of the preceding
# ordered op, and whether a wait op will read its result.
ORDER_ARGS = "int[] calls, Tensor? after, bool keep) -> Tensor"
_define(f"start_all_reduce(Tensor x, str op, str group, {ORDER_ARGS}", _all_reduce, _fake_token, effect=True)
_define(f"start_all_gather(Tensor x, str group, {ORDER_ARGS}", _all_gather, _fake_token, effect=True)
_define(f"start_broadcast(Tensor x, int source, str group, {ORDER_ARGS}", _broadcast, _fake_token, effect=True)
_define(f"start_exchange(Tensor x, str route, str group, {ORDER_ARGS}", _exchange, _fake_token, effect=True)
_define(f"raise_if(Tensor x, str error, str why, {ORDER_ARGS}", _raise_if, _fake_token, effect=True)
_define(
    "wait(Tensor token, Tensor sent, int[] shape) -> Tensor", _wait, lambda token, sent, shape: sent.new_empty(shape)
)
_define("depend(Tensor x, Tensor token) -> Tensor", _depend, lambda x, token: x.new_empty(x.shape))
_define(
    # `serial` keeps two calls from being merged as common subexpressions.
    "random_key(int serial, str device) -> Tensor",
    _random_key,
    lambda serial, device: torch.empty(1, dtype=torch.int64, device=device),
    tags=(torch.Tag.nondeterministic_seeded,),
)

# A start and its wait as one op, whose result is also its token.
AT_ONCE_ARGS = "int[] calls, Tensor? after) -> Tensor"
_define(
    f"all_reduce(Tensor x, str op, str group, {AT_ONCE_ARGS}",
    _all_reduce_at_once,
    lambda x, op, group, calls, after: x.new_empty(x.shape),
    effect=True,
)
_define(
    f"exchange(Tensor x, str route, str group, {AT_ONCE_ARGS}",
    _exchange_at_once,
    lambda x, route, group, calls, after: x.new_empty(decode_route(route).total),
    effect=True,
)

# The ordered ops: starts of collectives, and `raise_if`, which raises on all ranks or on none.
START_OPS = (
    OPS.start_all_reduce.default,
    OPS.start_all_gather.default,
    OPS.start_broadcast.default,
    OPS.start_exchange.default,
    OPS.raise_if.default,
)
WAIT, DEPEND = OPS.wait.default, OPS.depend.default
AT_ONCE = {  # start op -> the op that also waits
    OPS.start_all_reduce.default: OPS.all_reduce.default,
    OPS.start_exchange.default: OPS.exchange.default,
}


class CollectiveTracer:
    """Emit collectives into the graph that is being traced; `count` is the number of ordered ops so far."""

    def __init__(self, calls: calling.TracedCalls) -> None:
        self._calls = calls
        self.reset()

    def reset(self) -> None:
        """Start a new trace."""
        self._last_token: Tensor | None = None
        self.count = 0
        self.forward_count = 0  # ordered ops of the forward
        self._keys = 0
        self.checks: list[str] = []  # reasons of the checks of values
        self._calls.reset()

    def _emit(self, start: Callable, x: Tensor, args: Sequence[Any], shape: Sequence[int]) -> Callable[[], Tensor]:
        token = self._last_token = start(x, *args, self._calls.current_ids(), self._last_token, True)
        self.count += 1
        result: list[Tensor] = []

        def wait() -> Tensor:
            if not result:
                result.append(OPS.wait(token, x, list(shape)))
            return result[0]

        return wait

    def is_zeros(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor of the trace is known to be all zeros."""
        return is_zeros(tensor)

    def random_key(self, device: torch.device) -> Tensor:
        """Return a random integer from the device's default generator, drawn again in every run of the program."""
        self._keys += 1
        return OPS.random_key(self._keys, str(device))

    def raise_if(self, flag: Tensor, error: type[Exception], why: str) -> None:
        """Make the program raise `error(why)` if `flag` is true. The flag must be equal on all ranks."""
        self.checks.append(why)
        self._last_token = OPS.raise_if(flag, error.__name__, why, [], self._last_token, False)
        self.count += 1

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: str) -> Callable[[], Tensor]:
        return self._emit(OPS.start_all_reduce, tensor, (op, group.group_name), tensor.shape)

    def all_gather(self, tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        return self._emit(OPS.start_all_gather, tensor, (group.group_name,), (group.size(), *tensor.shape))

    def broadcast(self, tensor: Tensor, source: int, group: ProcessGroup) -> Callable[[], Tensor]:
        return self._emit(OPS.start_broadcast, tensor, (source, group.group_name), tensor.shape)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Sequence[int]]],
        group: ProcessGroup,
        like: Tensor,
    ) -> Callable[[], list[Tensor]]:
        """Start messages to some peers: one flat tensor holds all that is sent, another all that is received."""
        outgoing = [t.reshape(-1) for _, t in sends]
        flat = torch.cat(outgoing) if len(outgoing) > 1 else outgoing[0] if outgoing else like.new_empty(0)
        to, source = [peer for peer, _ in sends], [peer for peer, _ in receives]
        counts = [math.prod(shape) for _, shape in receives]
        route = encode_route(to, [t.numel() for _, t in sends], source, counts)
        wait = self._emit(OPS.start_exchange, flat, (route, group.group_name), (sum(counts),))

        def finish() -> list[Tensor]:
            parts = wait().split(counts) if counts else []
            return [part.view(tuple(shape)) for part, (_, shape) in zip(parts, receives, strict=True)]

        return finish
