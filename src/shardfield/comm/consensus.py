"""Compare what ranks are about to do, before a difference hangs them or mixes up their data.

A collective whose ranks pass different arguments blocks forever or moves the wrong elements. Three checks
prevent this. Each costs a small message and has the same outcome on all ranks:

- `Consensus.start(mesh, description)`: do all ranks make the same call? The message overlaps local work until `wait()`.
- `check_arguments(what, over, must_match)`: do all ranks pass equal arguments, and did none of them find a problem?
- `any_rank(flags, groups)`: has any rank set a flag?

When ranks differ, every rank raises the same error, which lists what each rank had. SHARDFIELD_CHECK_SIZES=0 switches
the first two off. Set it on all ranks or on none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import runtime, trace_state
from ..errors import ShardfieldError, ShardingError
from . import collectives

# Integers per message of `Consensus`: the fingerprint, its negative, and the flag (2: this rank has a problem).
CONSENSUS_INTS = 3
# Integers that a rank can add to `check_arguments`. One number for all callers: ranks that are in different calls must
# still exchange messages of one length, or the check itself would hang. It makes a length (37 integers) that no other
# gather is likely to have: a check that one rank alone makes is not taken for the next gather of the others.
MAX_EXTRA_INTS = 35


def checks_enabled() -> bool:
    """Return whether ranks compare their arguments."""
    return os.environ.get("SHARDFIELD_CHECK_SIZES", "1") != "0"


# ---------------------------------------------------------------------- do all ranks make the same call?


class Consensus:
    """A comparison of one description per rank, in flight until `wait()`.

    Call `wait()` before the first message that depends on the comparison. Leaving the object as a context waits too,
    also after an exception: an error of one rank becomes an error of all ranks.
    """

    def __init__(self, mesh: DeviceMesh | None, description: str, problem: str | None, flag: bool, always: bool):
        self._mesh, self._description, self._problem, self._flag = mesh, description, problem, flag
        checked = mesh is not None and (always or checks_enabled())
        self._groups = mesh_groups(runtime.mesh_state(mesh).mesh) if checked else ()
        self._done = False
        if self._groups:
            if problem:
                self._description = f"{description}: {problem}"
            with trace_state.concrete():
                claim = _claim(self._description, 2 if problem else int(flag), self._groups[0])
                self._pending = collectives.start_all_reduce(claim, self._groups[0], "max")

    @classmethod
    def start(
        cls,
        mesh: DeviceMesh | None,
        description: str,
        *,
        problem: str | None = None,
        flag: bool = False,
        always: bool = False,
    ) -> Consensus:
        """Start to compare `description`, the call that this rank is about to make, over all ranks of a mesh.

        problem: the reason why this rank cannot make the call; then all ranks raise. flag: `wait()` returns whether any
        rank set it. always: compare even if checks are switched off.

            with Consensus.start(mesh, f"rfft of {layout}, n={n}") as check:
                part = work(x)              # local work, while the message is in flight
                check.wait()                # the same call on all ranks, or an error on all ranks
                return all_reduce(part)     # messages that depend on it
        """
        return cls(mesh, description, problem, flag, always)

    def wait(self) -> bool:
        """Raise on all ranks unless all make the same call without a problem. Return whether any rank set its flag."""
        if self._done:
            return self._flag
        self._done = True
        if not self._groups:
            if self._problem:
                raise ShardingError(f"{self._description}: {self._problem}")
            return self._flag
        with trace_state.concrete():
            largest = self._pending.wait()
            for group in self._groups[1:]:
                largest = collectives.all_reduce(largest, group, "max")
            high, low, status = largest.tolist()
        if high != -low or status == 2:
            self._raise_difference("cannot do this" if status == 2 else "do not make the same call")
        self._flag = bool(status)
        return self._flag

    def _raise_difference(self, verdict: str) -> NoReturn:
        mesh = self._mesh
        assert mesh is not None
        texts = gather_texts(self._description, mesh)
        lines = [f"at {collectives.coords_of(mesh, i)}: {text}" for i, text in enumerate(texts)]
        raise ShardingError("\n  ".join([f"the ranks of {mesh} {verdict}", *lines]))

    def __enter__(self) -> Consensus:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        # A KeyboardInterrupt must not block on other ranks, which may never reach this point.
        if kind is None or issubclass(kind, Exception):
            self.wait()


# ---------------------------------------------------------------------- do all ranks pass equal arguments?


def check_arguments(
    what: str,
    over: ProcessGroup | DeviceMesh | None,
    must_match: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    problem: str | None = None,
    extra: Sequence[int] = (),
    always: bool = False,
) -> list[list[int]] | None:
    """Raise on all ranks unless all make the call `what` with equal `must_match` and none has a problem.

    over: a process group or a mesh. must_match: arguments that must be equal. facts: other arguments of this rank, for
    the error. problem: an error that this rank found by itself. extra: integers for the other ranks. always: compare
    even if checks are switched off.

    Costs one gather of a few integers per group. Returns the `extra` integers of every rank, by coordinate (row-major
    over a mesh), or None if the check is switched off.

    >>> check_arguments("all_gather_v", None, {"sizes": [3]}, problem="the tensor has 2 rows, sizes says 3")
    Traceback (most recent call last):
    shardfield.errors.ShardingError: all_gather_v: the tensor has 2 rows, sizes says 3 (sizes [3])
    """
    alone = all(dist.get_world_size(group) == 1 for group in _groups(over))
    unchecked = not (checks_enabled() or always)
    if problem and (alone or unchecked):
        raise ShardingError(f"{what}: {problem} ({_format_arguments(must_match, facts)})")
    if over is None or alone:
        return [list(extra)]
    if unchecked:
        return None
    assert len(extra) <= MAX_EXTRA_INTS
    claim = {key: str(value) for key, value in must_match.items()}
    code = _fingerprint(json.dumps([what, claim], sort_keys=True))
    rows = gather_ints([code, int(problem is not None), *extra, *[0] * (MAX_EXTRA_INTS - len(extra))], over)
    if len({row[0] for row in rows}) > 1 or any(row[1] for row in rows):
        line = f"{_format_arguments(must_match, facts)}{f': {problem}' if problem else ''}"
        _raise_mismatch(what, over, claim, line)
    return [row[2 : 2 + len(extra)] for row in rows]


def _format_arguments(claim: Mapping[str, Any], facts: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in {**claim, **(facts or {})}.items())


def _raise_mismatch(what: str, over: ProcessGroup | DeviceMesh, claim: Mapping[str, str], line: str) -> NoReturn:
    """Raise the same error on all ranks, with one line per rank."""
    reports = [json.loads(text) for text in gather_texts(json.dumps([what, claim, line]), over)]
    calls = dict.fromkeys(call for call, _, _ in reports)
    differing = [key for key in reports[0][1] if len({claim.get(key) for _, claim, _ in reports}) > 1]
    if len(calls) > 1:
        head = f"the ranks are in different calls: {', '.join(calls)}"
    elif differing:
        head = f"{what}: the ranks do not agree on {', '.join(differing)}"
    else:
        head = f"{what}: cannot be done"
    lines = [f"rank {rank}: {line}" for rank, (*_, line) in zip(_ranks(over), reports, strict=True)]
    raise ShardingError("\n  ".join([head, *lines]))


def raise_together(
    what: str, over: ProcessGroup | DeviceMesh, problem: str | None, cause: BaseException | None = None
) -> None:
    """Raise on all ranks of a group or mesh if any rank has a `problem`. Costs one gather of one integer per axis.

    The error lists each rank that has a problem. A problem that all ranks share is shown once.
    """
    texts = gather_texts(problem or "", over)
    lines = {rank: text for rank, text in zip(_ranks(over), texts, strict=True) if text}
    if not lines:
        return
    if len(lines) == len(texts) and len(set(texts)) == 1:
        raise ShardingError(f"{what}: {texts[0]}") from cause
    raise ShardingError(
        "\n  ".join([f"{what}: cannot be done", *(f"rank {r}: {t}" for r, t in lines.items())])
    ) from cause


def ask_first_rank(
    ask: Callable[[], Any], group: ProcessGroup | None, raises: type[ShardfieldError] = ShardfieldError
) -> Any:
    """Return on all ranks the JSON value of `ask()`, which the first rank of a group calls. Costs two broadcasts.

    An error in `ask` is raised on all ranks, as a `raises` with the same text.
    """
    answer, failed = None, None
    if group is None or dist.get_rank(group) == 0:
        try:
            answer = [None, ask()]
        except Exception as error:
            known = isinstance(error, (ShardfieldError, OSError))
            answer, failed = [str(error) if known else f"{type(error).__name__}: {error}", None], error
    if group is not None and dist.get_world_size(group) > 1:
        data, device = json.dumps(answer).encode() if answer else b"", group_device(group)
        length = int(collectives.broadcast(torch.tensor([len(data)], device=device), 0, group).item())
        text = torch.tensor(list(data) or [0] * length, dtype=torch.uint8, device=device)
        answer = json.loads(bytes(collectives.broadcast(text, 0, group).tolist()))
    assert answer is not None
    problem, value = answer
    if problem is not None:
        raise raises(problem) from failed
    return value


# ---------------------------------------------------------------------- has any rank set a flag?


def any_rank(flags: Sequence[bool], groups: Sequence[ProcessGroup]) -> list[bool]:
    """Return for each flag whether any rank has set it. Costs one byte per flag, one message per group."""
    if not groups:
        return list(flags)
    with trace_state.concrete():
        seen = torch.tensor(flags, device=group_device(groups[0]))
        for group in groups:
            seen = collectives.all_reduce(seen, group)
        return seen.tolist()


# ---------------------------------------------------------------------- the messages


def start_max(values: Sequence[int], group: ProcessGroup) -> collectives.Pending[Tensor]:
    """Start the elementwise maximum of every rank's integers."""
    return collectives.start_all_reduce(torch.tensor(values, device=group_device(group)), group, "max", owned=True)


@runtime.memo
def _claim(description: str, status: int, group: ProcessGroup) -> Tensor:
    """Return the integers of a rank's message of a `Consensus`. They are cached: the message needs a copy."""
    code = _fingerprint(description)
    return torch.tensor([code, -code, status], device=group_device(group))


def gather_ints(values: Sequence[int], over: ProcessGroup | DeviceMesh) -> list[list[int]]:
    """Gather every rank's integers (equally many on each), by coordinate, row-major over a mesh."""
    rows = [list(values)]
    for group in reversed(_groups(over)):
        parts = collectives.gather_ints([n for row in rows for n in row], group, group_device(group))
        rows = [part[i : i + len(values)] for part in parts for i in range(0, len(part), len(values))]
    return rows


def gather_texts(text: str, over: ProcessGroup | DeviceMesh) -> list[str]:
    """Gather every rank's text, by coordinate. Costs one gather of one integer if all texts are empty."""
    data = text.encode()
    lengths = [length for (length,) in gather_ints([len(data)], over)]
    longest = max(lengths)
    if not longest:
        return [""] * len(lengths)
    rows = gather_ints([*data, *[0] * (longest - len(data))], over)
    return [bytes(row[:length]).decode(errors="replace") for row, length in zip(rows, lengths, strict=True)]


@runtime.memo
def group_device(group: ProcessGroup) -> torch.device:
    """Return the device for the integers of a check: the CPU if the group has a backend for it.

    Reading integers from an accelerator would block until its queued kernels have finished.
    """
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _groups(over: ProcessGroup | DeviceMesh | None) -> list[ProcessGroup]:
    """Return the process groups of all mesh axes, the outermost first; of a group, itself."""
    if over is None:
        return []
    return [over.get_group(axis) for axis in range(over.ndim)] if isinstance(over, DeviceMesh) else [over]


@runtime.memo
def mesh_groups(mesh: DeviceMesh) -> tuple[ProcessGroup, ...]:
    """Return the process groups of all mesh axes with more than one rank; `mesh` is the first of its equals."""
    return tuple(g for g in _groups(mesh) if g.size() > 1)


def _ranks(over: ProcessGroup | DeviceMesh) -> list[int]:
    return over.mesh.flatten().tolist() if isinstance(over, DeviceMesh) else dist.get_process_group_ranks(over)


def _fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
