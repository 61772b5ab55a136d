"""The process world: rank and device of this process, its groups and meshes, and collectives over them."""

from importlib import import_module
from typing import Any

from .autograd import all_gather_v as all_gather_v
from .autograd import gather_v as gather_v
from .autograd import indexed_all_to_all_v as indexed_all_to_all_v
from .autograd import scatter_v as scatter_v
from .coalesced import fused_all_reduce as fused_all_reduce
from .config import ProcessGroupConfig as ProcessGroupConfig
from .config import ProcessGroupNode as ProcessGroupNode
from .fft import DistributedIRFFT2 as DistributedIRFFT2
from .fft import DistributedRFFT2 as DistributedRFFT2
from .manager import DistributedManager as DistributedManager
from .manager import PhysicsNeMoUndefinedGroupError as PhysicsNeMoUndefinedGroupError
from .manager import (
    PhysicsNeMoUninitializedDistributedManagerWarning as PhysicsNeMoUninitializedDistributedManagerWarning,
)
from .shared_params import mark_module_as_shared as mark_module_as_shared
from .shared_params import unmark_module_as_shared as unmark_module_as_shared
from .utils import reduce_loss as reduce_loss


def __getattr__(name: str) -> Any:
    """Return ShardTensor and scatter_tensor, which PhysicsNeMo scripts import from here."""
    if name in ("ShardTensor", "scatter_tensor"):
        return getattr(import_module(__package__.split(".")[0]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
