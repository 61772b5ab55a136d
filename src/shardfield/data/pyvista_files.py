"""Read meshes with VTK, through pyvista."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ShardingError
from .formats import import_package
from .legacy_vtk import VtkArrays


def read_grid(path: Path) -> VtkArrays:
    """Return an unstructured grid."""
    found = _read(path)
    return VtkArrays(
        "UNSTRUCTURED_GRID",
        np.asarray(found.points),
        {"CELLS": _cells(found.GetCells())},
        np.asarray(found.celltypes),
        _data(found),
    )


def read_surface(path: Path) -> VtkArrays:
    """Return a surface, of which polygons and strips become triangles."""
    found = _read(path)
    if found.n_lines:
        raise ShardingError(f"{path} has lines; of PolyData, points and polygons are supported")
    surface = _surface(found)
    for _, corners in surface.cells.values():  # VTK reads beyond its arrays for a polygon of points that do not exist
        if len(corners) and not 0 <= corners.min() <= corners.max() < len(surface.points):
            raise ShardingError(f"{path}: polygons name points that do not exist")
    return surface if surface.has_triangles_only() else _surface(found.triangulate())


def _surface(found: Any) -> VtkArrays:
    cells = {"VERTICES": found.GetVerts(), "POLYGONS": found.GetPolys(), "TRIANGLE_STRIPS": found.GetStrips()}
    cells = {name: _cells(array) for name, array in cells.items()}
    return VtkArrays("POLYDATA", np.asarray(found.points), cells, None, _data(found))


def _read(path: Path) -> Any:
    pyvista = import_package("pyvista", "pyvista")
    with pyvista.VtkErrorCatcher(raise_errors=True):  # VTK prints errors, and returns what it could read
        return pyvista.read(path)


def _cells(cells: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return where the corners of each cell begin, and the corners of all cells."""
    convert = import_package("pyvista", "pyvista").convert_array
    begins, corners = (
        np.empty(0) if array.GetNumberOfValues() == 0 else convert(array)
        for array in (cells.GetOffsetsArray(), cells.GetConnectivityArray())
    )
    return (begins if len(begins) else np.zeros(1)).astype(np.int64), corners.astype(np.int64)


def _data(found: Any) -> dict[str, dict[str, np.ndarray]]:
    data = {"POINT_DATA": found.point_data, "CELL_DATA": found.cell_data}
    return {section: {name: np.asarray(arrays[name]) for name in arrays} for section, arrays in data.items()}
