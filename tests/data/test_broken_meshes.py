"""Broken meshes: one error on all ranks, which names the file and what is wrong with it."""

from __future__ import annotations

import importlib
import os

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardfield import ShardingError
from shardfield.data import open_mesh
from shardfield.testing import run_on_ranks
from tests.data.test_mesh import FACES, OCTAHEDRON, meshio

BROKEN = {
    "not finite": (
        np.array([[0, 0, 0], [0, np.nan, 0], [1, 0, np.inf]]),
        [("vertex", np.arange(3)[:, None])],
        "2 of 3 points are not finite",
    ),
    "nowhere": (OCTAHEDRON, [("triangle", np.array([[0, 1, 2], [0, 1, 6]]))], "1 of 2 triangle cells name points"),
    "unknown cells": (OCTAHEDRON, [("triangle6", np.array([[0, 1, 2, 3, 4, 5]]))], "cells of type 'triangle6'"),
}


def refused_on_every_rank(paths):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("points",))
    messages = []
    for path in paths:
        with pytest.raises(ShardingError) as caught:
            open_mesh(path, mesh)
        messages.append(str(caught.value))
    return messages


def test_broken_meshes_are_one_error_on_all_ranks(tmp_path):
    paths = []
    for at, (points, cells, _) in enumerate(BROKEN.values()):
        paths.append(tmp_path / f"{at}.vtk")
        meshio.Mesh(points, cells).write(paths[-1])
    paths.append(tmp_path / "empty.h5")
    with importlib.import_module("h5py").File(paths[-1], "w") as file:
        file["points"] = np.empty((0, 3))
    paths += [tmp_path / "missing.stl", tmp_path / "cut.vtu", tmp_path / "other.xyz"]
    paths[-2].write_text("<VTKFile")
    paths[-1].write_text("0 0 0")
    paths += [tmp_path / "corners.h5", tmp_path / "gap.zarr", tmp_path / "text.h5"]
    for path, name, values in ((paths[-3], "cells/triangle", FACES[:2, [0, 1, 2, 0]]), (paths[-1], "name", [b"a"] * 6)):
        with importlib.import_module("h5py").File(path, "w") as file:
            file["points"], file[name] = OCTAHEDRON, values
    group = importlib.import_module("zarr").open_group(str(paths[-2]), mode="w")
    group.create_array("points", shape=(6, 3), chunks=(2, 3), dtype="f8")[:2] = OCTAHEDRON[:2]
    for points in (0, 2):  # meshio writes arrays of nothing as text, and fails on them
        paths.append(tmp_path / f"empty{points}.vtu")
        meshio.Mesh(np.zeros((points, 3)), []).write(paths[-1], binary=False)
    for binary in (True, False):  # meshio returns what it could read
        paths.append(tmp_path / f"cut{binary}.vtk")
        meshio.Mesh(OCTAHEDRON, [("triangle", FACES)]).write(paths[-1], file_format="vtk42", binary=binary)
        whole = paths[-1].read_bytes()
        paths[-1].write_bytes(whole[: whole.index(b"CELL_TYPES") + 25] if binary else whole[:-1])
    paths += [tmp_path / "lz4.vtu", tmp_path / "lengths.zarr"]
    paths[-2].write_text('<VTKFile compressor="vtkLZ4DataCompressor"><UnstructuredGrid><Piece NumberOfPoints="6"/>')
    group = importlib.import_module("zarr").open_group(str(paths[-1]), mode="w")
    group["points"], group["pressure"] = OCTAHEDRON, np.arange(5.0)
    # meshio searches for the rest of the first three forever, and returns the points of the fourth
    headers = {
        "ply": "ply\nformat ascii 1.0\n",
        "off": "OFF\n# numbers\n",
        "msh": "$MeshFormat\n2.2 0 8\n$EndMeshFormat\n",
    }
    for suffix, header in headers.items():
        paths.append(tmp_path / f"header.{suffix}")
        paths[-1].write_text(header)
    paths.append(tmp_path / "grid.msh")
    meshio.Mesh(OCTAHEDRON, [("triangle", FACES)]).write(paths[-1], file_format="gmsh22", binary=False)
    whole = paths[-1].read_bytes()
    paths[-1].write_bytes(whole[: whole.index(b"$Elements")])
    paths.append(tmp_path / "voxels.vtu")  # meshio leaves these cells out
    meshio.Mesh(OCTAHEDRON, [("triangle", FACES)]).write(paths[-1], binary=False)
    text = paths[-1].read_text()
    types = text[(begin := text.index(">", text.index('Name="types"'))) : text.index("</DataArray>", begin)]
    paths[-1].write_text(text.replace(types, types.replace("5", "11", 2)))
    paths.append(tmp_path / "grid.inp")
    meshio.Mesh(OCTAHEDRON, [("triangle", FACES)]).write(paths[-1])
    said = [text for *_, text in BROKEN.values()] + [
        "has no points",
        "there is no",
        "cannot read",
        "open_mesh reads no .xyz",
        "triangle cells are int64 of shape (2, 4), not integers of shape (number, 3)",
        "points has chunks that were never written, the first at (1, 0)",
        "'name' is an array of object, which cannot be a tensor",
        "empty0.vtu has no points",
        "empty2.vtu has no cells, and meshio reads no such VTU file",
        "cutTrue.vtk is truncated, or no legacy VTK file: 12 bytes of an array of 32",
        "cutFalse.vtk is truncated, or no legacy VTK file: its last line has no line end",
        "is compressed by LZ4",
        "pressure (5,): data of 6 points has as many rows",
        "it has no end_header",
        "it has no numbers of points and faces",
        "it has no $EndElements, $EndNodes",
        "it has no $EndElements",
        "voxels.vtu declares 8 cells, and",
        "open_mesh reads no .inp; convert it (`meshio convert`) to one of .vtu",
    ]
    for messages in run_on_ranks(refused_on_every_rank, 2, paths):
        for message, text in zip(messages, said, strict=True):
            assert text in message, message
    assert not [name for name in os.listdir(tmp_path) if ".morton" in name], "nothing half written is left"
    with pytest.raises(KeyError, match="has no field 'pressure'; it has points"):
        meshio.Mesh(OCTAHEDRON, [("triangle", FACES)]).write(tmp_path / "good.vtk")
        open_mesh(tmp_path / "good.vtk")["pressure"]
    with pytest.raises(ValueError, match="order='hilbert'"):
        open_mesh(tmp_path / "good.vtk", order="hilbert")


def others_on_one_rank(folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("points",))
    here = folder / str(mesh.get_rank())  # a disk of each rank
    with pytest.raises(ShardingError, match="checksum"):
        open_mesh(here / "body.stl", mesh)


def test_copies_of_other_contents(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        points = OCTAHEDRON * [1, 1, 1 + rank]
        meshio.Mesh(points, [("triangle", FACES)]).write(tmp_path / str(rank) / "body.stl", binary=True)
    run_on_ranks(others_on_one_rank, 2, tmp_path)
