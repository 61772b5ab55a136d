"""An older path of `shardfield.shard_utils.ring`."""

from ...shard_utils.ring import RingPassingConfig as RingPassingConfig
from ...shard_utils.ring import perform_ring_iteration as perform_ring_iteration
from ...shard_utils.ring import perform_ring_iteration_async as perform_ring_iteration_async
