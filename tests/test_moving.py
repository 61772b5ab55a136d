"""The contracts of PhysicsNeMo: those that hold here too, and those that differ, row by row of the page.

Every test runs on two ranks unless it says otherwise. The keys of `DIFFERS` are the first cells of the table
"What differs" of docs/moving-from-physicsnemo.md.
"""

import importlib
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfield
from shardfield import ShardTensor, TensorPromotionMode, runtime, scatter_tensor, sync_module_over_mesh
from shardfield.comm import collectives
from shardfield.distributed import (
    DistributedManager,
    ProcessGroupConfig,
    ProcessGroupNode,
    fused_all_reduce,
    mark_module_as_shared,
)
from shardfield.distributed import autograd as vcollectives
from shardfield.distributed.mappings import scatter_to_parallel_region
from shardfield.distributed.utils import (
    get_memory_format,
    indexed_all_to_all_v_wrapper,
    pad_helper,
    split_tensor_along_dim,
    truncate_helper,
)
from shardfield.domain_parallel import distribute_module
from shardfield.errors import ShardingError, WorldError
from shardfield.shard_utils import HaloConfig, RingPassingConfig, halo_padding, perform_ring_iteration_async
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh
from tests.launch import ROOT

SAME, DIFFERS = {}, {}


def same(text):
    return lambda fn: SAME.setdefault(text, fn)


def differs(text):
    return lambda fn: DIFFERS.setdefault(text, fn)


def field(rows=5, columns=3):
    return torch.arange(float(rows * columns)).reshape(rows, columns)


@contextmanager
def manager(**sizes):
    DistributedManager.initialize()
    for name, size in sizes.items():
        DistributedManager.create_process_subgroup(name, size)
    yield DistributedManager()
    DistributedManager.cleanup()


# ---------------------------------------------------------------------- ShardTensor


@same("sharding_shapes is a dict that from_local takes, for results of other trailing sizes too")
def sharding_shapes(_):
    mesh = world_mesh((2,))
    x = scatter_tensor(field(), 0, mesh, [Shard(0)])
    shapes = x._spec.sharding_shapes()
    assert shapes == {0: ((3, 3), (2, 3))} and x._spec.sharding_shapes(0) == shapes[0]
    assert x._spec.local_shape == x.to_local().shape
    nearest = x.to_local().new_zeros(len(x.to_local()), 7)
    for stated in (shapes, [shapes[0]], (list(shapes[0]),)):
        made = ShardTensor.from_local(nearest, mesh, [Shard(0)], sharding_shapes=stated)
        assert made.shape == (5, 7) and made._spec.sharding_shapes() == {0: ((3, 7), (2, 7))}
        assert x.redistribute(sharding_shapes={0: [4, 1]}).redistribute(sharding_shapes=stated)._spec == x._spec
    square = world_mesh((1, 2))
    y = scatter_tensor(field(), 0, square, [Replicate(), Shard(1)])
    assert y._spec.sharding_shapes() == {1: ((5, 2), (5, 1))}
    again = ShardTensor.from_local(y.to_local(), square, y.placements, sharding_shapes=y._spec.sharding_shapes())
    assert again._spec == y._spec


@same("handlers are registered by PhysicsNeMo's keywords, and by ours")
def handler_keywords(_):
    x = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)])
    with runtime.fresh(registry=runtime.active.registry.copy()):
        for keywords in ({"handler": lambda *_: "mine"}, {"function_handler": lambda *_: "mine"}):
            ShardTensor.register_function_handler(torch.erf, **keywords)
            assert torch.erf(x) == "mine"
            ShardTensor.register_dispatch_handler(op=torch.ops.aten.erf.default, **keywords)
            ShardTensor.register_named_function_handler(func_name="softmin", **keywords)
            ShardTensor.register_named_function_handler(name="softmin", **keywords)
        for wrong in ({}, {"handler": print, "function_handler": print}):
            with pytest.raises(TypeError, match="pass handler, once"):
                ShardTensor.register_function_handler(torch.erf, **wrong)


@same("the handler of a custom op by name gets the calls of the op and of its overload")
def custom_op(_):
    if not hasattr(torch.ops.moving, "double"):
        library = torch.library.Library("moving", "FRAGMENT")
        library.define("double(Tensor x) -> Tensor")
        library.define("double.times(Tensor x, int n) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("double.times", lambda x, n: 2 * n * x, "CompositeExplicitAutograd")
    x = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)])
    with runtime.fresh(registry=runtime.active.registry.copy()):
        ShardTensor.register_named_function_handler("moving.double.default", lambda func, types, args, kw: str(func))
        assert torch.ops.moving.double.default(x) == "moving.double.default"
        assert torch.ops.moving.double(x) == "moving.double.default"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the other overload has no handler and gathers
            assert torch.equal(torch.ops.moving.double(x, 3).full_tensor(), 6 * field())


@same("the dispatch handler of an aten operator gets the Python calls that select it")
def dispatch_handler(_):
    x = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)])
    with runtime.fresh(registry=runtime.active.registry.copy()):
        ShardTensor.register_dispatch_handler(torch.ops.aten.add.Tensor, lambda a, b, alpha=1: ("mine", alpha))
        ShardTensor.register_dispatch_handler(torch.ops.aten.sum.default, lambda a: "all")
        assert x + x == ("mine", 1) and torch.add(x, x, alpha=3) == ("mine", 3) and x.add(x) == ("mine", 1)
        assert x.sum() == "all" and torch.equal(x.sum(1).full_tensor(), field().sum(1))


@same("a plain tensor is promoted silently, with a warning, or refused")
def promotion(_):
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    x, weight = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)]), torch.ones(3)
    with ShardTensor.promotion_mode("warn"):
        with pytest.warns(UserWarning, match=r"auto-promoting a plain tensor of shape \(3,\)"):
            assert torch.equal((x * weight).full_tensor(), field())
        assert torch.equal((x * torch.tensor(2.0)).full_tensor(), 2 * field())
        with pytest.warns(UserWarning, match="auto-promoting"):
            x * torch.tensor(2.0, requires_grad=True)
        nn.functional.gelu(x)  # plain tensors that a rule makes for itself are its own
    ShardTensor.set_promotion_mode(TensorPromotionMode.DISABLED)
    try:
        with pytest.raises(ShardingError, match="meets ShardTensors, and the promotion mode is DISABLED"):
            nn.functional.linear(x, torch.ones(2, 3))
        assert torch.equal((x + 1 + torch.tensor(1.0)).full_tensor(), field() + 2)
        with ShardTensor.promotion_mode(TensorPromotionMode.SILENT):
            assert (x * weight).shape == (5, 3)
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.DISABLED
    finally:
        ShardTensor.set_promotion_mode("silent")
    with pytest.raises(ValueError):
        ShardTensor.set_promotion_mode("loud")


@same("from_dtensor of a leaf fills both gradients")
def from_dtensor(_):
    mesh = world_mesh((2,))
    leaf = distribute_tensor(field(), mesh, [Shard(0)]).requires_grad_()
    x = ShardTensor.from_dtensor(leaf)
    (x * x).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * field()) and torch.equal(leaf.grad.full_tensor(), 2 * field())
    inner = ShardTensor.from_dtensor(leaf * 2)
    inner.sum().backward()
    assert not inner.retains_grad and torch.equal(leaf.grad.full_tensor(), 2 * field() + 2)


@same("torch.distributed.checkpoint saves and loads ShardTensors, in any layout")
def checkpoint(folder):
    mesh = world_mesh((2,))
    x = scatter_tensor(field(), 0, mesh, [Shard(0)], requires_grad=True)
    empty = x.detach().redistribute(sharding_shapes={0: [0, 5]})
    saved = {"x": x, "twice": scatter_tensor(2 * field(), 0, mesh, [Replicate()]), "empty": empty}
    dcp.save(saved, checkpoint_id=folder)
    into = {
        "x": scatter_tensor(torch.zeros(5, 3), 0, mesh, [Shard(1)]),
        "twice": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]),
        "empty": torch.zeros(5, 3),
    }
    dcp.load(into, checkpoint_id=folder)
    for name, times in (("x", 1), ("twice", 2)):
        assert torch.equal(into[name].full_tensor(), times * field())
    assert torch.equal(into["empty"], field())
    with pytest.raises(dcp.CheckpointException, match="is a pending sum"):
        dcp.save({"columns": x.detach().sum(0)}, checkpoint_id=folder + "/partial")


@same("sync_module_over_mesh refuses what it cannot do, and verifies values")
def sync_module(_):
    mesh = world_mesh((2,))
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, dist.get_rank())
    sync_module_over_mesh(module, mesh, src_mesh_rank=1, verify=True)
    assert module.weight.eq(1).all()
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="src_mesh_rank=.* is not on a mesh"):
            sync_module_over_mesh(module, mesh, bad)
    distributed = nn.Module()
    distributed.weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    with pytest.raises(RuntimeError, match="none of it is plain"):
        sync_module_over_mesh(distributed, mesh)
    sync_module_over_mesh(nn.ReLU(), mesh)
    with pytest.raises(RuntimeError, match="metadata differs between ranks"):
        sync_module_over_mesh(nn.Linear(2, 2 + dist.get_rank()), mesh, verify=True)
    with pytest.raises(RuntimeError, match="are not on a 'cpu' device"):
        sync_module_over_mesh(nn.Linear(2, 2, device="meta" if dist.get_rank() else "cpu"), mesh)
    # Values that do not arrive as they were sent are found.
    broadcast = collectives.broadcast_over

    def flipped(tensor, *where):
        out = broadcast(tensor, *where)
        return out + dist.get_rank() if out.is_floating_point() and out.ndim == 2 else out

    with mock.patch.object(collectives, "broadcast_over", flipped):
        with pytest.raises(RuntimeError, match=r"other values of \['weight'\]"):
            sync_module_over_mesh(module, mesh, verify=True)
    sync_module_over_mesh(nn.Linear(2, 2), world_mesh((1, 2)), verify=True)


# ---------------------------------------------------------------------- halos and rings


@same("HaloConfig and RingPassingConfig have PhysicsNeMo's order and defaults")
def configs(_):
    config = HaloConfig(0, 2, 1, 1, False, "p2p")
    assert (config.async_op, config.communication_method) == (False, "p2p")
    assert RingPassingConfig(0, 2).communication_method == "a2a"
    for bad in (lambda: RingPassingConfig(0, 2, "sideways"), lambda: HaloConfig(0, 2, 1, 0, False, "pigeon")):
        with pytest.raises(ValueError):
            bad()


@same("a ring iteration can be asynchronous")
def ring_async(_):
    mesh, rank = world_mesh((2,)), dist.get_rank()
    ring = RingPassingConfig(0, 2, "forward", "p2p")
    block = torch.full((2 + rank, 3), float(rank), requires_grad=True)
    dist.barrier()
    if rank:
        time.sleep(0.5)
    before = time.monotonic()
    received, handles = perform_ring_iteration_async(block, mesh, ring, recv_shape=(3 - rank, 3))
    took = time.monotonic() - before
    for handle in handles:
        handle.wait()
    assert took < 0.3, "the call waits for the other rank"
    assert received.shape == (3 - rank, 3) and received.eq(1 - rank).all()
    (received * (rank + 1)).sum().backward()
    assert block.grad.eq(2 - rank).all(), "the gradient goes back to the sender"
    buffer = torch.empty(2, 2)
    found, handles = perform_ring_iteration_async(torch.full((2, 2), 5.0 + rank), mesh, ring, recv_tensor=buffer)
    handles[0].wait()
    assert found.data_ptr() == buffer.data_ptr() and buffer.eq(6 - rank).all()
    for bad in (
        lambda: perform_ring_iteration_async(block, mesh, RingPassingConfig(0, 2)),
        lambda: perform_ring_iteration_async(torch.ones(2, 3).T, mesh, ring),
        lambda: perform_ring_iteration_async(torch.ones(2), mesh, ring, recv_tensor=torch.ones(2).double()),
    ):
        with pytest.raises(ValueError, match="perform_ring_iteration_async"):
            bad()


@same("torch.compile(fullgraph=True) takes halo_padding, and shardfield.compile takes it on a captured mesh")
def halo_compiled(_):
    mesh = world_mesh((2,))
    field = torch.randn(2, 4 + dist.get_rank(), 6, dtype=torch.float64)

    def results(run):
        x = field.clone().requires_grad_()
        y = run(x)
        return y, torch.autograd.grad(y.sin().sum(), x)[0]

    def squares(x):
        return halo_padding(x, mesh, HaloConfig(0, 1, 1, 2)).square()

    def wider_than_a_shard(x):
        return halo_padding(x, mesh, HaloConfig(0, 1, 5, boundary="pole", pole_dim=2, lengths=(4, 5)))

    whole = {"fullgraph": True, "backend": "aot_eager"}
    for run, compilers in ((squares, (torch.compile, shardfield.compile)), (wider_than_a_shard, (torch.compile,))):
        expected = results(run)
        for compiler in compilers:
            torch.testing.assert_close(results(compiler(run, **whole)), expected, rtol=1e-12, atol=1e-12)
    narrow = torch.compile(lambda x: halo_padding(x, mesh, HaloConfig(0, 1, 5)), **whole)
    with pytest.raises(ShardingError, match="are narrower than the halo of 5"):
        narrow(field)


# ---------------------------------------------------------------------- collectives


@same("the autograd Functions of the collectives have their documented names")
def autograd_functions(_):
    rank = dist.get_rank()
    x = torch.full((1 + rank,), float(rank), requires_grad=True)
    full = vcollectives.AllGatherVAutograd.apply(x, [1, 2], 0, True, None)
    assert full.tolist() == [0, 1, 1]
    full.sum().backward()
    assert x.grad.eq(2).all()
    assert len(vcollectives.GatherVAutograd.apply(x, [1, 2], 0, 1, None)) == 3
    assert vcollectives.ScatterVAutograd.apply(torch.arange(3.0), [1, 2], 0, 0, None).tolist() == [[0], [1, 2]][rank]
    indices = [torch.tensor([0]), torch.tensor([0])]
    moved = vcollectives.IndexedAllToAllVAutograd.apply(x, indices, [[1, 1], [1, 1]], True, 0, None)
    assert moved.tolist() == [0, 1]


@same("indices of indexed_all_to_all_v may be negative")
def negative_indices(_):
    rank = dist.get_rank()
    x = torch.arange(3.0) + 10 * rank
    x.requires_grad_()
    sizes = [[1, 1], [1, 1]]
    moved = vcollectives.indexed_all_to_all_v(x, [torch.tensor([-1]), torch.tensor([-3])], sizes)
    assert moved.tolist() == ([2, 12] if rank == 0 else [0, 10])
    moved.sum().backward()
    assert x.grad.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="go from -4 to -4"):
        indexed_all_to_all_v_wrapper(x, [torch.tensor([-4]), torch.tensor([0])], sizes)


class Bundle(Mapping):
    """A mapping with the parts of TensorDict that matter here."""

    batch_size = ()

    def __init__(self, data):
        self.data = data

    def __getitem__(self, key):
        return self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)

    def apply(self, change):
        return Bundle({k: v.apply(change) if isinstance(v, Bundle) else change(v) for k, v in self.data.items()})


@same("fused_all_reduce keeps a TensorDict, tells whether it is complete, and compiles without a graph break")
def fused(_):
    rank = dist.get_rank()
    bundle = Bundle({"b": torch.tensor(1.0 + rank), "a": Bundle({"x": torch.tensor([2.0, 3.0])})})
    result, work = fused_all_reduce(bundle, async_op=True)
    assert isinstance(result, Bundle) and not work.is_completed() and float(result["b"]) == 1 + rank
    assert work.wait() and work.is_completed() and work.wait()
    assert float(result["b"]) == 3 and result["a"]["x"].tolist() == [4, 6]
    assert fused_all_reduce({"x": torch.ones(2)}, async_op=True)[1].wait()
    with pytest.raises(TypeError):
        fused_all_reduce(b"loss")

    def reduced(a, b):
        sums = fused_all_reduce({"a": a, "b": b})
        return sums["a"].sum() + sums["b"].sum()

    inputs = torch.ones(4) + rank, torch.ones(3)
    compiled = torch.compile(reduced, fullgraph=True, backend="aot_eager")
    assert float(compiled(*inputs)) == float(reduced(*inputs)) == 18


@same("pad_helper crops, truncate_helper keeps a shorter dim, channels_last wins where both describe the memory")
def helpers(_):
    x = field()
    assert torch.equal(pad_helper(x, 0, 2), x[:2]) and torch.equal(pad_helper(x, 0, 2, mode="conj"), x[:2])
    assert torch.equal(truncate_helper(x, 1, 9), x)
    assert get_memory_format(torch.zeros(2, 1, 4, 4)) == torch.channels_last
    assert get_memory_format(torch.zeros(2, 3, 4, 4)) == torch.contiguous_format
    for bad in (lambda: pad_helper(x, 0, -1), lambda: truncate_helper(x, 0, -1), lambda: pad_helper(x, 0, 1, "x")):
        with pytest.raises(ValueError):
            bad()


# ---------------------------------------------------------------------- the process world


@same("the exceptions have PhysicsNeMo's names, and bad arguments are ValueErrors or KeyErrors")
def exceptions(_):
    named = importlib.import_module("shardfield.distributed")
    with pytest.raises(named.PhysicsNeMoUninitializedDistributedManagerWarning):
        DistributedManager()
    with manager() as dm:
        for unknown in (lambda: dm.group("x"), lambda: dm.group_size("x"), lambda: dm.group_rank("x")):
            with pytest.raises(named.PhysicsNeMoUndefinedGroupError):
                unknown()
        for error in (KeyError, ValueError, RuntimeError, WorldError):
            with pytest.raises(error, match="^no process group is named 'x'"):
                dm.group("x")
            with pytest.raises(error, match="^no process group 'x' in the tree"):
                ProcessGroupConfig(ProcessGroupNode("world")).get_node("x")
        for error in (ValueError, RuntimeError):
            with pytest.raises(error):
                dm.create_process_subgroup("a", 3)
            with pytest.raises(error):
                vcollectives.all_gather_v(torch.ones(2), [1, 1])
            with pytest.raises(error):
                vcollectives.gather_v(torch.ones(2), [2, 2], dst=2)
            with pytest.raises(error):
                vcollectives.indexed_all_to_all_v(torch.ones(2), [torch.tensor([0])], [[1]])


@same("a second initialize, find_unused_parameters=True and groups from a config warn")
def manager_warnings(_):
    with manager() as dm:
        with pytest.warns(UserWarning, match="initialized already"):
            DistributedManager.initialize()
        with pytest.warns(UserWarning, match="find_unused_parameters=True"):
            dm.find_unused_parameters = True
        config = ProcessGroupConfig(ProcessGroupNode("world", size=2))
        with pytest.warns(UserWarning, match="experimental"):
            DistributedManager.create_groups_from_config(config)
        assert dm.group_size("world") == 2


@same("the names of domain_parallel and models.afno can be imported")
def names(_):
    for module, name in (
        ("domain_parallel", "ShardTensor"),
        ("domain_parallel", "ShardTensorSpec"),
        ("domain_parallel", "TensorPromotionMode"),
        ("domain_parallel", "sync_module_over_mesh"),
        ("domain_parallel.shard_tensor", "scatter_tensor"),
        ("domain_parallel.shard_utils.ring", "perform_ring_iteration_async"),
        ("domain_parallel.shard_utils.halo", "halo_padding"),
        ("models.afno", "DistributedAFNO"),
    ):
        assert hasattr(importlib.import_module(f"shardfield.{module}"), name)
    assert ShardTensor.patches_enabled()


# ---------------------------------------------------------------------- what differs


@differs("`isinstance(x, DTensor)`")
def is_dtensor(_):
    x = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)])
    assert not isinstance(x, DTensor)
    assert isinstance(x.to_dtensor(), DTensor) and torch.equal(x.to_dtensor().full_tensor(), field())


@differs("`x.to_local(grad_placements=[Partial()])`")
def partial_gradients(_):
    x = scatter_tensor(field(), 0, world_mesh((2,)), [Replicate()], requires_grad=True)
    (x.to_local(grad_placements=[Partial()]) * (dist.get_rank() + 1)).sum().backward()
    assert x.grad.placements == (Replicate(),) and x.grad.to_local().eq(3).all()


@differs("the gradient that a hook of a replicated tensor gets")
def gradient_of_a_hook(_):
    mesh = world_mesh((2,))
    rows = scatter_tensor(field(), 0, mesh, [Shard(0)])
    scale = ShardTensor.from_local(torch.ones(3, requires_grad=True), mesh, [Replicate()]) * 2
    seen = []
    scale.register_hook(seen.append)
    (rows * scale).sum().backward()
    assert seen[0].placements == (Replicate(),)
    assert torch.equal(seen[0].to_local(), field().sum(0))


@differs("the gradient of a Replicate ShardTensor that was used with sharded data")
def replicated_leaf(_):
    mesh = world_mesh((2,))
    x = scatter_tensor(field(), 0, mesh, [Shard(0)])
    weight = scatter_tensor(torch.ones(3), 0, mesh, [Replicate()], requires_grad=True)
    (x * weight).full_tensor().sum().backward()
    assert weight.grad.placements == (Replicate(),)
    torch.testing.assert_close(weight.grad.to_local(), field().sum(0))


@differs("`torch.unbind` of a pending sum, `x[index]` with a replicated index")
def pending_results(_):
    mesh = world_mesh((2,))
    pending = ShardTensor.from_local(field(), mesh, [Partial()])
    index = torch.tensor([[4, 0], [-1, 4]])
    rows = scatter_tensor(field(), 0, mesh, [Shard(0)])[scatter_tensor(index, 0, mesh, [Replicate()])]
    for result, expected in ((torch.unbind(pending, 1)[2], 2 * field()[:, 2]), (rows, field()[index])):
        assert result.placements == (Partial(),)
        torch.testing.assert_close(result.full_tensor(), expected)
        torch.testing.assert_close(result.abs().to_local(), expected.abs())


@differs("`torch.ops.aten.detach_(x)`")
def detached_in_place(_):
    y = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)], requires_grad=True) * 2
    same_one = torch.ops.aten.detach_(y)
    assert not y.requires_grad and y.grad_fn is None and not same_one.requires_grad
    assert torch.equal(same_one.full_tensor(), 2 * field())


@differs("`cross` along a sharded dim; `x[index]` with an index sharded along dim 1, or on a mesh of several axes")
def computed_here(_):
    for mesh, places in ((world_mesh((2,)), [Shard(0)]), (world_mesh((1, 2)), [Shard(1), Shard(0)])):
        a = torch.arange(12.0).reshape(3, 4) ** 2
        b = scatter_tensor(a.flip(1), 0, mesh, places)
        torch.testing.assert_close(
            torch.linalg.cross(scatter_tensor(a, 0, mesh, places), b, dim=0).full_tensor(),
            torch.linalg.cross(a, a.flip(1), dim=0),
        )
        index = torch.tensor([[2, 0, 1], [-1, 2, 2]])
        moved = scatter_tensor(index, 0, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(1)])
        assert torch.equal(scatter_tensor(a, 0, mesh, places)[moved].full_tensor(), a[index])


@differs("`x.offsets()`, `x._spec.offsets()`")
def offsets(_):
    x = scatter_tensor(field(), 0, world_mesh((1, 2)), [Replicate(), Shard(1)])
    assert x.offsets() == x._spec.offsets() == (0, 2 * dist.get_rank())
    assert x.offsets(0) == 0 and x.offsets(1) == 2 * dist.get_rank()


@differs("plain tensors that a handler gets")
def handler_arguments(_):
    x = scatter_tensor(field(), 0, world_mesh((2,)), [Shard(0)])
    with runtime.fresh(registry=runtime.active.registry.copy()):
        ShardTensor.register_function_handler(torch.hypot, lambda func, types, args, kwargs: type(args[1]))
        assert torch.hypot(x, torch.ones(3)) is torch.Tensor


@differs("`sync_module_over_mesh` on a mesh of several axes")
def sync_over_axes(_):
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, dist.get_rank())
    sync_module_over_mesh(module, world_mesh((1, 2)), 1)
    assert module.weight.eq(1).all()


@differs("`split_tensor_along_dim`, `scatter_to_parallel_region` into more parts than there are rows")
def more_parts_than_rows(_):
    assert [len(part) for part in split_tensor_along_dim(field(2), 0, 3)] == [0, 0, 2]
    with manager(model_parallel=2):
        assert len(scatter_to_parallel_region(field(1), 0, "model_parallel")) == dist.get_rank()


@differs("`fused_all_reduce` of a tensor that is in no container")
def fused_all_reduce_of_a_tensor(_):
    assert fused_all_reduce(torch.tensor(1.0 + dist.get_rank())) == 3


@differs("`torch.compile(fullgraph=True)` of attention over a sharded sequence")
def compiled_attention(_):
    mesh = world_mesh((2,))
    full = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
    attention = torch.compile(
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v), fullgraph=True, backend="aot_eager"
    )
    result = attention(*[scatter_tensor(x, 0, mesh, [Shard(2)]) for x in full])
    torch.testing.assert_close(result.full_tensor(), nn.functional.scaled_dot_product_attention(*full))


@differs("seeds in `DistributedManager.initialize()`")
def seeds(_):
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    with manager():
        assert np.random.rand() == expected
    draws = []
    for _ in range(2):
        DistributedManager.initialize(seed=3)
        draws.append((float(np.random.rand()), float(torch.rand(()))))
        DistributedManager.cleanup()
    assert draws[0] == draws[1]
    both = [None, None]
    dist.all_gather_object(both, draws[0])
    assert both[0] != both[1], "ranks draw different numbers"


@differs("`mark_module_as_shared` and two backward passes")
def shared_twice(_):
    with manager(model_parallel=2):
        module = nn.Linear(1, 1, bias=False)
        mark_module_as_shared(module, "model_parallel")
        for _ in range(2):
            module(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        assert float(module.weight.grad) == 6  # (1 + 2), twice


@differs("`DistributedManager().mesh(name)`")
def mesh_by_name(_):
    with manager() as dm:
        dm.initialize_mesh((1, -1), ("data", "domain"))
        assert dm.mesh("domain").size() == 2 and dm.mesh().ndim == 2


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize("row", [*SAME.items(), *DIFFERS.items()], ids=lambda row: row[1].__name__)
def test_contract(row, tmp_path):
    run_on_ranks(row[1], 2, str(tmp_path), timeout=180)  # the first call of torch.compile imports much


def test_every_difference_of_the_page_is_tested():
    page = (ROOT / "docs/moving-from-physicsnemo.md").read_text()
    section = page.split("## What differs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", section, re.M)[1:]
    assert set(rows) - {"SLURM's and Open MPI's variables, both set"} == set(DIFFERS)  # that one: test_launch.py


def distributed_module():
    """Return what the two `distribute_module` make of a module whose weights differ from rank to rank."""
    mesh = world_mesh((2,))
    torch.manual_seed(dist.get_rank())
    layer = distribute_module(nn.Linear(3, 2), device_mesh=mesh)
    weights = [torch.empty_like(layer.weight) for _ in range(2)]
    dist.all_gather(weights, layer.weight.detach())
    partitioned = distribute_module(nn.Linear(3, 2), mesh, lambda name, module, mesh: None)
    return type(layer.weight) is nn.Parameter, torch.equal(*weights), isinstance(partitioned.weight, DTensor)


def test_distribute_module_leaves_parameters_plain():
    """torch's FSDP cannot wrap DTensors where its mesh axis has one rank."""
    assert run_on_ranks(distributed_module, 2) == [(True, True, True)] * 2
