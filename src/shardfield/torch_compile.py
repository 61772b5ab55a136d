"""`torch.compile(model, fullgraph=True)` on ShardTensors: its calls run as programs of `shardfield.compile`.

Dynamo breaks its graph at every call on a ShardTensor, so that with `fullgraph=True` it raises. Calls without
ShardTensors, and `torch.compile` with options that `shardfield.compile` does not have, are left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._compat import call_of_module, module_of_call
from ._compat.patches import replace_torch_compile
from .tensor import ShardTensor

# Backends of torch.compile by name, and what compiles the same graphs here. "eager" runs them as they are.
_BACKENDS = {"inductor": "inductor", "aot_eager": "aot_eager", "eager": "aot_eager"}


def route(compiled: Any, model: Any, options: dict[str, Any]) -> Any:
    """Return `compiled`, the result of `torch.compile(model, **options)`, with its calls on ShardTensors rerouted."""
    backend = options.get("backend", "inductor")
    if isinstance(backend, str):
        backend = _BACKENDS.get(backend)
    tuned = options.get("mode") not in (None, "default") or options.get("options") or options.get("dynamic")
    if not options.get("fullgraph") or tuned or backend is None or compiled is model:  # compiled is model: disable=True
        return compiled

    sharded = _Sharded(model, backend)
    if isinstance(model, nn.Module):
        compiled.forward = _choose(compiled.forward, sharded)
        return compiled
    return _choose(compiled, sharded)


class _Sharded:
    """`shardfield.compile(model)`, made with the first call: the compiler takes long to import."""

    def __init__(self, model: Callable, backend: str | Callable):
        self._model, self._backend = model, backend
        self._compiled: Callable | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled(*args, **kwargs)

    def _compile(self) -> Callable:
        from .compiler import compile

        module = module_of_call(self._model)  # of `module.compile(fullgraph=True)`
        if module is not None:
            return call_of_module(compile(module, backend=self._backend, fullgraph=True))
        return compile(self._model, backend=self._backend, fullgraph=True)


def _choose(plain: Callable, sharded: Callable) -> Callable:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Inside another compiled function Dynamo traces this one, too.
        if not torch.compiler.is_compiling() and (_has_shards(args) or _has_shards(kwargs)):
            return sharded(*args, **kwargs)
        return plain(*args, **kwargs)

    return call


def _has_shards(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_shards, value))
    if isinstance(value, dict):
        return any(map(_has_shards, value.values()))
    return isinstance(value, ShardTensor)


replace_torch_compile(route)
