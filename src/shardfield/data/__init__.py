"""Data of which each rank reads, or makes, only what it owns."""

from .darcy import Darcy as Darcy
from .loader import ShardedLoader as ShardedLoader
