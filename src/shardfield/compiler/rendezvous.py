"""Before ranks trace a program together, each says in the world's store what it traces: no rank begins alone.

A rank whose arguments are of another kind than the others' (one tensor that requires gradients here only) would trace
while they run a program that they have, and its first message would meet theirs. The store is no message: those who do
not trace are not asked anything. So a rank that nobody joins gives up after `TIMEOUT`, says why in the store, and
breaks the connections that others may be waiting at; they look there when a message fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._compat.world import world_store
from ..comm import transport
from ..comm.consensus import group_device
from ..errors import ShardingError

TIMEOUT = timedelta(minutes=10)  # as long as NCCL waits for a message unless told otherwise
UNUSED_TAG = 7331  # of a message that nobody sends

_trace_counts: dict[str, int] = {}  # how often the ranks of a group have traced together


def sync_trace(
    name: str, signature: Sequence[str], last_signature: Sequence[str], groups: Sequence[ProcessGroup]
) -> str:
    """All ranks of the groups trace `name` now: raises if one does not come, tells if one traces something else.

    about: what it is traced for, in words that must be the same on all ranks. before: those of its last trace.
    """
    store = world_store()
    if store is None or not groups or transport.override is not None:
        return ""
    mine = "\n".join([name, *signature])
    me = dist.get_rank()
    for group in groups:
        store.set(f"{_trace_key(group)}/{me}", mine)
        if _trace_counts.get(_group_key(group)):
            store.delete_key(f"{_trace_key(group, -1)}/{me}")  # all have read it, for they have traced since
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        missing = [r for r in ranks if not _wait_for_key(store, f"{_trace_key(group)}/{r}")]
        if missing:
            _abort_trace(store, groups, _missing_ranks_error(name, missing, signature, last_signature))
    other = ""
    for group in groups:
        for rank in dist.get_process_group_ranks(group):
            told = store.get(f"{_trace_key(group)}/{rank}").decode()
            if told != mine and not other:
                other = _describe_mismatch(rank, told.split("\n"), mine.split("\n"))
    for group in groups:
        _trace_counts[_group_key(group)] = _trace_counts.get(_group_key(group), 0) + 1
    return other and f"compile: ranks trace different programs. {other}"


def failure_reason(groups: Sequence[ProcessGroup]) -> str:
    """Why a message of these groups may have failed: what a rank has said that traced alone; "" if none has."""
    with suppress(Exception):  # the store may be gone, and then there is nothing to add
        store = world_store()
        for group in groups:
            if store is not None and store.check([_failure_key(group)]):
                said = store.get(_failure_key(group)).decode()
                _break_connections(store, groups, said)  # who waits for this rank is no neighbour of that one, maybe
                return said
    return ""


def _wait_for_key(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], TIMEOUT)
    except RuntimeError:  # DistStoreError: out of time
        return False
    return True


def _abort_trace(store: dist.Store, groups: Sequence[ProcessGroup], said: str) -> None:
    for group in groups:
        store.delete_key(f"{_trace_key(group)}/{dist.get_rank()}")
    _break_connections(store, groups, f"rank {dist.get_rank()}: {said}")
    raise ShardingError(said)


def _break_connections(store: dist.Store, groups: Sequence[ProcessGroup], said: str) -> None:
    for group in groups:
        store.set(_failure_key(group), said)
    for group in groups:
        if (
            group_device(group).type == "cpu"
        ):  # gloo waits on the host, and lets go when a peer has closed the connection
            with suppress(RuntimeError):
                peer = (group.rank() + 1) % group.size()
                waiting = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=UNUSED_TAG)
                if waiting is not None:
                    waiting.wait(timedelta(milliseconds=1))


def _missing_ranks_error(name: str, missing: Sequence[int], about: Sequence[str], before: Sequence[str]) -> str:
    new = [line for line in about if line not in before] if before else []
    ranks = ", ".join(map(str, missing))
    return (
        f"compile: {name} is traced here, and in {TIMEOUT.total_seconds():g} s rank {ranks} did not come to trace it "
        f"too{': there a program held, or it was not called' if before else ''}. All ranks must make the same calls on "
        f"arguments of the same kinds{'. New here: ' + '; '.join(new) if new else ''}"
    )


def _describe_mismatch(rank: int, theirs: list[str], mine: list[str]) -> str:
    if theirs[0] != mine[0]:
        return f"Here it is {mine[0]}, on rank {rank} {theirs[0]}"
    pairs = [(a, b) for a, b in zip(mine[1:], theirs[1:], strict=False) if a != b]
    here, there = pairs[0] if pairs else (f"{len(mine) - 1} tensors", f"{len(theirs) - 1}")
    return f"Of {mine[0]}, here: {here}; on rank {rank}: {there}"


def _group_key(group: ProcessGroup) -> str:
    return f"{group.group_name}/{dist.get_process_group_ranks(group)[0]}"


def _trace_key(group: ProcessGroup, later: int = 0) -> str:
    return f"shardfield/trace/{_group_key(group)}/{_trace_counts.get(_group_key(group), 0) + later}"


def _failure_key(group: ProcessGroup) -> str:
    return f"shardfield/alone/{_group_key(group)}"
