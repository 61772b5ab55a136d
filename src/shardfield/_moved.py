"""Former module paths, kept for one release: importing one warns and returns the module at its new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "shardfield.aliasing": "shardfield.dispatch.write_tracking",
    "shardfield.compiled": "shardfield.compiler",
    "shardfield.data.normalise": "shardfield.data.normalize",
    "shardfield.data.stored": "shardfield.data.formats",
    "shardfield.distributed.fused": "shardfield.distributed.coalesced",
    "shardfield.distributed.shared": "shardfield.distributed.shared_params",
    "shardfield.execute": "shardfield.dispatch.executor",
    "shardfield.fused": "shardfield.triton_kernels",
    "shardfield.gather": "shardfield.dispatch.fallback",
    "shardfield.lockstep": "shardfield.debug.lockstep",
    "shardfield.names": "shardfield.dispatch.torch_aliases",
    "shardfield.neighbours": "shardfield.neighbors",
    "shardfield.neighbours.across": "shardfield.neighbors.distributed_search",
    "shardfield.neighbours.morton": "shardfield.neighbors.morton",
    "shardfield.neighbours.search": "shardfield.neighbors.search",
    "shardfield.operands": "shardfield.dispatch.arguments",
    "shardfield.parity": "shardfield.debug.parity",
    "shardfield.plan": "shardfield.dispatch.plan",
    "shardfield.planning.step": "shardfield.planning.simulate",
    "shardfield.planning.world": "shardfield.planning.fake_world",
    "shardfield.report": "shardfield.debug.explain",
    "shardfield.scatter": "shardfield.distribute",
    "shardfield.train.picture": "shardfield.train.plots",
}


class CallableModule(ModuleType):
    """A module that calls its function of the same name.

    Importing the former path `shardfield.lockstep` sets that attribute of the package to the module. The module
    then replaces the public function of that name, so it must be callable too.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class MovedFinder(MetaPathFinder, Loader):
    """Resolve a former module path to the module itself, so that both paths name one object."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}; the next release removes the old path", DeprecationWarning, 2)
        module = importlib.import_module(new)
        if callable(getattr(module, spec.name.rpartition(".")[2], None)):
            module.__class__ = CallableModule
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # undo: the import system has set the old path's spec


def install() -> None:
    """Install the finder, so that former paths can be imported."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
