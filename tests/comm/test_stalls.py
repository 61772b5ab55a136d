"""Which rank did not take part in a message. The time-outs of real ranks are in tests/distributed."""

from __future__ import annotations

import json
import sys
import threading
import time

import torch
import torch.distributed as dist

from shardfield import runtime
from shardfield.comm import stalls
from shardfield.comm.stalls import PREFIX, StallMonitor, describe, where


def test_a_busy_device_is_reported_before_the_watchdog_aborts(capsys):
    """Check the path of an asynchronous backend: rank 1 answers from its line, rank 2 is stopped."""
    store = dist.HashStore()
    with runtime.fresh(messages=7):
        monitor = StallMonitor(store, 0, 3, 1.0, lambda: True)
        other = StallMonitor(store, 1, 3, 1.0)
        other.position = lambda: (6, "load at data.py:80")
        other.start()
        monitor.start()
        printed, end = "", time.monotonic() + 30
        while "no progress" not in printed and time.monotonic() < end:
            monitor.join(0.1)
            printed += capsys.readouterr().err
        monitor.join(1.0)  # it goes on, and does not repeat itself
        monitor.stop(), other.stop()
    printed += capsys.readouterr().err
    assert "shardfield, rank 0: no progress for" in printed and printed.count("no progress") == 1
    assert "rank 2 did not take part and did not answer: stopped, or unreachable" in printed
    assert "rank 1 did not take part: it is at load at data.py:80, 1 messages behind" in printed
    assert "test_stalls.py" in printed


def test_a_device_that_works_is_not_reported(capsys):
    with runtime.fresh(messages=7):
        monitor = StallMonitor(dist.HashStore(), 0, 2, 0.2, lambda: False)
        monitor.start()
        monitor.join(1.0)
        monitor.stop()
    assert not capsys.readouterr().err


def test_a_stopped_store_does_not_block_the_error():
    class Stopped:
        def add(self, key, amount):
            threading.Event().wait()

    with runtime.fresh(messages=3):
        monitor = StallMonitor(Stopped(), 1, 2, 0.1)
        monitor.period = 0.01
        assert "rank 0 did not take part, or its store of the world" in monitor.diagnose([0, 1])


def test_descriptions():
    here = (5, "mean at train.py:14")
    assert describe(5, 0, [0, 1, 2, 3], {0: here, 1: here, 3: here}).startswith(
        "rank 2 did not take part and did not answer"
    )
    assert describe(5, 0, [0, 1, 2], {0: here}).startswith("ranks 1, 2 did not take part")
    assert describe(5, 0, [0, 1], {0: here, 1: (8, "sum at train.py:20")}) == (
        "rank 1 is past this message: it is at sum at train.py:20, 3 messages ahead"
    )
    assert "all ranks took part (rank 1 at mean at train.py:14)" in describe(5, 0, [0, 1], {0: here, 1: here})
    many = describe(5, 0, range(100), {0: here})
    assert "1, 2, 3, 4, 5, 6, 7, 8, ..." in many and len(many) < 200


def test_an_answer_to_an_earlier_request_counts_only_for_the_same_message():
    store = dist.HashStore()
    with runtime.fresh(messages=9):
        monitor = StallMonitor(store, 0, 3, 1.0)
        store.set(f"{PREFIX}/1", json.dumps([0, 9, "cumsum at a.py:1"]))  # it took part, timed out and has ended
        store.set(f"{PREFIX}/2", json.dumps([0, 4, "cumsum at a.py:1"]))  # an answer of long ago
        assert set(monitor.request_positions([0, 1, 2], 0.3)) == {0, 1}


def test_only_a_time_out_is_explained():
    class Called:
        def add(self, key, amount):
            return 0

    with runtime.fresh(stalls=StallMonitor(Called(), 0, 2, 1.0)):
        assert stalls._cause(RuntimeError("shape mismatch"), None) is None
        assert stalls._cause(RuntimeError("Connection closed by peer [127.0.0.1]:3"), None) is None  # a rank has died


def test_where():
    assert where(sys._getframe()).startswith("test_where at test_stalls.py:")
    seen = []
    torch.utils._pytree.tree_map(lambda x: seen.append(where(sys._getframe())), [1])
    assert "at test_stalls.py:" in seen[0]
    assert where(None) == "an unknown line"
