"""The attributes of torch that shardfield replaces: declared at import, installed with the first Layout.

Importing shardfield changes nothing in torch. `Layout.make` installs the patches, before any ShardTensor can exist, and
`uninstall` puts torch's own attributes back. docs/architecture.md lists the patches; a test compares that list with
`patches`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_INHERITED = object()


class Patch:
    """One attribute of torch and its replacement.

    path: dotted name, as "torch.autograd.Function.apply".
    make: called with the entry of the owner's `__dict__`; returns the replacement.
    reason: why no public hook will do.
    """

    def __init__(self, path: str, make: Callable[[Any], Any], reason: str):
        self.path, self.make, self.reason = path, make, reason
        *owner, self.name = path.split(".")[1:]
        self.owner: Any = functools.reduce(getattr, owner, torch)
        self.before: Any = None  # torch's entry in the owner's __dict__, while ours is installed
        self.after: Any = None  # ours, while installed

    def install(self) -> None:
        """Replace the attribute, unless it is replaced already."""
        if self.after is None:
            self.before = vars(self.owner).get(self.name, _INHERITED)
            self.after = self.make(getattr(self.owner, self.name) if self.before is _INHERITED else self.before)
            setattr(self.owner, self.name, self.after)

    def uninstall(self) -> None:
        """Put torch's attribute back. A replacement that other code has replaced again stays, with a warning."""
        if self.after is None:
            return
        if vars(self.owner).get(self.name) is not self.after:
            warnings.warn(
                f"shardfield.uninstall: {self.path} was replaced again by other code, so shardfield's replacement "
                "stays below it. It passes calls without ShardTensors on",
                stacklevel=4,
            )
            return
        if self.before is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)
        self.before = self.after = None


class Patches:
    """All declared patches; `installed` says whether they are in place."""

    def __init__(self) -> None:
        self.installed = False
        self._all: list[Patch] = []

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._all)

    def declare(self, path: str, make: Callable[[Any], Any], reason: str) -> None:
        """Add a patch. It is installed with the first Layout."""
        self._all.append(Patch(path, make, reason))
        self.installed = False

    def install(self) -> None:
        """Install the declared patches that are not in place."""
        for patch in self._all:
            patch.install()
        self.installed = True

    def uninstall(self) -> None:
        """Put torch's attributes back, newest first."""
        for patch in reversed(self._all):
            patch.uninstall()
        self.installed = False


patches = Patches()


def uninstall() -> None:
    """Put back every attribute of torch that shardfield replaced.

    The replacements are installed with the first ShardTensor; importing shardfield changes nothing in torch.
    ShardTensors made before this call must not be used after it. The next one that is made installs them again.
    [Architecture](architecture.md#what-is-patched-in-torch) lists them.
    """
    patches.uninstall()
