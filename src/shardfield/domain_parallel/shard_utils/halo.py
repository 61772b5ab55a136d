"""`shardfield.shard_utils.halo` under PhysicsNeMo's path."""

from ...shard_utils.halo import HaloConfig as HaloConfig
from ...shard_utils.halo import halo_padding as halo_padding
from ...shard_utils.halo import unhalo_padding as unhalo_padding
