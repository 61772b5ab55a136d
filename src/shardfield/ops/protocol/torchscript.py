"""TorchScript functions on ShardTensors: their Python source is called.

The C++ interpreter would call torch's kernels below the rules. Calls without ShardTensors are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._compat import scripted_source
from ..._compat.patches import replace_script_call
from ...dispatch.registry import mesh_of, torch_function
from ...tensor import ShardTensor


def call_script(plain: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the Python source of a scripted function if a ShardTensor is among the arguments, else `plain`.

    A function without Python source, as one that was loaded from a file, falls back to a gather.
    """
    if mesh_of(args, kwargs) is None:
        return plain(*args, **kwargs)
    source = scripted_source(function)
    return torch_function(ShardTensor, function, (), args, kwargs) if source is None else source(*args, **kwargs)


replace_script_call(call_script)
