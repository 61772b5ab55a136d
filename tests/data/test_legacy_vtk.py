"""Legacy VTK files: every attribute that VTK writes, both versions of cells, and truncated files."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shardfield import ShardingError
from shardfield.data import legacy_vtk
from shardfield.data.mesh_readers import read_mesh

POINTS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [2.5, 0, 0]])
DTYPES = {
    "char": "i1", "unsigned_char": "u1", "short": "i2", "unsigned_short": "u2", "int": "i4", "unsigned_int": "u4",
    "long": "i8", "unsigned_long": "u8", "float": "f4", "double": "f8", "vtktypeint64": "i8",
}  # fmt: skip


SECTIONS = (
    rb"\n*(METADATA|INFORMATION|NAME|DATA 2|CELLS|CELL_DATA|LOOKUP_TABLE own 2|POINT_DATA|SCALARS|VECTORS|TEXTURE|COLOR"
    rb"|TENSORS|FIELD)|\n$"
)


class Writer:
    """The bytes of a legacy VTK file."""

    def __init__(self, text: bool, dataset: str, version: str = "4.2"):
        self.text = text
        self.data = f"# vtk DataFile Version {version}\n\n{'ASCII' if text else 'BINARY'}\nDATASET {dataset}\n".encode()

    def add(self, line: str, values=None, dtype: str = "f8") -> Writer:
        self.data += f"{line}\n".encode()
        if values is not None and self.text:
            flat = [str(v) for v in np.asarray(values, dtype).ravel()]
            self.data += "".join(f"{' '.join(flat[at : at + 9])} \n" for at in range(0, len(flat), 9)).encode()
        elif values is not None:
            self.data += np.asarray(values, dtype).astype(np.dtype(dtype).newbyteorder(">")).tobytes() + b"\n"
        return self


def grid(text: bool, version: str) -> Writer:
    """Return two tetrahedra and a triangle, with the fields that VTK writes at the end of each section."""
    file = Writer(text, "UNSTRUCTURED_GRID", version)
    file.add("FIELD FieldData 1").add("TIME 1 1 double", [0.25]).add("POINTS 5 double", POINTS)
    file.add("METADATA\nINFORMATION 1\nNAME L2_NORM_RANGE LOCATION vtkDataArray\nDATA 2 0 1\n")
    if version == "5.1":
        file.add("CELLS 4 11").add("OFFSETS vtktypeint64", [0, 4, 7, 11], "i8")
        file.add("CONNECTIVITY vtktypeint64", [0, 1, 2, 3, 0, 1, 2, 1, 2, 3, 4], "i8")
    else:
        file.add("CELLS 3 14", [4, 0, 1, 2, 3, 3, 0, 1, 2, 4, 1, 2, 3, 4], "i4")
    file.add("CELL_TYPES 3", [10, 5, 10], "i4")
    file.add("CELL_DATA 3").add("SCALARS number long 1\nLOOKUP_TABLE own", [7, 8, 9], "i8")
    file.add("LOOKUP_TABLE own 2", [0, 0, 0, 1, 1, 1, 1, 1], "f4" if text else "u1")
    file.add("POINT_DATA 5").add("NORMALS n float", POINTS, "f4").add("TEXTURE_COORDINATES uv 2 double", POINTS[:, :2])
    file.add("SCALARS pressure double", POINTS[:, 0]).add("VECTORS u%20v double", POINTS + 1)
    file.add("COLOR_SCALARS color 1", [0, 1, 0, 1, 0] if text else [0, 255, 0, 255, 0], "f4" if text else "u1")
    file.add("TENSORS stress double", np.arange(45.0)).add(f"FIELD FieldData {len(DTYPES)}")
    for name, dtype in DTYPES.items():
        file.add(f"{name} 2 5 {name}", np.arange(10), dtype)
    return file


@pytest.mark.parametrize("version", ["4.2", "5.1"])
@pytest.mark.parametrize("text", [True, False])
def test_unstructured_grid(text, version, tmp_path, monkeypatch):
    monkeypatch.setattr(legacy_vtk, "WORDS", 7)  # an array takes several rounds
    path = tmp_path / "grid.vtk"
    path.write_bytes(grid(text, version).data)
    found = read_mesh(path)
    assert found.points.tolist() == POINTS.tolist()
    assert found.cells["tetra"].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert found.cells["triangle"].tolist() == [[0, 1, 2]]
    assert {name: values.tolist() for name, values in found.cell_data.items()} == {
        "tetra/number": [7, 9],
        "triangle/number": [8],
    }
    data = found.point_data
    assert list(data) == ["n", "uv", "pressure", "u v", "color", "stress", *DTYPES], "the file's time is no data"
    assert data["pressure"].tolist() == POINTS[:, 0].tolist() and data["uv"].tolist() == POINTS[:, :2].tolist()
    assert data["u v"].tolist() == (POINTS + 1).tolist() and data["n"].tolist() == POINTS.tolist()
    assert data["color"].tolist() == [0, 255, 0, 255, 0] and data["stress"][1, 2, 0] == 15
    for name, dtype in DTYPES.items():
        assert data[name].dtype == dtype and data[name].tolist() == np.arange(10).reshape(5, 2).tolist()


@pytest.mark.parametrize("version", ["4.2", "5.1"])
@pytest.mark.parametrize("text", [True, False])
def test_truncated_anywhere(text, version, tmp_path):
    """Only a file that ends where a section ends, or inside the last line's end, cannot be told from a whole one."""
    path, whole = tmp_path / "grid.vtk", grid(text, version).data
    for end in range(len(text * version) % 3, len(whole), 3):
        path.write_bytes(whole[:end])
        try:
            read_mesh(path)
        except ShardingError:
            continue
        assert re.match(SECTIONS, whole[end:]), (end, whole[max(0, end - 40) : end])


def test_surfaces(tmp_path):
    """Triangles are read without VTK; the data of vertices, which come first, are left out."""
    path = tmp_path / "surface.vtk"
    file = Writer(False, "POLYDATA").add("POINTS 5 float", POINTS, "f4").add("VERTICES 1 2", [1, 4], "i4")
    file.add("POLYGONS 2 8", [3, 0, 1, 2, 3, 1, 2, 3], "i4").add("CELL_DATA 3").add("SCALARS k int\n", [5, 6, 7], "i4")
    path.write_bytes(file.data.replace(b"k int\n\n", b"k int\n"))
    found = read_mesh(path)
    assert found.cells["triangle"].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert found.cell_data["triangle/k"].tolist() == [6, 7]
    for end in range(file.data.index(b"POLYGONS") + 1, file.data.index(b"CELL_DATA") - 1):
        path.write_bytes(file.data[:end])
        with pytest.raises(ShardingError, match="truncated"):
            read_mesh(path)


BROKEN = {
    "offsets": ([0, 4, 2, 11], "offsets of 11 corners that do not fit"),
    "beyond": ([0, 4, 7, 12], "offsets of 11 corners that do not fit"),
    "widths": ([0, 4, 8, 11], "cells of type 'tetra' with different numbers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_cells_that_do_not_fit(name, tmp_path):
    offsets, said = BROKEN[name]
    file = Writer(True, "UNSTRUCTURED_GRID", "5.1").add("POINTS 5 double", POINTS).add("CELLS 4 11")
    file.add("OFFSETS vtktypeint64", offsets, "i8").add("CONNECTIVITY vtktypeint64", np.arange(11) % 5, "i8")
    path = tmp_path / "cells.vtk"
    path.write_bytes(file.add("CELL_TYPES 3", [10, 5, 10], "i4").data)
    with pytest.raises(ShardingError, match=said):
        read_mesh(path)


def test_other_files(tmp_path):
    path = tmp_path / "other.vtk"
    for data, said in {
        b"": "truncated, no legacy VTK file",
        Writer(True, "STRUCTURED_GRID", "5.1").data: "save STRUCTURED_GRID as UNSTRUCTURED_GRID",
        Writer(True, "POLYDATA").add("POINTS 5 float16", POINTS).data: "numbers of type 'float16'",
        Writer(True, "POLYDATA")
        .add("POINTS 5 double", POINTS)
        .add("POINT_DATA 4")
        .add("SCALARS s double", range(4))
        .data: "data of 5 points has as many rows",
    }.items():
        path.write_bytes(data)
        with pytest.raises(ShardingError, match=said):
            read_mesh(path)


def test_as_vtk_reads_them(tmp_path):
    """The same numbers as from VTK's reader, for files that VTK writes."""
    pyvista = pytest.importorskip("pyvista")
    surface = pyvista.Sphere(theta_resolution=6, phi_resolution=5)
    surface["long"], surface["flag"] = np.arange(surface.n_points), np.arange(surface.n_points) % 2 == 0
    surface.cell_data["k"] = np.arange(surface.n_cells, dtype=np.uint8)
    body = surface.cast_to_unstructured_grid()
    for mesh, binary in ((m, b) for m in (surface, body) for b in (True, False)):
        path = tmp_path / "written.vtk"
        mesh.save(path, binary=binary)
        found, points = read_mesh(path), np.asarray(pyvista.read(path).points)
        assert (
            found.points.tolist() == points.tolist()
            and found.cells["triangle"].tolist() == surface.regular_faces.tolist()
        )
        assert found.cell_data["triangle/k"].tolist() == list(range(surface.n_cells))
        for name in surface.point_data:
            np.testing.assert_allclose(found.point_data[name], surface.point_data[name], rtol=1e-5)


def test_vtu_files_that_meshio_does_not_read(tmp_path):
    pyvista = pytest.importorskip("pyvista")
    body = pyvista.Sphere(theta_resolution=6, phi_resolution=5).cast_to_unstructured_grid()
    body["flag"] = np.arange(body.n_points) % 2 == 0  # pyvista marks it by a text, which meshio does not read
    body.save(tmp_path / "flag.vtu")
    found = read_mesh(tmp_path / "flag.vtu")
    assert found.point_data["flag"].tolist() == body["flag"].tolist() and len(found.cells["triangle"]) == body.n_cells
    cloud = pyvista.UnstructuredGrid(np.empty(0, int), np.empty(0, np.uint8), POINTS)
    cloud.save(tmp_path / "cloud.vtu")
    assert read_mesh(tmp_path / "cloud.vtu").points.tolist() == POINTS.tolist()


def test_polygons_of_points_that_do_not_exist(tmp_path):
    """VTK's triangulation of these ends the process."""
    pytest.importorskip("pyvista")
    file = Writer(True, "POLYDATA").add("POINTS 5 float", POINTS, "f4").add("POLYGONS 1 5", [4, 0, 1, 2, 9999999], "i4")
    (tmp_path / "nowhere.vtk").write_bytes(file.data)
    with pytest.raises(ShardingError, match="polygons name points that do not exist"):
        read_mesh(tmp_path / "nowhere.vtk")
