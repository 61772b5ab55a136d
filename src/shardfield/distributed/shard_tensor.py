"""An older path of ShardTensor, kept for scripts that use it."""

from ..distribute import scatter_tensor as scatter_tensor
from ..tensor import ShardTensor as ShardTensor
