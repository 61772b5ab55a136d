"""Train scientific models on fields that no single device can hold."""

from . import _moved
from . import ops as ops
from .compiler import compile as compile
from .debug.explain import explain as explain
from .debug.explain import strict as strict
from .debug.lockstep import lockstep as lockstep
from .debug.parity import check as check
from .dispatch.plan import Plan as Plan
from .dispatch.registry import composed as composed
from .dispatch.registry import rule as rule
from .distribute import scatter_tensor as scatter_tensor
from .distribute import sync_module_over_mesh as sync_module_over_mesh
from .errors import ShardfieldError as ShardfieldError
from .errors import ShardingError as ShardingError
from .neighbors import knn as knn
from .neighbors import partition_points as partition_points
from .neighbors import radius_search as radius_search
from .ops.matmul.opt_einsum import einsum as einsum
from .ops.matmul.opt_einsum import tensordot as tensordot
from .ops.matmul.opt_einsum import transpose as transpose
from .spec import ShardTensorSpec as ShardTensorSpec
from .tensor import ShardTensor as ShardTensor
from .train import parallelize as parallelize

_moved.install()
