"""ShardTensor: a torch.Tensor that is sharded over the ranks of a device mesh.

A ShardTensor has a layout and either a local tensor or a `Deferred` value, which computes the local tensor when it is
first read. The wrapper takes no part in autograd: the local tensor carries the graph and all gradient state. Calls on
ShardTensors are dispatched to the handlers of `runtime.Registry`, which `dispatch/registry.py` fills.
"""

from ..dispatch.promotion import TensorPromotionMode as TensorPromotionMode
from .deferred import DEFERRED_ATTRIBUTES as DEFERRED_ATTRIBUTES
from .deferred import Deferred as Deferred
from .deferred import has_later_hooks as has_later_hooks
from .shard_tensor import ShardTensor as ShardTensor
from .shard_tensor import as_operand as as_operand
from .shard_tensor import is_single_sum as is_single_sum
from .shard_tensor import rebuild as rebuild
from .shard_tensor import to_full_tensor as to_full_tensor
from .shard_tensor import torch_function as torch_function
from .shard_tensor import wrap as wrap
from .shard_tensor import wrap_deferred as wrap_deferred
from .shard_tensor import wrap_sum as wrap_sum
