"""Train scientific models on fields that no single device can hold."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import _moved, _version
from . import ops as ops
from . import torch_compile as _torch_compile  # noqa: F401  (declares a patch)
from ._compat.patches import uninstall as uninstall
from .debug.explain import explain as explain
from .debug.explain import strict as strict
from .dispatch.plan import Plan as Plan
from .dispatch.registry import composed as composed
from .dispatch.registry import rule as rule
from .distribute import scatter_tensor as scatter_tensor
from .distribute import sync_module_over_mesh as sync_module_over_mesh
from .errors import ShardfieldError as ShardfieldError
from .errors import ShardingError as ShardingError
from .ops.stencil.decorators import local as local
from .ops.stencil.decorators import stencil as stencil
from .spec import ShardTensorSpec as ShardTensorSpec
from .tensor import ShardTensor as ShardTensor
from .tensor import TensorPromotionMode as TensorPromotionMode

__version__ = _version.__version__

if _TYPE_CHECKING:
    from .compiler import compile as compile
    from .debug.lockstep import lockstep as lockstep
    from .debug.parity import check as check
    from .neighbors import knn as knn
    from .neighbors import partition_points as partition_points
    from .neighbors import radius_search as radius_search
    from .ops.attention.neighborhood import neighborhood_attention as neighborhood_attention
    from .ops.matmul.opt_einsum import einsum as einsum
    from .ops.matmul.opt_einsum import tensordot as tensordot
    from .ops.matmul.opt_einsum import transpose as transpose
    from .train import parallelize as parallelize
    from .train import rollout as rollout

# Names that are imported when they are first read: the parts of torch that they need (FSDP, checkpoints, the tracer)
# take longer to import than everything else. The block above shows the same names to type checkers.
_LAZY = {
    "compile": "compiler",
    "lockstep": "debug.lockstep",
    "check": "debug.parity",
    "knn": "neighbors",
    "partition_points": "neighbors",
    "radius_search": "neighbors",
    "einsum": "ops.matmul.opt_einsum",
    "neighborhood_attention": "ops.attention.neighborhood",
    "tensordot": "ops.matmul.opt_einsum",
    "transpose": "ops.matmul.opt_einsum",
    "parallelize": "train",
    "rollout": "train",
}
_LAZY_MODULES = {
    "bench",
    "compiler",
    "data",
    "distributed",
    "domain_parallel",
    "metrics",
    "models",
    "neighbors",
    "planning",
    "predict",
    "shard_utils",
    "testing",
    "train",
    "virtual",
}


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        value = globals()[name] = getattr(_import_module(f"{__name__}.{_LAZY[name]}"), name)
        return value
    if name in _LAZY_MODULES or f"{__name__}.{name}" in _moved.MOVED:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


_moved.install()
