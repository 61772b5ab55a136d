"""Ranks trace a program together: all of them have it in the end, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from .._compat import without_modes
from ..comm import wire
from ..comm.agree import anyone, device_of
from ..errors import Untraceable

# Said in place of a graph's fingerprint, which is no negative number.
NO_PROGRAM, NO_VALUES = -1, -2


class Together:
    """What the ranks of some meshes tell each other while they trace: once when they have a graph, and once when they
    have a program, whatever way each of them goes."""

    def __init__(self, meshes: Sequence[DeviceMesh]):
        self._groups = [g for mesh in meshes for g in mesh.get_all_groups() if g.size() > 1]
        self._told = False  # whether the ranks know of each other that there will be no program
        self.values = False  # whether that is because a rank would have had to look at values

    def traced(self, fingerprint: int) -> bool:
        """This rank has its graph: whether all have the same one. Raises if a rank has none."""
        same = self._tell(fingerprint)
        self._raise_if_told()
        return same

    def done(self) -> None:
        """This rank has its program. Raises if another has none."""
        self._tell(0)
        self._raise_if_told()

    def failed(self, values: bool) -> None:
        """This rank has no program, perhaps for want of values: then no rank has one."""
        if not self._told:
            self._tell(NO_VALUES if values else NO_PROGRAM)

    def _raise_if_told(self) -> None:
        if self._told:
            raise Untraceable("compile: another rank could not trace it; its error says why")

    def _tell(self, number: int) -> bool:
        with without_modes():
            heard = [h for g in self._groups for (h,) in wire.gather_ints([number], g, device_of(g))] or [number]
            flags = [NO_PROGRAM in heard, NO_VALUES in heard, any(h != number for h in heard)]
            failed, self.values, differs = anyone(flags, self._groups)
        self._told = failed or self.values
        return not differs
