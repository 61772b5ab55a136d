"""Datasets, array files and loaders that read only the local shard on each rank."""

from .darcy import Darcy as Darcy
from .ellipsoids import Ellipsoid as Ellipsoid
from .ellipsoids import Ellipsoids as Ellipsoids
from .field import Field as Field
from .field import open_field as open_field
from .loader import ShardedLoader as ShardedLoader
from .mesh import Mesh as Mesh
from .mesh import open_mesh as open_mesh
from .mesh_dataset import MeshDataset as MeshDataset
from .normalize import UnitGaussian as UnitGaussian
from .surface import area_norm as area_norm
from .surface import force_coefficients as force_coefficients
from .swe import ShallowWater as ShallowWater
from .windows import TimeWindows as TimeWindows
