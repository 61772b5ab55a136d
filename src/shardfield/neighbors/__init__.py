"""Neighbor search in sharded point clouds: k nearest neighbors, radius search, and a partition into compact shards."""

from .morton import partition_points as partition_points
from .search import knn as knn
from .search import radius_search as radius_search
