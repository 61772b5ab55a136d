"""Building blocks for custom sharded ops, under the names that existing scripts use."""

from .halo import HaloConfig as HaloConfig
from .halo import halo_padding as halo_padding
from .halo import unhalo_padding as unhalo_padding
from .halo_blocks import halo_blocks as halo_blocks
from .ring import RingPassingConfig as RingPassingConfig
from .ring import perform_ring_iteration as perform_ring_iteration
from .ring import perform_ring_iteration_async as perform_ring_iteration_async
