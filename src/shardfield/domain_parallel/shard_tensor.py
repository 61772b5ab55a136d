"""ShardTensor under PhysicsNeMo's path."""

from ..distribute import scatter_tensor as scatter_tensor
from ..spec import ShardTensorSpec as ShardTensorSpec
from ..tensor import ShardTensor as ShardTensor
from ..tensor import TensorPromotionMode as TensorPromotionMode
