"""Meshes on disk: every rank reads its points, cells and edges, and together they are the mesh of one process."""

from __future__ import annotations

import importlib
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardingError, explain
from shardfield.data import MeshDataset, ShardedLoader, mesh_files, open_mesh
from shardfield.data import mesh as data_mesh
from shardfield.data.connectivity import cell_edges, is_closed, point_areas
from shardfield.testing import run_on_ranks

meshio = importlib.import_module("meshio")
OCTAHEDRON = np.array([[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], float)
FACES = np.array([[0, 2, 4], [2, 1, 4], [1, 3, 4], [3, 0, 4], [2, 0, 5], [1, 2, 5], [3, 1, 5], [0, 3, 5]])


def grid(rows: int, columns: int):
    """Return points and quadrilaterals of a sheet in shuffled order."""
    at = np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns)
    points = np.empty((rows * columns, 3))
    points[at.ravel()] = np.stack([*np.indices((rows, columns)).reshape(2, -1), np.zeros(rows * columns)], 1)
    quads = np.stack([at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]], -1).reshape(-1, 4)
    return points, quads


@pytest.fixture
def sheet(tmp_path):
    """A sheet with data of points and cells, as a VTU file."""
    points, quads = grid(6, 7)
    path = tmp_path / "sheet.vtu"
    cell_data = {"number": [np.arange(len(quads), dtype=float)]}
    meshio.Mesh(points, [("quad", quads)], {"height": 10 * points[:, 0] + points[:, 1]}, cell_data).write(path)
    return path


def test_octahedron_as_stl(tmp_path):
    path = tmp_path / "body.stl"
    meshio.Mesh(OCTAHEDRON, [("triangle", FACES)]).write(path)
    body = open_mesh(path)
    assert body.closed and body.fields["points"] == (6, 3) and body.fields["edges"] == (2, 24)
    points, normals, areas = body["points"], body["normals"], body["areas"]
    torch.testing.assert_close(normals, points)  # of a regular body
    torch.testing.assert_close(areas.sum(), torch.tensor(4 * 3**0.5, dtype=areas.dtype))
    source, target = body["edges"]
    assert bool((target.diff() >= 0).all()) and torch.equal(target.bincount(), torch.full((6,), 4))
    torch.testing.assert_close((points[source] - points[target]).norm(dim=1), torch.full((24,), 2**0.5).to(points))
    assert (tmp_path / "body.stl.morton" / "mesh.json").exists()


def test_prepared_once_and_again_after_a_change(sheet, monkeypatch):
    calls = []
    real = mesh_files.read_mesh
    monkeypatch.setattr(mesh_files, "read_mesh", lambda path: calls.append(path) or real(path))
    for _ in range(2):
        height = open_mesh(sheet)["height"]
    assert len(calls) == 1
    points, quads = grid(3, 3)
    meshio.Mesh(points, [("quad", quads)]).write(sheet)
    os.utime(sheet, ns=(1, 1))
    assert len(open_mesh(sheet)["points"]) == 9 < len(height) and len(calls) == 2


def test_order_and_data_follow_the_points(sheet):
    mesh, file = open_mesh(sheet), open_mesh(sheet, order="file")
    order = mesh["order"]
    assert not torch.equal(order, torch.arange(42)) and torch.equal(file["order"], torch.arange(42))
    torch.testing.assert_close(mesh["points"], file["points"][order])
    torch.testing.assert_close(mesh["height"], 10 * mesh["points"][:, 0] + mesh["points"][:, 1])
    assert not mesh.closed  # a sheet has a boundary
    corners = mesh["points"][mesh["cells/quad"]]
    torch.testing.assert_close(corners.amax(1) - corners.amin(1), torch.tensor([1.0, 1, 0]).to(corners).expand(30, 3))
    # the data of a cell follow it: compare with the file's own cells
    centers = file["points"][file["cells/quad"]].mean(1)[file["cells/quad/number"].argsort()]
    torch.testing.assert_close(corners.mean(1), centers[mesh["cells/quad/number"].long()])


def reading(path, sizes, order):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("points",))
    opened, alone = open_mesh(path, mesh, order=order, sizes=sizes and {"points": sizes}), open_mesh(path, order=order)
    for name in opened.fields:
        torch.testing.assert_close(opened[name].full_tensor(), alone[name], rtol=0, atol=0)
    points, edges, quads = opened["points"], opened["edges"], opened["cells/quad"]
    begin = points._layout.span(0)[0]
    inside = range(begin, begin + len(points.to_local()))
    assert set(edges.to_local()[1].tolist()) <= set(inside), "an edge is on the rank of its target"
    assert all(first in inside for first in quads.to_local().amin(1).tolist())
    nodes = points.requires_grad_()
    source, target = edges
    with explain() as report:
        summed = torch.zeros_like(nodes).index_add(0, target, nodes[source] - nodes[target])
    assert not report.gathers
    whole = alone["edges"]
    expected = torch.zeros_like(alone["points"]).index_add(
        0, whole[1], (alone["points"][whole[0]] - alone["points"][whole[1]])
    )
    torch.testing.assert_close(summed.full_tensor(), expected)
    return len(points.to_local()), edges.to_local().shape[1]


@pytest.mark.parametrize(("sizes", "order"), [(None, "morton"), ((30, 0, 12), "morton")])
def test_each_rank_reads_its_rows(sheet, sizes, order):
    found = run_on_ranks(reading, 3, sheet, sizes, order)
    assert [n for n, _ in found] == list(sizes or (14, 14, 14)) and sum(e for _, e in found) == 142


def in_place(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    opened = open_mesh(path, mesh, [Shard(0), Replicate()], order="file")
    sums = opened["points"].sum(0).full_tensor().tolist(), opened["pressure"].to_local().shape
    with pytest.raises(ShardingError, match="placed Shard"):
        open_mesh(path, mesh, [Shard(1), Replicate()], order="file")
    return sums


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_point_sets_are_read_in_place(kind, tmp_path):
    points = np.random.default_rng(1).random((11, 3))
    path = tmp_path / f"cloud.{kind}"
    if kind == "h5":
        with importlib.import_module("h5py").File(path, "w") as file:
            file["points"], file["pressure"] = points, points[:, :1]
    else:
        group = importlib.import_module("zarr").open_group(str(path), mode="w")
        group["points"], group["pressure"] = points, points[:, :1]
    for rank, (total, shape) in enumerate(run_on_ranks(in_place, 4, path)):
        np.testing.assert_allclose(total, points.sum(0))
        assert shape == ((6, 1) if rank < 2 else (5, 1))
    assert os.listdir(tmp_path) == [path.name], "nothing is written"
    ordered = open_mesh(path)
    torch.testing.assert_close(ordered["pressure"], ordered["points"][:, :1])
    assert ordered.fields["edges"] == (2, 0)


def test_closed_surfaces_and_degenerate_ones():
    assert is_closed(FACES) and not is_closed(FACES[:-1]) and not is_closed(np.empty((0, 3), int))
    turned = FACES.copy()
    turned[0] = turned[0][::-1]
    assert not is_closed(turned), "one triangle of the other orientation"
    normals, areas = point_areas(OCTAHEDRON, np.array([[0, 0, 1], [2, 3, 2]]))
    assert not normals.any() and not areas.any(), "no NaN where triangles have no area"
    assert cell_edges({"triangle": np.array([[0, 1, 1]])}).tolist() == [[1, 0], [0, 1]], "no edge to itself"
    hexahedron = cell_edges({"hexahedron": np.arange(8)[None]})
    assert hexahedron.shape == (2, 24)


def unreadable_on_one_rank(path):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("points",))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(data_mesh, "array_path", lambda folder, name: folder / "gone" / name)
        with pytest.raises(ShardingError, match="rank 1: .*points.*delete it"):
            open_mesh(path, mesh)
    return len(open_mesh(path, mesh)["points"])


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(sheet):
    assert run_on_ranks(unreadable_on_one_rank, 3, sheet) == [42] * 3


def unsorted_in_place(path):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("points",))
    opened = open_mesh(path, mesh, order="file")
    messages = []
    for name in ("cells/triangle", "cells/line", "points", "edges"):
        with pytest.raises(ShardingError) as caught:
            opened[name]
        messages.append(str(caught.value))
    return messages


def test_cells_read_in_place_are_checked(tmp_path):
    path = tmp_path / "cells.h5"
    with importlib.import_module("h5py").File(path, "w") as file:
        file["points"], file["cells/triangle"] = OCTAHEDRON, np.array([[3, 4, 5], [0, 1, 2]])
        file["cells/line"] = np.array([[0, 1], [4, 9]])
        file["edges"] = np.array([[1, -1], [0, 4]])
        file["points"][4, 1] = np.nan
    for unsorted, nowhere, nan, edges in run_on_ranks(unsorted_in_place, 2, path):
        assert "cells/triangle are not sorted by their points" in unsorted
        assert "cells/line name points that do not exist" in nowhere
        assert "1 of 3 points are not finite; the first is point 4" in nan
        assert "edges name points that do not exist" in edges
    with importlib.import_module("h5py").File(tmp_path / "nowhere.h5", "w") as file:
        file["points"], file["cells/line"] = OCTAHEDRON, np.array([[0, 1], [4, 9]])
    with pytest.raises(ShardingError, match="1 of 2 line cells name points that do not exist"):
        open_mesh(tmp_path / "nowhere.h5")
    with importlib.import_module("h5py").File(tmp_path / "names.h5", "w") as file:
        file["points"], file["order"] = OCTAHEDRON, np.arange(6)
    with pytest.raises(ShardingError, match="cannot be called 'order'"):
        open_mesh(tmp_path / "names.h5")


def volume_on_ranks(path):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("points",))
    opened, alone = open_mesh(path, mesh), open_mesh(path)
    for name in opened.fields:
        torch.testing.assert_close(opened[name].full_tensor(), alone[name], rtol=0, atol=0)
    begin, end = opened.layout.span(0)
    owners = opened["faces/quad"].to_local().amin(1)
    assert bool(((owners >= begin) & (owners < end)).all()), "a face is on the rank of its first point"
    return {name: opened[name].to_local().shape[0] for name in ("points", "cells/hexahedron", "faces/quad/cells")}


def test_volumes_have_faces_and_a_surface(tmp_path):
    at = np.arange(27).reshape(3, 3, 3)
    corners = [at[i : i + 2, j : j + 2, k : k + 2] for i in range(2) for j in range(2) for k in range(2)]
    cells = np.array([c.reshape(-1)[[0, 4, 6, 2, 1, 5, 7, 3]] for c in corners])
    path = tmp_path / "box.vtu"
    meshio.Mesh(np.stack(np.indices((3, 3, 3)), -1).reshape(-1, 3) / 2.0, [("hexahedron", cells)]).write(path)
    box = open_mesh(path)
    assert box.closed and box.fields["faces/quad"] == (36, 4) and abs(box["areas"].sum() - 6) < 1e-12
    assert int((box["faces/quad/cells"][:, 1] < 0).sum()) == 24
    center = (box["points"] == 0.5).all(1)
    assert not box["normals"][center].any() and bool((box["normals"] * (box["points"] - 0.5) >= 0).all())
    found = run_on_ranks(volume_on_ranks, 3, path)
    for name, total in (("points", 27), ("cells/hexahedron", 8), ("faces/quad/cells", 36)):
        assert sum(rank[name] for rank in found) == total
    assert len({tuple(rank.values()) for rank in found}) > 1, "each field has a sharding of its own"


def test_data_of_cells_in_hdf5(tmp_path):
    path = tmp_path / "plane.h5"
    with importlib.import_module("h5py").File(path, "w") as file:
        file["points"], file["cells/triangle"] = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]]), [[0, 2, 3], [0, 1, 2]]
        file["cell_data/triangle/number"] = [10, 11]
        file["cells/line"] = np.array([[0, 1]], np.uint32)
    plane, in_place = open_mesh(path), open_mesh(path, order="file")
    assert "normals" not in plane.fields and plane["areas"].sum() == 1  # a plane mesh has areas, and no normals
    assert in_place["cells/triangle/number"].tolist() == [10, 11]
    assert in_place["cells/line"].dtype == torch.int64, "an index"
    first = plane["order"][plane["cells/triangle"]].sort(1).values.tolist()
    assert [first[i] for i in plane["cells/triangle/number"].argsort()] == [[0, 2, 3], [0, 1, 2]]


def test_files_of_one_name_in_one_cache(tmp_path):
    """Cases of a study often have equal names, sizes and times; one must not be read for the other."""
    found = []
    for case in (1.0, 2.0):
        path = tmp_path / f"case{case:.0f}" / "body.stl"
        path.parent.mkdir()
        meshio.Mesh(case * OCTAHEDRON, [("triangle", FACES)]).write(path, binary=True)
        os.utime(path, ns=(1, 1))
        found.append(open_mesh(path, cache=tmp_path / "cache"))
    assert [float(mesh["points"].max()) for mesh in found] == [1.0, 2.0]
    assert float(open_mesh(tmp_path / "case1" / "body.stl", cache=tmp_path / "cache")["points"].max()) == 1.0


@pytest.mark.parametrize("edges", [np.array([[0, 1], [1, 2], [2, 0]]), np.array([0, 1]), np.zeros((2, 3))])
def test_edges_have_two_rows_of_integers(edges, tmp_path):
    with importlib.import_module("h5py").File(tmp_path / "graph.h5", "w") as file:
        file["points"], file["edges"] = OCTAHEDRON, edges
    with pytest.raises(ShardingError, match=r"edges are .*, not integers of shape \(2, number\)"):
        open_mesh(tmp_path / "graph.h5", order="file")


def graph_on_ranks(path, order):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("points",))
    opened = open_mesh(path, mesh, order=order)
    begin, end = opened.layout.span(0)
    targets = opened["edges"].to_local()[1]
    assert bool(((targets >= begin) & (targets < end)).all()), "an edge is on the rank of its target"
    return opened["order"].full_tensor()[opened["edges"].full_tensor()].T.tolist()


@pytest.mark.parametrize("order", ["morton", "metis"])
def test_edges_of_the_file(order, tmp_path):
    """A graph of its own, of one direction and with an edge twice: renumbered, and sorted by its targets."""
    path, random = tmp_path / "graph.h5", np.random.default_rng(0)
    edges = random.integers(0, 300, (2, 500))
    edges[:, 1] = edges[:, 0]
    with importlib.import_module("h5py").File(path, "w") as file:
        file["points"], file["edges"], file["cells/line"] = random.random((300, 3)), edges, [[0, 1]]
    for found in run_on_ranks(graph_on_ranks, 3, path, order):
        assert sorted(found) == sorted(edges.T.tolist())
    with importlib.import_module("h5py").File(tmp_path / "nowhere.h5", "w") as file:
        file["points"], file["edges"] = OCTAHEDRON, [[0, 1], [2, 6]]
    with pytest.raises(ShardingError, match=r"1 of 2 edges name points that do not exist; the first is edge 1"):
        open_mesh(tmp_path / "nowhere.h5", order=order)


def others_on_one_rank(path):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("points",))
    first = dist.get_rank() == 0
    for others in (
        {"order": "file" if first else "morton"},
        {"order": "hilbert" if first else "morton"},
        {"placements": [Replicate() if first else Shard(0)]},
        {"sizes": {"points": [6, 0]} if first else None},
    ):
        with pytest.raises(ShardingError, match="the ranks do not agree on"):
            open_mesh(path, mesh, **others)
    with pytest.raises(ValueError, match="order='hilbert'"):
        open_mesh(path, mesh, order="hilbert")
    opened = open_mesh(path, mesh)
    for name in ("edges", "pressure"):
        with pytest.raises(ShardingError, match="the ranks do not agree on"):
            opened[name if first else "points"]
    return opened["points"].shape


def test_arguments_that_differ_between_ranks(tmp_path):
    """Each raised on one rank, or read other files, while the other rank waited or received what it did not expect."""
    path = tmp_path / "body.h5"
    with importlib.import_module("h5py").File(path, "w") as file:
        file["points"], file["cells/triangle"] = OCTAHEDRON, FACES
    assert run_on_ranks(others_on_one_rank, 2, path) == [(6, 3)] * 2


def damaged(path):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("points",))
    with pytest.raises(ShardingError, match=r"\.morton is damaged \(height: .*delete it"):
        open_mesh(path, mesh)


def test_damaged_arrays(sheet):
    open_mesh(sheet)
    file = sheet.with_name("sheet.vtu.morton") / "height.npy"
    file.write_bytes(file.read_bytes()[:-8])
    run_on_ranks(damaged, 2, sheet)


def test_surfaces_of_pyvista(tmp_path):
    pyvista = pytest.importorskip("pyvista")
    body = pyvista.PolyData(OCTAHEDRON, faces=np.insert(FACES, 0, 3, axis=1).ravel())
    for name in ("body.vtp", "surface.vtk"):
        body.save(tmp_path / name)
        assert open_mesh(tmp_path / name).closed
    whole = (tmp_path / "body.vtp").read_bytes()
    (tmp_path / "cut.vtp").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardingError, match="cannot read"):
        open_mesh(tmp_path / "cut.vtp")
    pyvista.PolyData(OCTAHEDRON, lines=[3, 0, 1, 2]).save(tmp_path / "lines.vtp")
    with pytest.raises(ShardingError, match="has lines"):
        open_mesh(tmp_path / "lines.vtp")


def test_duplicate_points_stay(tmp_path):
    points = np.repeat(OCTAHEDRON, 2, axis=0)
    meshio.Mesh(points, [("vertex", np.arange(12)[:, None])]).write(tmp_path / "twice.vtk")
    found = open_mesh(tmp_path / "twice.vtk")["points"]
    assert len(found) == 12 and len(found.unique(dim=0)) == 6


def loading(paths):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "points"))
    meshes = MeshDataset(paths, ("points", "height")).prepare(mesh)
    loader = ShardedLoader(meshes, 1, mesh, placements={"points": [Shard(0)], "height": [Shard(0)]}, shuffle=False)
    seen = {}
    for batch in loader.sweep():
        for i in loader.indices:
            points, height = batch["points"].full_tensor(), batch["height"].full_tensor()
            torch.testing.assert_close(height, 10 * points[..., 0] + points[..., 1])
            seen[i] = (points.shape[1], batch["points"].to_local().shape[1])
    with pytest.raises(ShardingError, match="differ in size: use batches of one sample"):
        next(iter(ShardedLoader(meshes, 2, mesh, placements=[Shard(0)], shuffle=False)))
    return seen


def test_samples_of_different_sizes(tmp_path):
    paths = []
    for columns in (2, 3, 4):
        points, quads = grid(3, columns)
        paths.append(tmp_path / f"{columns}.vtu")
        meshio.Mesh(points, [("quad", quads)], {"height": 10 * points[:, 0] + points[:, 1]}).write(paths[-1])
    first, second, third, fourth = run_on_ranks(loading, 4, paths)
    assert first == {0: (6, 3), 2: (12, 6)} and second == {0: (6, 3), 2: (12, 6)}
    assert third == {1: (9, 5)} and fourth == {1: (9, 4)}
