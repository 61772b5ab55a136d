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

from .._compat.programs import has_side_effect
from .._compat.world import process_group
from ..comm import wire
from . import calls as calling
from .watch import is_zeros

LIBRARY = torch.library.Library("shardfield", "FRAGMENT")
OPS = torch.ops.shardfield

_flying: dict[int, wire.Pending[Tensor]] = {}
_tickets = itertools.count(1)


def _tell(numbers: list[int]) -> None:
    if calling.told is not None:
        calling.told(numbers)


def _start(pending: wire.Pending[Tensor], keep: bool) -> Tensor:
    number = next(_tickets)
    if keep:
        _flying[number] = pending
    else:  # nobody asks for what it brings: it must have left before the program ends
        pending.wait()
    return torch.tensor(number)


def _all_reduce(x: Tensor, op: str, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _tell(calls)
    return _start(wire.start_all_reduce(x, process_group(group), op), keep)


def _all_gather(x: Tensor, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _tell(calls)
    members = process_group(group)
    out = torch.stack(wire.all_gather(x, [x.shape] * members.size(), members))
    return _start(wire.Pending((), (), lambda: out), keep)


def _broadcast(x: Tensor, source: int, group: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    _tell(calls)
    out = wire.broadcast(x, source, process_group(group))
    return _start(wire.Pending((), (), lambda: out.clone() if out is x else out), keep)


def _exchange(
    x: Tensor, sends: list[int], receives: list[int], group: str, calls: list[int], after: Tensor | None, keep: bool
) -> Tensor:
    _tell(calls)
    members = process_group(group)
    landing = x.new_empty(sum(receives))
    pending = wire.start_exchange(x.split(sends), [(n,) for n in receives], members, into=landing.split(receives))

    def landed() -> Tensor:
        pending.wait()
        return landing

    return _start(wire.Pending((), (), landed), keep)


def _land(ticket: Tensor, sent: Tensor, shape: list[int]) -> Tensor:
    return _flying.pop(int(ticket)).wait().view(shape)


def _tie(x: Tensor, ticket: Tensor) -> Tensor:
    return x.clone()


def _raise_if(x: Tensor, error: str, why: str, calls: list[int], after: Tensor | None, keep: bool) -> Tensor:
    if x.item():
        raise getattr(builtins, error)(why)
    return torch.tensor(0)


def _key(serial: int) -> Tensor:
    return torch.randint(1 << 62, (1,))


def _define(schema: str, run: Callable, shape: Callable, *, effect: bool = False, tags: Sequence[Any] = ()) -> None:
    name = LIBRARY.define(schema, tags=(torch.Tag.flexible_layout, *tags))  # tensors may lie as the compiler likes
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfield::{name}", shape, lib=LIBRARY)
    if effect:
        has_side_effect(getattr(OPS, name).default)


def _ticket(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


# The last arguments of all that has a place in the order: the calls that it is for, what started before, and whether
# anybody will ask for what it brings.
ENDING = "int[] calls, Tensor? after, bool keep) -> Tensor"
_define(f"start_all_reduce(Tensor x, str op, str group, {ENDING}", _all_reduce, _ticket, effect=True)
_define(f"start_all_gather(Tensor x, str group, {ENDING}", _all_gather, _ticket, effect=True)
_define(f"start_broadcast(Tensor x, int source, str group, {ENDING}", _broadcast, _ticket, effect=True)
_define(f"start_exchange(Tensor x, int[] sends, int[] receives, str group, {ENDING}", _exchange, _ticket, effect=True)
_define(f"raise_if(Tensor x, str error, str why, {ENDING}", _raise_if, _ticket, effect=True)
_define(
    "land(Tensor ticket, Tensor sent, int[] shape) -> Tensor", _land, lambda ticket, sent, shape: sent.new_empty(shape)
)
_define("tie(Tensor x, Tensor ticket) -> Tensor", _tie, lambda x, ticket: x.new_empty(x.shape))
_define(
    "random_key(int serial) -> Tensor",  # the serial keeps compilers from taking two of them for one
    _key,
    lambda serial: torch.empty(1, dtype=torch.int64),
    tags=(torch.Tag.nondeterministic_seeded,),
)

# All that has a place in the order: a message that starts, or a look at what came, by which all ranks go on or none.
STARTS = (
    OPS.start_all_reduce.default,
    OPS.start_all_gather.default,
    OPS.start_broadcast.default,
    OPS.start_exchange.default,
    OPS.raise_if.default,
)
LAND, TIE = OPS.land.default, OPS.tie.default


class Writer:
    """Writes messages down, one after the other; `count` of them so far."""

    def __init__(self, calls: calling.Calls) -> None:
        self._calls = calls
        self.begin()

    def begin(self) -> None:
        """Another program begins."""
        self._last: Tensor | None = None
        self.count = 0
        self.forward = 0  # how many of them forward sent
        self._keys = 0
        self._calls.begin()

    def _written(self, start: Callable, x: Tensor, args: Sequence[Any], shape: Sequence[int]) -> Callable[[], Tensor]:
        ticket = self._last = start(x, *args, self._calls.current(), self._last, True)
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
        self._last = OPS.raise_if(flag, error.__name__, why, [], self._last, False)
        self.count += 1

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: str) -> Callable[[], Tensor]:
        return self._written(OPS.start_all_reduce, tensor, (op, group.group_name), tensor.shape)

    def all_gather(self, tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        return self._written(OPS.start_all_gather, tensor, (group.group_name,), (group.size(), *tensor.shape))

    def broadcast(self, tensor: Tensor, source: int, group: ProcessGroup) -> Callable[[], Tensor]:
        return self._written(OPS.start_broadcast, tensor, (source, group.group_name), tensor.shape)

    def exchange(
        self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]], coord: int, group: ProcessGroup
    ) -> Callable[[], list[Tensor]]:
        """All that is sent as one flat tensor, all that comes as another."""
        away = [t.reshape(-1) for peer, t in enumerate(sends) if peer != coord]
        flat = torch.cat(away) if len(away) > 1 else away[0]
        lengths = [0 if peer == coord else t.numel() for peer, t in enumerate(sends)]
        counts = [0 if peer == coord else math.prod(s) for peer, s in enumerate(shapes)]
        land = self._written(OPS.start_exchange, flat, (lengths, counts, group.group_name), (sum(counts),))

        def landed() -> list[Tensor]:
            parts = land().split(counts)
            whole = [
                part.view(tuple(shape)) if i != coord else part
                for i, (part, shape) in enumerate(zip(parts, shapes, strict=True))
            ]
            whole[coord] = sends[coord]
            return whole

        return landed
