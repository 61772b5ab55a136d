"""Messages in a traced program: each is one call that starts it and one call that brings what it carried.

A start returns a ticket, a number in a tensor, and takes the ticket of the start before it, which it does not read: so
the order of the starts, which all ranks must share, is part of the program, and no compiler can change it. Between a
start and its landing there may be any work. When the program runs, the calls below send by `wire` as any others do.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._compat.aot import has_side_effect
from .._compat.world import process_group
from ..comm import collectives
from . import attribution as calling
from .trace_facts import is_zeros

LIBRARY = torch.library.Library("shardfield", "FRAGMENT")
OPS = torch.ops.shardfield

_in_flight: dict[int, collectives.Pending[Tensor]] = {}
_tokens = itertools.count(1)


def _notify(numbers: list[int]) -> None:
    if calling.on_send is not None:
        calling.on_send(numbers)


def _register(pending: collectives.Pending[Tensor], keep: bool) -> Tensor:
    number = next(_tokens)
    if keep:
        _in_flight[number] = pending
    else:  # nobody asks for what it brings: it must have left before the program ends
        pending.wait()
    return torch.tensor(number)


def _all_reduce(x: Tensor, op: str, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    return _register(collectives.start_all_reduce(x, process_group(group), op), keep)


def _all_gather(x: Tensor, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    members = process_group(group)
    out = torch.stack(collectives.all_gather(x, [x.shape] * members.size(), members))
    return _register(collectives.Pending((), (), lambda: out), keep)


def _broadcast(x: Tensor, source: int, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _notify(calls)
    out = collectives.broadcast(x, source, process_group(group))
    return _register(collectives.Pending((), (), lambda: out.clone() if out is x else out), keep)


def _exchange(
    x: Tensor, sends: list[int], receives: list[int], group: str, calls: list[int], after: Tensor | None, keep: bool
) -> Tensor:
    _notify(calls)
    members = process_group(group)
    landing = x.new_empty(sum(receives))
    pending = collectives.start_exchange(
        x.split(sends), [(n,) for n in receives], members, into=landing.split(receives)
    )

    def landed() -> Tensor:
        pending.wait()
        return landing

    return _register(collectives.Pending((), (), landed), keep)


def _wait(ticket: Tensor, sent: Tensor, shape: list[int]) -> Tensor:
    return _in_flight.pop(int(ticket)).wait().view(shape)


def _depend(x: Tensor, ticket: Tensor) -> Tensor:
    return x.clone()


def _raise_if(x: Tensor, error: str, why: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    if x.item():
        raise getattr(builtins, error)(why)
    return torch.tensor(0)


def _random_key(serial: int) -> Tensor:
    return torch.randint(1 << 62, (1,))


def _define(schema: str, run: Callable, shape: Callable, *, effect: bool = False, tags: Sequence[Any] = ()) -> None:
    name = LIBRARY.define(schema, tags=(torch.Tag.flexible_layout, *tags))  # tensors may lie as the compiler likes
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfield::{name}", shape, lib=LIBRARY)
    if effect:
        has_side_effect(getattr(OPS, name).default)


def _fake_token(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


# The last arguments of all that has a place in the order: the calls that it is for, what started before, and whether
# anybody will ask for what it brings.
ORDER_ARGS = "int[] calls, Tensor? after, bool keep) -> Tensor"
_define(f"start_all_reduce(Tensor x, str op, str group, {ORDER_ARGS}", _all_reduce, _fake_token, effect=True)
_define(f"start_all_gather(Tensor x, str group, {ORDER_ARGS}", _all_gather, _fake_token, effect=True)
_define(f"start_broadcast(Tensor x, int source, str group, {ORDER_ARGS}", _broadcast, _fake_token, effect=True)
_define(
    f"start_exchange(Tensor x, int[] sends, int[] receives, str group, {ORDER_ARGS}",
    _exchange,
    _fake_token,
    effect=True,
)
_define(f"raise_if(Tensor x, str error, str why, {ORDER_ARGS}", _raise_if, _fake_token, effect=True)
_define(
    "land(Tensor ticket, Tensor sent, int[] shape) -> Tensor", _wait, lambda ticket, sent, shape: sent.new_empty(shape)
)
_define("tie(Tensor x, Tensor ticket) -> Tensor", _depend, lambda x, ticket: x.new_empty(x.shape))
_define(
    "random_key(int serial) -> Tensor",  # the serial keeps compilers from taking two of them for one
    _random_key,
    lambda serial: torch.empty(1, dtype=torch.int64),
    tags=(torch.Tag.nondeterministic_seeded,),
)

# All that has a place in the order: a message that starts, or a look at what came, by which all ranks go on or none.
START_OPS = (
    OPS.start_all_reduce.default,
    OPS.start_all_gather.default,
    OPS.start_broadcast.default,
    OPS.start_exchange.default,
    OPS.raise_if.default,
)
WAIT, DEPEND = OPS.land.default, OPS.tie.default


class CollectiveTracer:
    """Writes messages down, one after the other; `count` of them so far."""

    def __init__(self, calls: calling.TracedCalls) -> None:
        self._calls = calls
        self.reset()

    def reset(self) -> None:
        """Another program begins."""
        self._last_token: Tensor | None = None
        self.count = 0
        self.forward = 0  # how many of them forward sent
        self._keys = 0
        self._calls.reset()

    def _emit(self, start: Callable, x: Tensor, args: Sequence[Any], shape: Sequence[int]) -> Callable[[], Tensor]:
        ticket = self._last_token = start(x, *args, self._calls.current_ids(), self._last_token, True)
        self.count += 1
        found: list[Tensor] = []

        def land() -> Tensor:
            if not found:
                found.append(OPS.land(ticket, x, list(shape)))
            return found[0]

        return land

    def is_zeros(self, tensor: Tensor) -> bool:
        """Whether a plain tensor of the program is zeros."""
        return is_zeros(tensor)

    def random_key(self) -> Tensor:
        """A number from torch's generator, drawn anew whenever the program runs."""
        self._keys += 1
        return OPS.random_key(self._keys)

    def raise_if(self, flag: Tensor, error: type[Exception], why: str) -> None:
        """Have the program look at a flag that is the same on all ranks, and raise on all."""
        self._last_token = OPS.raise_if(flag, error.__name__, why, [], self._last_token, False)
        self.count += 1

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: str) -> Callable[[], Tensor]:
        return self._emit(OPS.start_all_reduce, tensor, (op, group.group_name), tensor.shape)

    def all_gather(self, tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        return self._emit(OPS.start_all_gather, tensor, (group.group_name,), (group.size(), *tensor.shape))

    def broadcast(self, tensor: Tensor, source: int, group: ProcessGroup) -> Callable[[], Tensor]:
        return self._emit(OPS.start_broadcast, tensor, (source, group.group_name), tensor.shape)

    def exchange(
        self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]], coord: int, group: ProcessGroup
    ) -> Callable[[], list[Tensor]]:
        """All that is sent as one flat tensor, all that comes as another."""
        away = [t.reshape(-1) for peer, t in enumerate(sends) if peer != coord]
        flat = torch.cat(away) if len(away) > 1 else away[0]
        lengths = [0 if peer == coord else t.numel() for peer, t in enumerate(sends)]
        counts = [0 if peer == coord else math.prod(s) for peer, s in enumerate(shapes)]
        land = self._emit(OPS.start_exchange, flat, (lengths, counts, group.group_name), (sum(counts),))

        def landed() -> list[Tensor]:
            parts = land().split(counts)
            whole = [
                part.view(tuple(shape)) if i != coord else part
                for i, (part, shape) in enumerate(zip(parts, shapes, strict=True))
            ]
            whole[coord] = sends[coord]
            return whole

        return landed
