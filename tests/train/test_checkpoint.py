"""Checkpoints load on another mesh and under another strategy; other files are refused."""

from __future__ import annotations

import copy
import json
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardfield import ShardTensor
from shardfield.comm.consensus import ask_first_rank
from shardfield.testing import run_on_ranks
from shardfield.train import CheckpointError, Checkpoints, full_state_dict, load_full_state_dict, storage
from tests.train.test_parallelize import batch, field, loss_of, parallelize, seeded


def begin(shape, strategy):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "spatial"))
    model = parallelize(seeded(), mesh, strategy=strategy)
    return mesh, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(number, mesh, model, optimizer):
    """Train one step on samples 0 to 3, sharded over the data axis."""
    each = 4 // mesh["data"].size()
    first = each * mesh.get_local_rank("data")
    x, y = batch(number, range(first, first + each))
    optimizer.zero_grad()
    loss_of(model, field(x, mesh["spatial"]), y).backward()
    optimizer.step()


def full_state(model, optimizer):
    """Return full parameters and Adam's full state on every rank, by the plain model's names."""
    options = StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return copy.deepcopy((full_state_dict(model), state))


def saves(folder, shape, strategy):
    """Train two steps, save, train two more while it is written; return the final state."""
    mesh, model, optimizer = begin(shape, strategy)
    kept = Checkpoints(folder, keep=2)
    for number in range(2):
        step(number, mesh, model, optimizer)
    kept.save(2, model, optimizer, {"seen": 8, "names": ["a"]}, {"mean": torch.arange(3.0)})
    held = full_state(model, optimizer)
    for number in (2, 3):
        step(number, mesh, model, optimizer)
    kept.wait()
    if dist.get_rank() == 0:
        torch.save(held, folder / "held.pt")
    return {n: v.clone() for n, v in full_state_dict(model).items()}


def goes_on(folder, shape, strategy):
    mesh, model, optimizer = begin(shape, strategy)
    for group in optimizer.param_groups:
        group["lr"] = 7.0  # overwritten by the checkpoint
    kept, mean = Checkpoints(folder), torch.zeros(3)
    latest = kept.latest()
    assert kept.load(latest, model, optimizer, {"mean": mean}) == {"seen": 8, "names": ["a"]}
    assert mean.tolist() == [0, 1, 2] and {g["lr"] for g in optimizer.param_groups} == {0.01}
    held = torch.load(folder / "held.pt")
    torch.testing.assert_close(full_state(model, optimizer), held, rtol=0, atol=0)
    assert len(held[1]) == len(list(model.parameters())) and all(s["exp_avg_sq"].any() for s in held[1].values())
    for number in (2, 3):
        step(number, mesh, model, optimizer)
    return {n: v.clone() for n, v in full_state_dict(model).items()}


@pytest.mark.slow
def test_load_on_another_mesh_and_strategy(tmp_path):
    first, *others = run_on_ranks(saves, 4, tmp_path, (2, 2), "fsdp", timeout=90)
    assert first["blocks.0.modes"].dtype == torch.complex128
    for world, shape, strategy in [(1, (1, 1), "fsdp"), (2, (1, 2), "fsdp"), (4, (2, 2), "ddp"), (4, (2, 2), "hsdp")]:
        for state in run_on_ranks(goes_on, world, tmp_path, shape, strategy, timeout=90):
            torch.testing.assert_close(state, first, rtol=1e-9, atol=1e-11)
    # and from one process to several
    alone = run_on_ranks(saves, 1, tmp_path / "one", (1, 1), "ddp")[0]
    torch.testing.assert_close(alone, first, rtol=1e-9, atol=1e-11)
    state = run_on_ranks(goes_on, 2, tmp_path / "one", (2, 1), "fsdp")[0]
    torch.testing.assert_close(state, first, rtol=1e-9, atol=1e-11)


def plain_state(folder):
    """Load a plain model's weights into a parallelized one and read them back unchanged."""
    plain = {n: v + 1 for n, v in seeded().state_dict().items()}
    for strategy in ("fsdp", "ddp"):
        _, model, _ = begin((1, 2), strategy)
        load_full_state_dict(model, plain)
        torch.testing.assert_close(full_state_dict(model), plain)
    seeded().load_state_dict(full_state_dict(model))


def test_state_of_a_plain_model(tmp_path):
    run_on_ranks(plain_state, 2, tmp_path)


def background(folder):
    """Check that a save snapshots the state, keeps the newest, and does not block on a slow disk."""
    write, threads = storage.CheckpointWriter.write_data, []

    def slowly(self, plan, planner):
        threads.append(threading.current_thread())
        time.sleep(2.0 if self.folder.name == "step-000001" else 0.0)
        return write(self, plan, planner)

    storage.CheckpointWriter.write_data = slowly
    try:
        model, kept = nn.Linear(2, 2), Checkpoints(folder, keep=2)
        for number in range(1, 5):
            with torch.no_grad():
                model.weight.fill_(number)
            begun = time.monotonic()
            kept.save(number, model)
            took = time.monotonic() - begun
            with torch.no_grad():
                model.weight.fill_(-1)
            if number == 1:
                assert took < 1.5, took
                assert not list(folder.glob("step-*[0-9]"))
        kept.wait()
    finally:
        storage.CheckpointWriter.write_data = write
    dist.barrier()
    assert list(kept.steps()) == [3, 4]
    for number, path in kept.steps().items():
        kept.load(path, model)
        assert (model.weight == number).all()
    assert len(set(threads)) == 1  # to start a thread blocks training for 5 ms
    del kept
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_background_saving(tmp_path):
    run_on_ranks(background, 2, tmp_path)


def interrupted(folder):
    """Check that a disk failure on one rank raises on all and keeps earlier checkpoints."""
    model, kept = nn.Linear(4, 4), Checkpoints(folder)
    kept.save(1, model)
    kept.wait()
    write = storage.tensor_bytes

    def full(tensor):
        if dist.get_rank() == 1 or dist.get_world_size() == 1:
            raise OSError(28, "No space left on device")
        return write(tensor)

    storage.tensor_bytes = full
    try:
        parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), domain=None)
        kept.save(2, model)
        with pytest.raises(CheckpointError, match="No space left on device"):
            kept.wait()
    finally:
        storage.tensor_bytes = write
    assert list(kept.steps()) == [1]
    kept.save(3, model)  # later saves work
    kept.wait()
    assert list(kept.steps()) == [1, 3] and not list(folder.glob("*.part"))


def test_full_disk(tmp_path):
    run_on_ranks(interrupted, 2, tmp_path)


def one_rank_fails(folder):
    """Check that an error on one rank before it writes or reads raises on all, and that later calls work."""
    model, kept, second = nn.Linear(2, 2), Checkpoints(folder), dist.get_rank() == 1
    with pytest.raises(CheckpointError, match=r"step 1: cannot be done\n  rank 1: scalars must be finite"):
        kept.save(1, model, scalars={"best": float("nan") if second else 0.5})
    with pytest.raises(CheckpointError, match=r"rank 1: AttributeError: '(str|NoneType)' object"):
        kept.save(1, model, extra={"mean": "a text" if second else torch.ones(2)})
    kept.save(1, model)
    kept.wait()
    with pytest.raises(CheckpointError, match=r"step-000001: cannot be done\n  rank 1: the checkpoint is of another"):
        kept.load(kept.latest(), nn.Linear(2, 3) if second else model)
    assert kept.load(kept.latest(), model) == {}


def test_error_of_one_rank(tmp_path):
    run_on_ranks(one_rank_fails, 2, tmp_path)


def test_error_that_rank_0_does_not_expect(tmp_path):
    run_on_ranks(unexpected, 2, tmp_path)


def unexpected(folder):
    with pytest.raises(CheckpointError, match="ZeroDivisionError: division by zero"):
        ask_first_rank(lambda: 1 / 0, Checkpoints(folder).group, CheckpointError)


END = """
import os, sys, time
from pathlib import Path
import torch.nn as nn
from shardfield.distributed import DistributedManager
from shardfield.train import CheckpointError, Checkpoints, storage

write = storage.CheckpointWriter.write_data

def slowly(self, plan, planner):
    time.sleep(0.5)
    if self.folder.name == "step-000002" and DistributedManager().rank == 1:
        raise OSError(28, "No space left on device")
    return write(self, plan, planner)

storage.CheckpointWriter.write_data = slowly
for step in (1, 2):
    DistributedManager.initialize()
    kept = Checkpoints(Path(sys.argv[1]), run_id="r")
    kept.save(step, nn.Linear(2, 2))
    if step == 1:
        if not os.fork():
            try:
                kept.save(5, nn.Linear(2, 2))
            except CheckpointError as error:
                print("child:", str(error).split(" of ")[0].split(": ")[1], flush=True)
            DistributedManager.cleanup()
            os._exit(0)
        os.wait()
        DistributedManager.cleanup()
        print(list(kept.steps()), flush=True)
"""


def test_end_of_a_program_that_does_not_wait(forks, tmp_path):
    """A save is complete after cleanup; a failed one is printed at exit; a forked process cannot save."""
    (tmp_path / "program.py").write_text(END)
    out = forks.run(tmp_path / "program.py", tmp_path, 2, str(tmp_path / "run"))
    assert out == ["child: Checkpoints\n[1]\n"] * 2
    for rank in range(2):
        err = (tmp_path / f"rank{rank}.err").read_text()
        assert "a checkpoint could not be written: rank 1: OSError: [Errno 28] No space left" in err, err


def refused(folder):
    kept = Checkpoints(folder)
    kept.save(1, nn.Linear(2, 3))
    kept.wait()
    path = kept.latest()

    def why(model=None):
        with pytest.raises(CheckpointError) as caught:
            kept.load(path, nn.Linear(2, 3) if model is None else model)
        return str(caught.value)

    results = [why(nn.Linear(2, 4)), why(nn.Linear(2, 3, bias=False)), why(nn.Sequential(nn.Linear(2, 3)))]
    data = next(path.glob("rank-*.bin"))
    bytes_ = data.read_bytes()
    data.write_bytes(bytes_[:-1])
    results.append(why())
    data.write_bytes(bytes_[:-1] + b"\0" if bytes_[-1] else bytes_[:-1] + b"\1")
    results.append(why())
    data.unlink()
    results.append(why())
    data.write_bytes(bytes_)
    index = path / "index.json"
    text = index.read_text()
    for broken in (text[: len(text) // 2], json.dumps({"format": "other"}), text.replace("rank-0.bin", "../x.bin")):
        index.write_text(broken)
        results.append(why())
    index.unlink()
    results.append(why())
    return str(path), results


def test_refused_checkpoints(tmp_path):
    ((path, results),) = run_on_ranks(refused, 1, tmp_path)
    assert all(t.startswith(path) for t in results), results
    expected = [
        "has model.bias of shape (3,), expected is (4,)",
        "has 1 tensors too many (model.bias",
        "lacks 2 tensors (model.0.bias",
        "truncated",
        "is not as it was saved",
        "is missing",
        "its checksum differs",
        "not in the format",
        "its checksum differs",
        "has no index.json",
    ]
    for text, part in zip(results, expected, strict=True):
        assert part in text, (part, text)


DTYPES = "float64 float16 bfloat16 int8 uint8 uint16 int64 bool complex64 complex128 float8_e4m3fn".split()


def assorted():
    """Return tensors of all kinds by name: dtypes, views, uneven, empty and merged shards, a deferred spectrum."""
    draw, mesh = torch.Generator().manual_seed(0), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    numbers = torch.rand(3, 5, generator=draw) * 9
    found = {name: numbers.to(getattr(torch, name)) for name in DTYPES}
    pairs = torch.randn(3, 4, dtype=torch.complex64, generator=draw)
    found |= {"conjugate": pairs.conj(), "negative": pairs.conj().imag, "transposed": numbers.t()}
    found |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "a/../odd name é": torch.ones(2)}
    full = torch.randn(7, 6, generator=draw)
    held = ShardTensor.from_local(full, mesh, [Replicate(), Replicate()], "chunk", (7, 6))
    found["uneven"] = held.redistribute(placements=[Shard(0), Shard(1)], sharding_shapes={0: [7, 0], 1: [5, 1]})
    found["merged"] = held.redistribute(placements=[Shard(0), Shard(1)]).flatten()
    found["spectrum"] = torch.fft.rfft(held.redistribute(placements=[Shard(0), Replicate()]), dim=0)
    found["dtensor"] = distribute_tensor(full, mesh, [Shard(1), Shard(0)])
    return found


def bits(tensor):
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.resolve_conj().resolve_neg()
    return bytes(storage.tensor_bytes(full))


def every_kind(folder):
    extra, kept = assorted(), Checkpoints(folder)
    kept.save(1, nn.Linear(1, 1), extra=extra)
    kept.wait()
    back = {name: torch.zeros_like(t.resolve_neg()) for name, t in extra.items()}
    kept.load(kept.latest(), nn.Linear(1, 1), extra=back)
    return [name for name in extra if bits(back[name]) != bits(extra[name])], len(extra)


def test_every_dtype_and_layout(tmp_path):
    assert run_on_ranks(every_kind, 4, tmp_path) == [([], 21)] * 4


def moved_between_saves(folder):
    """Check that a save describes anew what has moved since the last one, and nothing else."""
    mesh, kept = init_device_mesh("cpu", (2,)), Checkpoints(folder, keep=9)
    full, describe, described = torch.arange(15.0).reshape(5, 3), storage.Snapshot.write_items, []

    def noted(self, name):
        described.append(name)
        return describe(self, name)

    x = ShardTensor.from_local(full, mesh, [Replicate()], "chunk", (5, 3))
    rows, plain = x.redistribute(placements=[Shard(0)]), torch.ones(2)
    states = [
        {"x": rows, "plain": plain},
        {"x": rows + 1, "plain": plain + 1},
        {"x": rows.redistribute(sharding_shapes={0: [1, 4]}), "plain": plain},
        {"x": x.redistribute(placements=[Shard(1)]), "plain": torch.ones(3)},
        {"x": distribute_tensor(full, mesh, [Shard(1)]), "plain": plain.double()},
        {"x": distribute_tensor(full, mesh, [Shard(0)]), "plain": x},
    ]
    storage.Snapshot.write_items = noted
    try:
        for number, state in enumerate(states):
            kept.save(number, nn.Linear(1, 1), extra=state)
            kept.wait()
    finally:
        storage.Snapshot.write_items = describe
    found = [storage.read_checkpoint(path)[1] for path in kept.steps().values()]
    for state, held in zip(states, found, strict=True):
        for name, value in state.items():
            assert bits(held[f"extra.{name}"]) == bits(value), (name, held)
    assert [described.count(f"extra.{name}") for name in ("x", "plain")] == [5, 4], described


def test_what_has_moved_is_described_anew(tmp_path):
    run_on_ranks(moved_between_saves, 2, tmp_path)


def test_nothing_is_pickled():
    source = Path(storage.__file__).parent
    for path in source.glob("*.py"):
        assert "pickle" not in path.read_text().replace("no pickles", ""), path
