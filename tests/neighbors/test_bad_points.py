"""Few, no, equal and bad points, and edges that point nowhere: the right result or one error, the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, knn, partition_points, radius_search
from shardfield.testing import run_on_ranks
from shardfield.train.recipes.aero_transolver import Transolver


def outcome(call) -> str:
    """Return the result of a call as text, or its error."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def attempts() -> dict[str, str]:
    """Return the outcome of each call on this rank, of three; the last one has no points, or the bad ones."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,), mesh_dim_names=("points",))

    def sharded(local, dim=0):
        return ShardTensor.from_local(local, mesh, [Shard(dim)])

    two = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    few, none, same = sharded(two[rank : rank + 1]), sharded(torch.zeros(0, 3)), sharded(torch.ones(2, 3))
    bad = sharded(torch.full((2, 3), torch.nan if rank == 2 else 0.0))
    rows, values = sharded(torch.rand(4, 2)), sharded(torch.rand(2, 2))
    edges = sharded(torch.tensor([0, 99 if rank == 2 else 1]))
    torch.manual_seed(0)
    model = Transolver(3, 1, 8, 4, 2, 2)
    leaf = same.detach().requires_grad_()
    calls = {
        "more ranks than points": lambda: knn(few, few, 2)[0].full_tensor().tolist(),
        "radius": lambda: radius_search(few, few, 10.0)[2].full_tensor().tolist(),
        "partition": lambda: partition_points(two, mesh)[1]._layout.shard_sizes(0),
        "a model of few": lambda: torch.allclose(
            model(sharded(two[None, rank : rank + 1], 1)).full_tensor(), model(two[None])
        ),
        "a model of none": lambda: tuple(model(sharded(torch.zeros(1, 0, 3), 1)).shape),
        "k too large": lambda: knn(few, few, 3),
        "no points": lambda: knn(none, few, 1),
        "no points within": lambda: radius_search(none, few, 1.0)[2].full_tensor().tolist(),
        "no queries": lambda: tuple(knn(few, none, 1)[0].shape),
        "nan": lambda: knn(bad, few, 1),
        "nan queries": lambda: radius_search(few, bad, 1.0),
        "nan on one rank": lambda: partition_points(bad.to_local(), mesh),
        "others on one rank": lambda: partition_points(two + (rank == 2), mesh),
        "another order on one rank": lambda: partition_points(two.flip(0) if rank == 2 else two, mesh),
        "another scale on one rank": lambda: partition_points(two * (1 + (rank == 2)), mesh),
        "duplicates": lambda: knn(same, same, 6)[0].full_tensor()[5].tolist(),
        "gradient of duplicates": lambda: knn(leaf, leaf, 3)[1].sum().backward() or leaf.grad.full_tensor().abs().max(),
        "index": lambda: rows[edges],
        "index_add": lambda: torch.zeros_like(rows).index_add(0, edges, values),
        "scatter_add": lambda: torch.zeros_like(rows).scatter_add(0, edges[:, None].expand(-1, 2), values),
    }
    return {name: outcome(call) for name, call in calls.items()}


EXPECTED = {
    "more ranks than points": "[[0, 1], [1, 0]]",
    "radius": "[2, 2]",
    "partition": "(1, 1, 0)",
    "a model of few": "True",
    "a model of none": "(1, 0, 1)",
    "k too large": "ValueError: knn: k = 3 neighbors of 2 points",
    "no points": "ValueError: knn: k = 1 neighbors of 0 points",
    "no points within": "[0, 0]",
    "no queries": "(0, 1)",
    "nan": "ValueError: knn: coordinates must be finite",
    "nan queries": "ValueError: radius_search: coordinates must be finite",
    "nan on one rank": "ShardingError: partition_points: ",
    "others on one rank": "ShardingError: partition_points: ",
    "another order on one rank": "ShardingError: partition_points: ",
    "another scale on one rank": "ShardingError: partition_points: ",
    "duplicates": "[0, 1, 2, 3, 4, 5]",
    "gradient of duplicates": "tensor(0.)",
    "index": "IndexError: index out of bounds for dimension with size 12",
    "index_add": "RuntimeError: index out of bounds for dimension with size 12",
    "scatter_add": "RuntimeError: index out of bounds for dimension with size 12",
}


def test_bad_points():
    found = run_on_ranks(attempts, 3)
    for name, expected in EXPECTED.items():
        assert len({outcomes[name] for outcomes in found}) == 1, [outcomes[name] for outcomes in found]
        assert found[0][name].startswith(expected), (name, found[0][name])
