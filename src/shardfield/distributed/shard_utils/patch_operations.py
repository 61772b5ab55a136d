"""An older path of `shardfield.shard_utils.patch_operations`."""

from ...shard_utils import patch_operations as patch_operations
