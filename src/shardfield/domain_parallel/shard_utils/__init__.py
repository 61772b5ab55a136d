"""`shardfield.shard_utils` under PhysicsNeMo's path."""
