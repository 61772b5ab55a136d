"""The names of PhysicsNeMo's package of this name: those of `shardfield` and `shardfield.shard_utils`."""

from ..distribute import distribute_module as distribute_module
from ..distribute import scatter_tensor as scatter_tensor
from ..distribute import sync_module_over_mesh as sync_module_over_mesh
from ..spec import ShardTensorSpec as ShardTensorSpec
from ..tensor import ShardTensor as ShardTensor
from ..tensor import TensorPromotionMode as TensorPromotionMode
