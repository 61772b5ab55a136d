"""Do all ranks of a mesh do the same? A small message asks, and flies while they already work on it.

Each rank puts what it is about to do into words. The largest and the smallest fingerprint of these words over all ranks
are equal if the words are; where they are not, the words themselves are sent round, and every rank raises one error
that shows them all. SHARDFIELD_CHECK_SIZES=0 leaves this out, on all ranks or on none.
"""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import trace_state
from ..errors import ShardingError
from . import collectives
from .consensus import checks_enabled, group_device

# What a rank sends for each mesh axis: the fingerprint, its negative, and what it has to say.
NUMBERS = 3


class ConsensusCheck:
    """A comparison in flight; `wait()` it before the first message that depends on it.

    As a context it is settled on leaving, by an error too: one that only this rank has becomes one that all have.
    """

    def __init__(self, mesh: DeviceMesh | None, words: str, problem: str | None, flag: bool, needed: bool):
        self._description, self._problem, self._flag = words, problem, flag
        self._mesh = mesh
        self._groups = [mesh.get_group(a) for a in range(mesh.ndim) if mesh.size(a) > 1] if mesh is not None else []
        self._done = False
        if not (checks_enabled() or needed):
            self._groups = []
        if self._groups:
            if problem:
                self._description = f"{words}: {problem}"
            code = int.from_bytes(hashlib.blake2b(self._description.encode(), digest_size=7).digest(), "big")
            with trace_state.concrete():
                said = torch.tensor([code, -code, 2 if problem else int(flag)], device=group_device(self._groups[0]))
                self._pending = collectives.start_all_reduce(said, self._groups[0], "max")

    def wait(self) -> bool:
        """Raise on all ranks unless all do the same, and no one has a problem. Whether anyone's flag is set."""
        if self._done:
            return self._flag
        self._done = True
        if not self._groups:
            if self._problem:
                raise ShardingError(f"{self._description}: {self._problem}")
            return self._flag
        with trace_state.concrete():
            told = self._pending.wait()
            for group in self._groups[1:]:
                told = collectives.all_reduce(told, group, "max")
            high, low, said = told.tolist()
        if high != -low or said == 2:
            assert self._mesh is not None
            _raise_difference(
                self._description, self._mesh, "cannot do this" if said == 2 else "do not make the same call"
            )
        self._flag = bool(said)
        return self._flag

    def __enter__(self) -> ConsensusCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None or issubclass(kind, Exception):  # one who interrupts waits for nobody
            self.wait()


def start_consensus(
    mesh: DeviceMesh | None, description: str, *, problem: str | None = None, flag: bool = False, always: bool = False
) -> ConsensusCheck:
    """Start to compare `description`, which say what this rank is about to do, over all ranks of a mesh.

    problem: why this rank cannot do it; then none does. flag: something to tell all others, if it is so. needed: also
    where checks are switched off.

        with alike(mesh, f"rfft of {layout}, n={n}") as check:
            part = work(x)       # of this rank
            check.settle()       # the same on all, or an error on all
            return summed(part)  # messages
    """
    return ConsensusCheck(mesh, description, problem, flag, always)


def _raise_difference(words: str, mesh: DeviceMesh, what: str) -> NoReturn:
    text = words.encode()
    lengths = [row[0] for row in all_gather_ints([len(text)], mesh)]
    said = all_gather_ints([*text, *[0] * (max(lengths) - len(text))], mesh)
    lines = [
        f"at {collectives.coords_of(mesh, i)}: {bytes(row[:length]).decode()}"
        for i, (row, length) in enumerate(zip(said, lengths, strict=True))
    ]
    raise ShardingError("\n  ".join([f"the ranks of {mesh} {what}", *lines]))


def all_gather_ints(numbers: list[int], mesh: DeviceMesh) -> list[list[int]]:
    """The numbers of every rank on the mesh, row-major; equally many on all."""
    rows = [numbers]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        heard = collectives.gather_ints([n for row in rows for n in row], group, group_device(group))
        rows = [part[i : i + len(numbers)] for part in heard for i in range(0, len(part), len(numbers))]
    return rows
