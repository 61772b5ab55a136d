"""A spectrum that is not there yet: the transform of a field along cut dims, until it is known what of it is wanted.

A block of it is a truncated transform. On one device that block would be a view of the spectrum, so the two keep an
eye on each other: what is written into a block is put into the spectrum when that is taken, and once it is taken a
write into either makes the block the view it should be. The field is copied if it is written while a spectrum waits, or
if its local tensor is handed out, through which it could be. Whenever ranks are about to send, they compare what for.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._compat import memory_of
from ..aliasing import HANDED_OUT, LENT
from ..comm.alike import Alike, alike
from ..comm.defer import promised
from ..errors import ShardingError
from ..layout import Layout
from ..plan import groups
from ..tensor import ShardTensor, wrap
from .shares import placed
from .spectra import Runs, as_slice, block_of, meets, pays, rolled, written
from .spectral import summed_here

# Where fields lay whose modes were taken, by the sizes of their spectra: a spectrum of these sizes that is put together
# from modes belongs to such a field. Were it another, its inverse would be as right, and lie differently.
HOMES: OrderedDict[tuple, Layout] = OrderedDict()
HOMES_BOUND = 64


class Asked:
    """The spectrum of a field along `dims`, rolled by `shifts`. `now` takes it of a field; `back`: an inverse one."""

    def __init__(self, source: ShardTensor, dims, norm, real: bool, back: bool, layout: Layout, now: Callable):
        local = source._local_tensor
        if local.is_inference() and local.untyped_storage() in HANDED_OUT:  # nobody counts its writes
            local = local.clone()
        self.source: ShardTensor | None = wrap(local, source._layout)
        self.dims, self.norm, self.real, self.back = tuple(dims), norm, real, back
        self.layout, self.now = layout, now
        self.shifts: dict[int, int] = {}
        self.blocks: list[Block] = []  # until it is taken
        self.shown: list[weakref.ref[Block]] = []  # after that
        self.local: Tensor | None = None  # the spectrum, once it is taken
        self.version = None if local.is_inference() else local._version
        self.grad = torch.is_grad_enabled()
        LENT.add(self)

    @property
    def requires_grad(self) -> bool:
        return self.grad and self.field.requires_grad

    @property
    def field(self) -> ShardTensor:
        assert self.source is not None
        return self.source

    def __repr__(self) -> str:
        kind = "inverse " if self.back else "half " if self.real else ""
        turned = f", rolled by {self.shifts}" if any(self.shifts.values()) else ""
        return f"the {kind}spectrum of {self.field._layout} along {self.dims}, norm {self.norm}{turned}"

    def rolled(self, by: Mapping[int, int]) -> Asked | None:
        """The same, rolled further; None where blocks of it were taken, which are views of this one."""
        if self.blocks:
            return None
        other = Asked(self.field, self.dims, self.norm, self.real, self.back, self.layout, self.now)
        other.shifts = {d: n for d in sorted({*self.shifts, *by}) if (n := self.shifts.get(d, 0) + by.get(d, 0))}
        other.grad, other.version = self.grad and torch.is_grad_enabled(), self.version
        return other

    def whole(self) -> ShardTensor:
        """The spectrum itself."""
        wrote = any(b.written for b in self.blocks)  # or may have: ranks can differ in that
        anyone = alike(self.layout.mesh, f"all of {self}", problem=self._problem(), flag=wrote).settle()
        with torch.set_grad_enabled(self.grad):
            made = rolled(self.now(self.field), self.shifts)._placed(self.layout)
        if anyone:
            for block in self.blocks:
                made[tuple(map(as_slice, block.runs))] = wrap(block.local, block.layout)
        self.local, self.source = made._local_tensor, None
        # from here on it lives as long as what shows its blocks (or itself); a circle would wait for garbage collection
        for block in self.blocks:
            block.taken = self
        self.shown, self.blocks = [weakref.ref(b) for b in self.blocks], []
        return made

    def part(self, index: Any) -> ShardTensor | None:
        """The modes at an index, whole on every rank or in shares; None where it is no block or the block is large."""
        words = f"{self}{written(index)}{'' if self._grad_here() else ', no grad'}"
        with alike(self.layout.mesh, words, problem=self._problem()) as check:
            return self._part(index, check)

    def _part(self, index: Any, check: Alike) -> ShardTensor | None:
        shape = self.layout.shape
        runs = block_of(shape, index)
        field = self.field
        if runs is None or set(self.shifts) - set(self.dims) or not pays(field._layout, self.dims, shape, runs):
            return None
        grad = self._grad_here()
        known = next((b for b in self.blocks if b.runs == runs and b.grad == grad), None)
        if known is None:
            if any(meets(b.runs, runs) for b in self.blocks):
                return None
            sign = -1 if self.back else 1
            modes = [tuple(sign * (i - self.shifts.get(d, 0)) % shape[d] for i in runs[d]) for d in self.dims]
            others = tuple(slice(None) if d in self.dims else as_slice(r) for d, r in enumerate(runs))
            with torch.set_grad_enabled(grad):
                found = summed_here(field, self.dims, modes, opposite(self.norm) if self.back else self.norm)
                check.settle()  # the comparison flew while this rank summed
                found = found._placed(self._goal(found, grad))[others]
                if found._local_tensor._is_view():  # its memory is to be that of the block alone
                    found = found.clone()
            known = Block(runs, found, grad)
            self.blocks.append(known)
            self._remember_home(field._layout)
        return known.shown()

    def _goal(self, modes: ShardTensor, grad: bool) -> Layout:
        """Where a block goes that is still to be summed. What it will be mixed with is not known here: a weight, most
        likely, whose gradient is owed at once unless parameters' gradients are averaged over these ranks later."""
        layout = modes._layout
        owed = grad and not promised(groups(layout, layout.partial_axes))
        return placed(layout, self.dims, modes.element_size(), owed=math.inf if owed else 0.0, grad=grad)

    def _grad_here(self) -> bool:
        return self.grad and torch.is_grad_enabled()

    def _remember_home(self, layout: Layout) -> None:
        if not self.back:
            home = (layout.mesh, self.dims, tuple(self.layout.shape[d] for d in self.dims), self.real)
            HOMES[home] = layout.with_partial(())
            HOMES.move_to_end(home)
            if len(HOMES) > HOMES_BOUND:
                HOMES.popitem(last=False)

    def _problem(self) -> str | None:
        """What was done here to the field since its transform was asked for, by a way that nobody watches."""
        if self.version is None or self.field._version == self.version:
            return None
        return (
            "the local tensor of the field was written into after its transform was asked for and before that was "
            "used; write into the field itself, or transform a clone() of it"
        )

    # ------------------------------------------------------------------ writes

    def keep(self, target: Tensor) -> None:
        """This memory is about to be written. What is done here sends nothing: ranks may differ in what still lives."""
        self.lend(target)
        at = place(target)
        if self.local is not None and (at == place(self.local) or any(at == place(b.local) for b in self._alive())):
            self._join()

    def lend(self, target: Tensor) -> None:
        """This memory may be written from now on without a word, on some ranks or on all."""
        if self.source is None:
            return
        at = place(target)
        if at == place(self.source._local_tensor) and self._problem() is None:
            with torch.set_grad_enabled(self.grad):
                self.source = wrap(self.source._local_tensor.clone(), self.source._layout)
            if self.version is not None:
                self.version = self.source._version
        for block in self.blocks:
            block.written |= at == place(block.local)

    def _alive(self) -> list[Block]:
        return [b for b in (r() for r in self.shown) if b is not None]

    def _join(self) -> None:
        """Make views of the blocks."""
        assert self.local is not None
        whole = wrap(self.local, self.layout)
        left, self.shown = self._alive(), []
        while left:
            block = left.pop()
            for tensor in [t for t in (r() for r in block.given) if t is not None]:
                view = whole[tuple(map(as_slice, block.runs))]
                tensor._local_tensor, tensor._layout = view._local_tensor, view._layout
                tensor._copied_view, tensor._narrowed = view._copied_view, view._narrowed
            # what is left of its references are views of views: each holds one (a count that is the same on all ranks)
            if sys.getrefcount(block) > 2:
                raise ShardingError(
                    "a spectrum is written of which a part was taken before, and of that part another, which on one "
                    "device would see the write. Take it from the spectrum by one index, or clone() it"
                )


class Block:
    """Modes of a spectrum that were handed out, and the tensors that show them. As `_copied_view` of those and of
    what is made of them it says whether writing there would be lost."""

    def __init__(self, runs: Runs, modes: ShardTensor, grad: bool):
        self.runs, self.grad = runs, grad
        self.taken: Asked | None = None  # the spectrum, once it is there
        self.local, self.layout = modes._local_tensor, modes._layout
        self.given: list[weakref.ref] = []
        self.written = False

    def shown(self) -> ShardTensor:
        made = wrap(self.local, self.layout)
        made._copied_view = self  # type: ignore[assignment]
        self.given.append(weakref.ref(made))
        return made

    def lost(self) -> bool:
        return self.taken is not None


def opposite(norm: str | None) -> str | None:
    """The norm with which a transform the other way scales as this one does."""
    return {None: "forward", "backward": "forward", "forward": "backward"}.get(norm, norm)


def place(tensor: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return memory_of(tensor)
