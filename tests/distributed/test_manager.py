"""DistributedManager in worlds of one, two and four processes."""

import os
import random
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardfield.distributed import DistributedManager, ProcessGroupConfig, ProcessGroupNode
from shardfield.errors import WorldError
from shardfield.testing import run_on_ranks
from tests.launch import clean_env


def managed(check, *args):
    """Run a check with a manager on the rank's existing world, and leave the world as it was."""
    world = dist.group.WORLD
    DistributedManager.initialize()
    try:
        return check(DistributedManager(), *args)
    finally:
        DistributedManager.cleanup()
        assert dist.group.WORLD is world, "cleanup ended a world that it did not start"
        assert not DistributedManager.is_initialized()


def on_ranks(check, size, *args):
    return run_on_ranks(managed, size, check, *args)


def ranks_of(group):
    return dist.get_process_group_ranks(group)


@pytest.fixture
def free_port():
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


@pytest.fixture
def alone(monkeypatch):
    """Provide a process without a launcher and its manager; it has no process group before or after."""
    for name in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(name)
    assert not dist.is_initialized()
    DistributedManager.initialize()
    yield DistributedManager()
    DistributedManager.cleanup()
    assert not dist.is_initialized()


# One process.


def test_before_initialize():
    assert not DistributedManager.is_initialized()
    with pytest.raises(WorldError, match=r"before DistributedManager.initialize\(\)"):
        DistributedManager()


def test_a_single_process(alone):
    assert (alone.rank, alone.local_rank, alone.world_size, alone.distributed) == (0, 0, 1, False)
    assert (
        alone.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        and alone.cuda == torch.cuda.is_available()
    )
    assert str(alone) == f"process 0 of 1 on {alone.device}, started by 'single'"
    assert not dist.is_initialized(), "no process group was needed"
    assert alone.group() is None and (alone.group_size(), alone.group_rank(), alone.group_name()) == (1, 0, None)


def test_manager_is_a_singleton(alone):
    other = DistributedManager()
    alone.broadcast_buffers = True
    with pytest.warns(UserWarning, match="find_unused_parameters"):
        alone.find_unused_parameters = True
    assert other.broadcast_buffers and other.find_unused_parameters
    with pytest.warns(UserWarning, match="initialized already: this call does nothing"):
        DistributedManager.initialize()
    assert other.broadcast_buffers


def test_meshes_and_groups_of_a_single_process(alone):
    mesh = alone.initialize_mesh((-1, 1), mesh_dim_names=["data", "domain"])
    assert mesh.shape == (1, 1) and alone.mesh("domain").size() == 1
    x = torch.ones(3, device=alone.device)
    dist.all_reduce(x, group=alone.get_mesh_group(mesh))
    dist.all_reduce(x, group=alone.mesh("domain").get_group())
    assert x.tolist() == [1, 1, 1]
    alone.create_process_subgroup("model_parallel", 1)
    assert (alone.group_size("model_parallel"), alone.group_rank("model_parallel")) == (1, 0)
    assert not alone.distributed


def test_cleanup_and_again(alone):
    alone.initialize_mesh((1,), ("x",))
    DistributedManager.cleanup()
    DistributedManager.cleanup()
    assert not dist.is_initialized()
    with pytest.raises(WorldError, match="cleaned up"):
        _ = alone.rank
    with pytest.raises(WorldError, match="before"):
        DistributedManager()
    DistributedManager.initialize()
    assert alone.rank == 0 and alone.mesh_dims == {}


def test_initialize_sets_no_seed_and_no_variable(alone):
    DistributedManager.cleanup()
    before = dict(os.environ), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    DistributedManager.setup(rank=0, world_size=1)
    DistributedManager().initialize_mesh((1,), ("x",))
    after = dict(os.environ), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert before[0] == after[0] and torch.equal(before[1], after[1]) and before[2:] == after[2:]


@pytest.mark.parametrize("start", ["initialize", "initialize_env", "initialize_slurm", "initialize_open_mpi"])
def test_a_launched_world_of_one(alone, monkeypatch, start):
    DistributedManager.cleanup()
    launchers = {
        "initialize_slurm": {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"},
        "initialize_open_mpi": {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        },
    }
    for name, value in launchers.get(start, {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    args = {"initialize_slurm": ("12355",), "initialize_open_mpi": ("localhost", "12355")}.get(start, ())
    getattr(DistributedManager, start)(*args)
    dm = DistributedManager()
    assert dm.distributed and (dm.rank, dm.local_rank, dm.world_size) == (0, 0, 1)
    assert dist.get_backend() == DistributedManager.get_available_backend()


def test_second_setup_is_refused(alone):
    with pytest.raises(WorldError, match=r"initialised already; call DistributedManager.cleanup\(\)"):
        DistributedManager.setup(rank=0, world_size=1)
    DistributedManager.cleanup()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WorldError, match="rank 0 of 1; requested was rank 1 of 2"):
            DistributedManager.setup(rank=1, world_size=2)
        DistributedManager.setup(rank=0, world_size=1)
        assert DistributedManager().method == "existing"
        DistributedManager.cleanup()
        assert dist.is_initialized(), "cleanup ended a world that it did not start"
    finally:
        dist.destroy_process_group()
    for wrong in ({"port": "http"}, {"port": 99999}, {"rank": 2}, {"timeout": -1}):
        with pytest.raises(WorldError):
            DistributedManager.setup(**wrong)
    assert not DistributedManager.is_initialized() and not dist.is_initialized()


# Bad names and sizes: the same error on every rank, and the world still works afterwards.


def wrong_requests(dm):
    dm.initialize_mesh((2, -1), ("data", "domain"))
    dm.create_process_subgroup("pairs", 2)
    wrong = {
        lambda: dm.group("nothing"): "no process group is named 'nothing'; there are 'pairs'",
        lambda: dm.group_size("nothing"): "no process group is named 'nothing'",
        lambda: dm.group_rank("nothing"): "no process group is named 'nothing'",
        lambda: dm.group_name(dist.group.WORLD): "not made by name here; there are 'pairs'",
        lambda: dm.mesh("nothing"): "no mesh axis is named 'nothing'; the mesh has 'data', 'domain'",
        lambda: dm.mesh(("data", "nothing")): "no mesh axis is named 'nothing'",
        lambda: dm.mesh(("domain", "data")): "in the mesh's order 'data', 'domain'",
        lambda: dm.initialize_mesh((3, -1), ("a", "b")): "must divide the number of processes",
        lambda: dm.initialize_mesh((-1, -1), ("a", "b")): "only one size can be -1",
        lambda: dm.create_process_subgroup("pairs", 1): "a process group 'pairs' already",
        lambda: dm.create_process_subgroup("threes", 3): "cannot be split into groups of 3",
        lambda: dm.create_process_subgroup("x", 1, group_name="nothing"): "no process group is named 'nothing'",
        lambda: dm.create_orthogonal_process_group("x", "nothing"): "no process group is named 'nothing'",
        lambda: dm.create_orthogonal_process_group("pairs", "pairs"): "a process group 'pairs' already",
        lambda: dm.create_group_from_node(ProcessGroupNode("x")): "'x' has no size yet",
        lambda: dm.no_such_thing: "has no attribute 'no_such_thing'",
    }
    for request, message in wrong.items():
        with pytest.raises((WorldError, AttributeError)) as error:
            request()
        assert message in str(error.value)
    assert dm.group_names == ["pairs"] and dm.mesh_names() == ["data", "domain"]
    x = torch.ones(1)
    dist.all_reduce(x, group=dm.group("pairs"))
    return x.item()


def test_invalid_requests():
    assert on_ranks(wrong_requests, 4) == [2.0] * 4


def no_mesh(dm):
    with pytest.raises(WorldError, match="no mesh yet: call initialize_mesh"):
        dm.mesh("domain")
    return dm.mesh_dims, list(dm.global_mesh.shape), dm.mesh_dims


def test_no_mesh_yet():
    assert on_ranks(no_mesh, 2) == [({}, [2], {"world": 2})] * 2


# Several processes.


def who(dm):
    return dm.rank, dm.local_rank, dm.world_size, dm.distributed, dm.method, dm.device.type


def test_existing_torch_world_is_used():
    assert on_ranks(who, 2) == [(r, r, 2, True, "existing", "cpu") for r in range(2)]


def meshes(dm):
    mesh = dm.initialize_mesh((-1, 2), mesh_dim_names=["data", "spatial"])
    assert dm.global_mesh is mesh and dm.mesh() is mesh
    assert (dm.mesh_dims, dm.mesh_names(), dm.mesh_sizes()) == (
        {"data": 2, "spatial": 2},
        ["data", "spatial"],
        [2, 2],
    )
    assert dm.mesh(("data", "spatial")).shape == (2, 2)
    axes = [ranks_of(dm.get_mesh_group(dm.mesh(name))) for name in ("data", "spatial")]
    assert axes == [ranks_of(mesh[name].get_group()) for name in ("data", "spatial")]
    return axes + [ranks_of(dm.get_mesh_group(mesh))]


def test_meshes():
    world = [0, 1, 2, 3]
    assert on_ranks(meshes, 4) == [[[r % 2, r % 2 + 2], [r // 2 * 2, r // 2 * 2 + 1], world] for r in range(4)]


def group_of_two_axes(dm):
    dm.initialize_mesh((2, 1, 2), mesh_dim_names=("data", "h", "w"))
    group = dm.get_mesh_group(dm.mesh(("h", "w")))
    assert dm.get_mesh_group(dm.mesh(["h", "w"])) is group, "the group is created once"
    across = dm.get_mesh_group(dm.mesh(("data", "h")))
    x = torch.tensor([10.0**dm.rank])
    dist.all_reduce(x, group=group)
    return ranks_of(group), x.item(), ranks_of(across)


def test_one_group_for_several_axes():
    expected = [([0, 1], 11.0, [0, 2]), ([0, 1], 11.0, [1, 3]), ([2, 3], 1100.0, [0, 2]), ([2, 3], 1100.0, [1, 3])]
    for _ in range(2):  # after a cleanup the same groups can be made again
        assert on_ranks(group_of_two_axes, 4) == expected


def group_of_another_mesh(dm):
    other = dist.device_mesh.DeviceMesh("cpu", torch.tensor([[0], [1]]))
    found = None
    if dm.rank < 2:
        found = ranks_of(dm.get_mesh_group(other))
    else:
        with pytest.raises(WorldError, match=rf"rank {dm.rank} .* over the ranks \[0, 1\]"):
            dm.get_mesh_group(other)
    # groups created later have the same names on all ranks
    across = dist.new_group([1, 2])
    names = [None] * 4
    dist.all_gather_object(names, across.group_name if dm.rank in (1, 2) else None)
    assert names[1] == names[2]
    return found


def test_group_of_a_mesh_made_by_torch():
    assert on_ranks(group_of_another_mesh, 4) == [[0, 1], [0, 1], None, None]


def nested_groups(dm):
    dm.create_process_subgroup("model", 2)
    dm.create_orthogonal_process_group("data", "model")
    dm.create_process_subgroup("one", 1, group_name="data")
    assert dm.group_names == ["model", "data", "one"]
    assert dm.group_name(dm.group("data")) == "data"
    sums = []
    for name in dm.group_names:
        x = torch.tensor([10.0**dm.rank])
        dist.all_reduce(x, group=dm.group(name))
        sums.append(x.item())
    return [(dm.group_size(n), dm.group_rank(n)) for n in dm.group_names], sums


def test_nested_and_orthogonal_groups():
    expected = [
        ([(2, r % 2), (2, r // 2), (1, 0)], [11.0 * 100 ** (r // 2), 101.0 * 10 ** (r % 2), 10.0**r]) for r in range(4)
    ]
    assert on_ranks(nested_groups, 4) == expected


def groups_of_a_tree(dm, sizes):
    world = ProcessGroupNode("world")
    config = ProcessGroupConfig(world)
    config.add_node(ProcessGroupNode("model"), parent=world)
    config.add_node(ProcessGroupNode("data"), parent="world")
    config.add_node(ProcessGroupNode("spatial"), parent="model")
    config.add_node(ProcessGroupNode("channel"), parent="model")
    config.set_leaf_group_sizes(sizes)
    dm.create_groups_from_config(config)
    return {name: ranks_of(dm.group(name)) for name in ("world", "model", "data", "spatial", "channel")}


@pytest.mark.parametrize(
    "data, spatial, channel, of_rank_3",
    [
        (2, 2, 1, {"model": [2, 3], "data": [1, 3], "spatial": [2, 3], "channel": [3]}),
        (2, 1, 2, {"model": [2, 3], "data": [1, 3], "spatial": [3], "channel": [2, 3]}),
        (1, 2, 2, {"model": [0, 1, 2, 3], "data": [3], "spatial": [2, 3], "channel": [1, 3]}),
    ],
)
def test_groups_of_a_tree(data, spatial, channel, of_rank_3):
    sizes = {"data": data, "spatial": spatial, "channel": channel}
    assert on_ranks(groups_of_a_tree, 4, sizes)[3] == {"world": [0, 1, 2, 3]} | of_rank_3


def three_children(dm):
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    for name in ("a", "b", "c"):
        config.add_node(ProcessGroupNode(name), parent="world")
    config.set_leaf_group_sizes({"a": 1, "b": 2, "c": 2})
    dm.create_groups_from_config(config, verbose=True)
    return [ranks_of(dm.group(n)) for n in ("a", "b", "c")]


def test_children_of_a_node_are_orthogonal():
    assert on_ranks(three_children, 4) == [[[r], [r // 2 * 2, r // 2 * 2 + 1], [r % 2, r % 2 + 2]] for r in range(4)]


def groups_left(dm):
    dm.initialize_mesh((2, -1), ("a", "b"))
    dm.create_process_subgroup("pairs", 2)
    dm.get_mesh_group(dm.mesh(("a", "b")))
    groups = [dm.group("pairs"), dm.mesh("a").get_group()]
    DistributedManager.cleanup()
    left = []
    for group in groups:
        try:
            left.append(ranks_of(group))
        except (KeyError, ValueError):
            pass
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("pairs", 2)  # the name is free again
    return left


def test_cleanup_destroys_its_groups_in_a_foreign_world():
    assert on_ranks(groups_left, 4) == [[]] * 4


# Programs.

PROGRAM = """
import torch, torch.distributed as dist
from shardfield.distributed import DistributedManager
for i in range(2):
    DistributedManager.initialize()
    dm = DistributedManager()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dm.world_size == 2 and dm.method == "env" and dm.local_rank == dm.rank, str(dm)
    dm.initialize_mesh((1, 2), ("data", "domain"))
    if i == 0:
        DistributedManager.cleanup(barrier=True)
        DistributedManager.cleanup()
print("ok")
"""


def test_program_initializes_again_and_exits_silently(free_port):
    # No devices: two ranks cannot share one with NCCL.
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    env = clean_env() | {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""} | meeting
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [p.communicate(timeout=150) for p in ranks] == [("ok\n", "")] * 2
    finally:
        for p in ranks:
            p.kill()
