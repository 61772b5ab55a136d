"""Rendezvous before a trace: each rank writes the signature of its trace to the store and waits for its peers.

If the arguments of one rank differ from those of its peers (a tensor that requires gradients on this rank only), it
traces while the peers run a cached program. Without the rendezvous, the first collective of the trace would be matched
with a collective of that program. The rendezvous uses the TCP store instead of collectives, so that ranks that do not
trace need not take part. A rank that waits for its peers longer than `TIMEOUT` writes the reason to the store, closes
its gloo connections, and raises. A peer that is blocked in a collective then fails too, and finds the reason in the
store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat.world import world_store
from ..comm import transport
from ..comm.consensus import group_device
from ..errors import ShardingError

TIMEOUT = timedelta(minutes=10)  # NCCL's default timeout of a collective


def sync_trace(
    name: str, signature: Sequence[str], last_signature: Sequence[str], groups: Sequence[ProcessGroup]
) -> str:
    """Wait until all ranks of the groups are about to trace `name`. Return "" if they trace the same, or the mismatch.

    Raise if a rank does not arrive in time. `signature` describes the trace in lines that must be equal on all ranks;
    `last_signature` is that of the previous trace of this callable.
    """
    store = world_store()
    if store is None or not groups or runtime.active.transport_override is not None:
        return ""
    mine = "\n".join([name, *signature])
    me = dist.get_rank()
    counts = runtime.active.trace_counts
    for group in groups:
        if _group_key(group) not in counts:
            # The store may outlive the world: keys of its traces must not be taken for keys of this one.
            times = store.add(f"shardfield/epoch/{_group_key(group)}", 1)
            counts[_group_key(group)] = ((times - 1) // group.size(), 0)
    for group in groups:
        store.set(f"{_trace_key(group)}/{me}", mine)
        if counts[_group_key(group)][1]:
            store.delete_key(f"{_trace_key(group, -1)}/{me}")  # of the previous trace, which all ranks have read
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        missing = [r for r in ranks if not _wait_for_key(store, f"{_trace_key(group)}/{r}")]
        if missing:
            _abort_trace(store, groups, _missing_ranks_error(name, missing, signature, last_signature))
    mismatch = ""
    for group in groups:
        for rank in dist.get_process_group_ranks(group):
            theirs = store.get(f"{_trace_key(group)}/{rank}").decode()
            if theirs != mine and not mismatch:
                mismatch = _describe_mismatch(rank, theirs.split("\n"), mine.split("\n"))
    for group in groups:
        epoch, count = counts[_group_key(group)]
        counts[_group_key(group)] = (epoch, count + 1)
    return mismatch and f"compile: ranks trace different programs. {mismatch}"


def failure_reason(groups: Sequence[ProcessGroup]) -> str:
    """Return the reason that a rank gave for leaving these groups in `sync_trace`; "" if none did."""
    with suppress(Exception):  # the store may be closed; the original error is raised then
        store = world_store()
        for group in groups:
            if store is not None and store.check([_failure_key(group)]):
                reason = store.get(_failure_key(group)).decode()
                _break_connections(store, groups, reason)  # for peers that are blocked on this rank
                return reason
    return ""


def _wait_for_key(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], TIMEOUT)
    except RuntimeError:  # DistStoreError: timeout
        return False
    return True


def _abort_trace(store: dist.Store, groups: Sequence[ProcessGroup], reason: str) -> None:
    for group in groups:
        store.delete_key(f"{_trace_key(group)}/{dist.get_rank()}")
    _break_connections(store, groups, f"rank {dist.get_rank()}: {reason}")
    raise ShardingError(reason)


def _break_connections(store: dist.Store, groups: Sequence[ProcessGroup], reason: str) -> None:
    for group in groups:
        store.set(_failure_key(group), reason)
    for group in groups:
        if group_device(group).type == "cpu":
            transport.break_connection(group)


def _missing_ranks_error(
    name: str, missing: Sequence[int], signature: Sequence[str], last_signature: Sequence[str]
) -> str:
    new = [line for line in signature if line not in last_signature] if last_signature else []
    ranks = ", ".join(map(str, missing))
    cause = ": it used a cached program there, or it was not called" if last_signature else ""
    return (
        f"compile: {name} is traced on this rank, and rank {ranks} did not trace it within "
        f"{TIMEOUT.total_seconds():g} s{cause}. All ranks must make the same calls with arguments of the same layouts, "
        f"dtypes and flags{'. New on this rank: ' + '; '.join(new) if new else ''}"
    )


def _describe_mismatch(rank: int, theirs: list[str], mine: list[str]) -> str:
    if theirs[0] != mine[0]:
        return f"This rank traces {mine[0]}, rank {rank} traces {theirs[0]}"
    pairs = [(a, b) for a, b in zip(mine[1:], theirs[1:], strict=False) if a != b]
    here, there = pairs[0] if pairs else (f"{len(mine) - 1} lines", f"{len(theirs) - 1} lines")
    return f"{mine[0]} on this rank: {here}; on rank {rank}: {there}"


def _group_key(group: ProcessGroup) -> str:
    return f"{group.group_name}/{dist.get_process_group_ranks(group)[0]}"


def _trace_key(group: ProcessGroup, offset: int = 0) -> str:
    epoch, count = runtime.active.trace_counts[_group_key(group)]
    return f"shardfield/trace/{_group_key(group)}/{epoch}/{count + offset}"


def _failure_key(group: ProcessGroup) -> str:
    return f"shardfield/trace_failure/{_group_key(group)}"
