"""Ranks find out that they disagree before it can hang or mix up their data.

A collective whose ranks pass different arguments waits forever or moves the wrong elements. `check_arguments` costs one
gather of a few integers when all is well; when it is not, every rank raises the same error, which lists what each
rank had. SHARDFIELD_CHECK_SIZES=0 leaves the check out, on all ranks or on none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import trace_state
from ..errors import ShardingError
from . import collectives

# How many integers of its own a rank can tell the others along with the check. One number for all callers: ranks
# that are in different calls must still exchange messages of one length.
MAX_EXTRA_INTS = 4


def checks_enabled() -> bool:
    """Whether ranks compare their arguments."""
    return os.environ.get("SHARDFIELD_CHECK_SIZES", "1") != "0"


def check_arguments(
    what: str,
    group: ProcessGroup | None,
    must_match: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    problem: str | None = None,
    extra: Sequence[int] = (),
    always: bool = False,
) -> list[list[int]] | None:
    """Raise on all ranks of `group` unless all make the same call `what` with an equal `must_match` and without a
    problem.

    `must_match` is what must be equal, `facts` is what else the error shows of a rank, `problem` is what this rank
    found
    wrong by itself. Returns every rank's `extra` integers, by coord; None if the check is switched off and they are
    not `always`.

    >>> check_arguments("all_gather_v", None, {"sizes": [3]}, problem="the tensor has 2 rows, sizes says 3")
    Traceback (most recent call last):
    shardfield.errors.ShardingError: all_gather_v: the tensor has 2 rows, sizes says 3 (sizes [3])
    """
    alone = group is None or dist.get_world_size(group) == 1
    unchecked = not (checks_enabled() or always)
    if problem and (alone or unchecked):
        raise ShardingError(f"{what}: {problem} ({_format_arguments(must_match, facts)})")
    if group is None or alone:
        return [list(extra)]
    if unchecked:
        return None
    assert len(extra) <= MAX_EXTRA_INTS
    device = group_device(group)
    header = [_fingerprint(what, must_match), int(problem is not None), *extra, *[0] * (MAX_EXTRA_INTS - len(extra))]
    heard = collectives.gather_ints(header, group, device)
    if len({h[0] for h in heard}) > 1 or any(h[1] for h in heard):
        _raise_mismatch(
            what,
            group,
            must_match,
            f"{_format_arguments(must_match, facts)}{f': {problem}' if problem else ''}",
            device,
        )
    return [h[2 : 2 + len(extra)] for h in heard]


def any_rank(flags: Sequence[bool], groups: Sequence[ProcessGroup]) -> list[bool]:
    """Which of the flags any rank has set: a byte each, one message a group."""
    if not groups:
        return list(flags)
    with trace_state.concrete():
        told = torch.tensor(flags, device=group_device(groups[0]))
        for group in groups:
            told = collectives.all_reduce(told, group)
        return told.tolist()


def _fingerprint(what: str, claim: Mapping[str, Any]) -> int:
    text = json.dumps([what, {k: str(v) for k, v in claim.items()}], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def group_device(group: ProcessGroup) -> torch.device:
    """Where the check's few integers live: the CPU if the group has a backend for it, whatever the tensors are on."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _format_arguments(claim: Mapping[str, Any], facts: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in {**claim, **(facts or {})}.items())


def _raise_mismatch(
    what: str, group: ProcessGroup, claim: Mapping[str, Any], line: str, device: torch.device
) -> NoReturn:
    """Tell every rank what every rank had, and raise the same error on all."""
    mine = json.dumps([what, {k: str(v) for k, v in claim.items()}, line]).encode()
    lengths = collectives.gather_ints([len(mine)], group, device)
    heard = collectives.all_gather(torch.tensor(list(mine), dtype=torch.uint8, device=device), lengths, group)
    said = [json.loads(bytes(t.tolist())) for t in heard]
    calls = dict.fromkeys(call for call, _, _ in said)
    keys = [k for k in said[0][1] if len({c.get(k) for _, c, _ in said}) > 1]
    if len(calls) > 1:
        head = f"the ranks are in different calls: {', '.join(calls)}"
    elif keys:
        head = f"{what}: the ranks do not agree on {', '.join(keys)}"
    else:
        head = f"{what}: cannot be done"
    ranks = dist.get_process_group_ranks(group)
    raise ShardingError("\n  ".join([head, *(f"rank {r}: {line}" for r, (*_, line) in zip(ranks, said, strict=True))]))
