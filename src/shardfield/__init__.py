"""Train scientific models on fields that no single device can hold."""

from . import ops as ops
from .compiled import compile as compile
from .dispatch import composed as composed
from .dispatch import rule as rule
from .errors import ShardfieldError as ShardfieldError
from .errors import ShardingError as ShardingError
from .lockstep import lockstep as lockstep
from .neighbours import knn as knn
from .neighbours import partition_points as partition_points
from .neighbours import radius_search as radius_search
from .ops.opt_einsum import einsum as einsum
from .ops.opt_einsum import tensordot as tensordot
from .ops.opt_einsum import transpose as transpose
from .parity import check as check
from .plan import Plan as Plan
from .report import explain as explain
from .report import strict as strict
from .scatter import scatter_tensor as scatter_tensor
from .scatter import sync_module_over_mesh as sync_module_over_mesh
from .spec import ShardTensorSpec as ShardTensorSpec
from .tensor import ShardTensor as ShardTensor
from .train import parallelize as parallelize
