"""An older path of ShardTensor, kept for scripts that use it."""

from ..scatter import scatter_tensor as scatter_tensor
from ..tensor import ShardTensor as ShardTensor
