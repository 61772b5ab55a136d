"""What the forward of a block reads beside its arguments, so that a recomputation reads the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .process_state import Generators, equal, get_flags, get_generators, set_flags, set_generators


class BlockState:
    """The state before a call of a block: attributes and buffers of its modules, random numbers, flags of torch.

    Attributes are stored by reference: what is changed inside a list or another object of the caller is not seen.
    Buffers that the forward writes are stored as copies, and those that torch's batch_norm may write: it leaves their
    version. `numpy`: an earlier state of its generator, to compare with.
    """

    def __init__(self, block: nn.Module, numpy: Any = None):
        self._modules = _attributes(block)
        found = [(m, name, buffer) for m, _, buffers in self._modules for name, buffer in _present(buffers)]
        self._candidates = [(m._buffers, name, b, b._version, b.clone()) for m, name, b in found]
        self._buffers: list[
            tuple[dict[str, Tensor | None], str, Tensor]
        ] = []  # those that the forward may have written
        self._parameters = [(p, p._version) for p in block.parameters() if not p.is_inference()]
        self._flags, self._autocast, self._block = get_flags(), _autocast(), block
        self.generators: Generators | None = get_generators(numpy)  # None once the forward has drawn no number

    def forward_ends(self) -> None:
        """Drop the copies of buffers that the forward cannot have written, and the generators if it drew no number."""
        self._buffers = [
            (table, name, was)
            for table, name, buffer, version, was in self._candidates
            if buffer._version != version or _may_be_statistics(buffer)
        ]
        self._candidates = []
        if self.generators is not None and equal(get_generators(self.generators.numpy), self.generators):
            self.generators = None  # setting them takes longer than the rest

    @property
    def parameters_written(self) -> bool:
        """Whether a parameter has been written since the forward."""
        return any(parameter._version != version for parameter, version in self._parameters)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state for a recomputation, and the present one at its end."""
        now, flags = _attributes(self._block), get_flags()
        generators = None if self.generators is None else get_generators(self.generators.numpy)
        try:
            _set_attributes(self._modules)
            for table, name, was in self._buffers:
                table[name] = was.clone()
            if self.generators is not None:
                set_generators(self.generators)
            set_flags(self._flags)
            with contextlib.ExitStack() as stack:
                for then, current in zip(self._autocast, _autocast(), strict=True):
                    if then != current:
                        stack.enter_context(torch.autocast(**then))
                yield
        finally:
            if generators is not None:
                set_generators(generators)
            set_flags(flags)
            _set_attributes(now)


Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]  # of a module: its dict and its buffers


def _attributes(block: nn.Module) -> Attributes:
    return [(module, vars(module).copy(), module._buffers.copy()) for module in block.modules()]


def _set_attributes(modules: Attributes) -> None:
    for module, attributes, buffers in modules:
        _set_items(vars(module), attributes)
        _set_items(module._buffers, buffers)


def _set_items(table: dict[str, Any], items: dict[str, Any]) -> None:
    """Make a dict equal to another one. Values that are the same object are left alone."""
    for name in table.keys() - items.keys():
        del table[name]
    for name, value in items.items():
        if name not in table or table[name] is not value:
            table[name] = value


def _may_be_statistics(buffer: Tensor) -> bool:
    """Return whether a buffer has the shape of the running statistics of a batch norm: a number for each channel."""
    return buffer.ndim == 1 and buffer.is_floating_point()


def _present(buffers: dict[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for name, buffer in buffers.items() if buffer is not None)


def _autocast() -> list[dict[str, Any]]:
    """Return the arguments of autocast, for each kind of device."""
    cache = torch.is_autocast_cache_enabled()
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": cache,
        }
        for kind in ("cpu", "cuda")
    ]
