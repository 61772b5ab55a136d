"""Datasets, array files and loaders that read only the local shard on each rank."""

from .darcy import Darcy as Darcy
from .field import Field as Field
from .field import open_field as open_field
from .loader import ShardedLoader as ShardedLoader
from .normalize import UnitGaussian as UnitGaussian
from .swe import ShallowWater as ShallowWater
from .windows import TimeWindows as TimeWindows
