"""An older path of `shardfield.shard_utils`, kept for scripts that use it."""
