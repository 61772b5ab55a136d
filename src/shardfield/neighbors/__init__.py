"""Points in space: nearest neighbours, neighbours within a radius, and an order that keeps neighbours together."""

from .morton import partition_points as partition_points
from .search import knn as knn
from .search import radius_search as radius_search
