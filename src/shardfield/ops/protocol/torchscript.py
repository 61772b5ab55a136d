"""Functions of TorchScript that are given ShardTensors: what they were written as in Python is called.

Their C++ interpreter would call torch's kernels below the rules. Without ShardTensors they run as ever.
"""

from __future__ import annotations

from typing import Any

from ..._compat import replace_script_call, scripted_source
from ...dispatch.registry import mesh_of, torch_function
from ...tensor import ShardTensor


def call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a scripted function returns. One whose Python is not there, as when it was loaded, gathers."""
    if mesh_of(args, kwargs) is None:
        return _run_script(function, *args, **kwargs)
    written = scripted_source(function)
    return torch_function(ShardTensor, function, (), args, kwargs) if written is None else written(*args, **kwargs)


_run_script = replace_script_call(call_script)
