"""Memory of tensors that are moved out is neither read nor written after it was released."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from shardfield.errors import ShardfieldError
from shardfield.virtual import VirtualWorld, paging
from shardfield.virtual.page_store import IN_BACKGROUND, FileStore
from shardfield.virtual.paging import Pager


@torch.library.custom_op("shardfield_tests::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    total = x * 2
    dist.all_reduce(total)
    return total + x


def waits_inside_an_operator():
    x = torch.arange(5000.0) + dist.get_rank()
    found = sum_over_ranks(x)
    expected = 2 * (2 * torch.arange(5000.0) + 1) + x
    return torch.equal(found, expected)


@pytest.mark.parametrize("options", [{"memory": "auto", "budget": 0}, {"memory": "offload"}], ids=["auto", "offload"])
def test_an_operator_in_python_that_waits_keeps_its_operands(options):
    """The operators inside are not seen, so its operands and what it makes must stay in memory."""
    with VirtualWorld(2, **options) as world:
        world.pager.minimum = 1
        assert world.run(waits_inside_an_operator) == [True, True]


def test_tensors_that_end_while_pages_are_chosen():
    """The garbage collector may end tensors in cycles between any two instructions."""
    pager = Pager(minimum=1)
    kept = []
    for i in range(20):
        tensor = torch.full((100,), float(i))
        pager.add([tensor], 0)
        if i % 2:
            cycle = [tensor]
            cycle.append(cycle)
        else:
            kept.append(tensor)
    del tensor, cycle
    seen = []

    def wanted(page):
        if len(seen) == 5:
            gc.collect()
        seen.append(page)
        return True

    pager._move_out(pager.held, set(), wanted)
    assert pager.held == 0 and pager.away == 10 * 400
    pager.restore_all()
    assert [float(t.mean()) for t in kept] == [float(i) for i in range(0, 20, 2)]
    pager.close()


def make(tensors):
    tensors += [torch.full((10_000,), float(i)) for i in range(10)]


def test_an_interrupt_while_tensors_come_back(monkeypatch):
    """Tensors have their values, and the interrupt is raised once they do."""
    tensors, read, sent = [], os.preadv, []

    def interrupt_and_read(*args):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
            time.sleep(0.05)
        return read(*args)

    monkeypatch.setattr("os.preadv", interrupt_and_read)
    with VirtualWorld(1, memory="auto", budget=100_000) as world:
        world.pager.minimum = 1
        with pytest.raises(KeyboardInterrupt):
            world.run(make, tensors)
        assert world.run(lambda: float(tensors[0].sum() + 1)) == [1.0]
    assert sent and [(float(t.min()), float(t.max())) for t in tensors] == [(float(i), float(i)) for i in range(10)]


def test_a_page_that_cannot_be_read_leaves_the_others_in_memory(monkeypatch):
    tensors, read, failed = [], os.preadv, []

    def fail_once(*args):
        if not failed:
            failed.append(True)
            raise OSError(5, "Input/output error")
        return read(*args)

    monkeypatch.setattr("os.preadv", fail_once)
    with VirtualWorld(1, memory="auto", budget=100_000) as world:
        world.pager.minimum = 1
        with pytest.raises(ShardfieldError, match="40000 bytes cannot be written to disk or read from it"):
            world.run(make, tensors)
    assert sum(float(t.min()) == float(t.max()) == i for i, t in enumerate(tensors)) >= 9


def test_a_copy_keeps_the_memory_that_it_reads():
    store, go = FileStore(None), threading.Event()
    store._thread.submit(go.wait, 10)
    storage = torch.ones(IN_BACKGROUND, dtype=torch.uint8).untyped_storage()
    alive = weakref.ref(storage)
    _, transfer = store.write(storage)
    del storage
    assert alive() is not None and not transfer.done()
    go.set()
    transfer.wait()
    store.close()


def test_memory_that_is_not_enough(monkeypatch):
    """A page that finds no memory makes others leave; at the end of a run, where none may leave, it is an error."""
    pager, refused, resize = Pager(minimum=1), [], paging._resize

    def refuse(storage, nbytes):
        if nbytes and refused:
            raise refused.pop()
        return resize(storage, nbytes)

    monkeypatch.setattr(paging, "_resize", refuse)
    tensors = [torch.full((100,), float(i)) for i in range(5)]
    pager.add(tensors, 0)
    pager._move_out(400, set(), lambda page: True)
    refused.append(RuntimeError("can't allocate memory"))
    pager.use(tensors[:1])
    assert float(tensors[0].mean()) == 0 and pager.away == 4 * 400
    refused.append(RuntimeError("can't allocate memory"))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pager.restore_all()
    assert pager.away == 400 and [float(t.mean()) for t in tensors[2:]] == [2.0, 3.0, 4.0]
    pager.restore_all()
    assert pager.away == 0 and float(tensors[1].mean()) == 1
    pager.close()


class Numbers(Dataset):
    """A dataset in memory, which its loader's worker reads while the parent goes on."""

    def __init__(self):
        self.rows = [torch.full((1000,), float(i)) for i in range(10)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        time.sleep(0.02)
        return self.rows[at].clone()


def workers_read_later():
    data, right = Numbers(), 0
    for i, row in enumerate(DataLoader(data, batch_size=None, num_workers=1)):
        for mine in data.rows:
            mine.add_(0)  # comes in: its place in the file is free
        others = [torch.full((1000,), -1.0) for _ in range(20)]
        right += float(row.min()) == float(row.max()) == i
        del others
    return right


def test_a_forked_process_reads_what_was_there_at_the_fork():
    with VirtualWorld(1, memory="auto", budget=8000) as world:
        world.pager.minimum = 1
        assert world.run(workers_read_later) == [10]
