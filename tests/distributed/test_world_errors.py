"""Worlds that cannot form or lose a rank: every rank raises a clear error and none hangs.

The ranks are processes with a launcher's variables, forked from a server that has imported torch, so that a world
costs no import.
"""

import atexit
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from shardfield import scatter_tensor
from shardfield.distributed import DistributedManager, membership, tcp
from shardfield.distributed.rendezvous import GREETING
from tests.launch import clean_env

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["shardfield.distributed", __name__])


def rank_main(program, args, env, path, size):
    """Run one rank: its environment, its output to a file, errors and exit code as the interpreter gives them."""
    os.environ.clear()
    os.environ.update(env)
    # On a busy machine a process may start long after the others: timeouts start here.
    path.with_suffix(".here").touch()
    while len(list(path.parent.glob("*.here"))) < size:
        time.sleep(0.01)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
    torch.set_num_threads(1)
    tcp.GREETING_SECONDS = 1.0  # before a silent connection is dropped
    membership.LINGER_SECONDS = 2.0  # before a rank stops waiting for the others' exit
    code = 0
    try:
        program(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)


@contextmanager
def listener(behave=None):
    """Occupy a port: silently, or calling `behave(connection)` for every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    behave(connection)

        if behave:
            threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def free_port():
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def run_world(tmp_path, program, *args, envs, limit=60.0):
    """Run a program once per environment within the limit; return each rank's exit code and output."""
    paths = [tmp_path / f"{i}.log" for i in range(len(envs))]
    ranks = [
        context.Process(target=rank_main, args=(program, args, clean_env() | env, path, len(envs)), daemon=True)
        for env, path in zip(envs, paths, strict=True)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + limit
    for rank in ranks:
        rank.join(max(end - time.monotonic(), 0))
    late = [i for i, rank in enumerate(ranks) if rank.exitcode is None]
    for rank in ranks:
        rank.kill()
        rank.join()
    texts = [path.read_text() if path.exists() else "" for path in paths]
    assert not late, f"{late} did not end within {limit} s\n" + "\n".join(texts)
    return [(rank.exitcode, text) for rank, text in zip(ranks, texts, strict=True)]


def launched(method, size, port, **more):
    """Return the environments that a launcher would set for a world of `size`."""
    names = {
        "env": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    }[method]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    return [meeting | dict(zip(names, (str(r), str(size), str(r)), strict=True)) | more for r in range(size)]


def error_of(result):
    """Return the last line of a rank that must have failed with our error."""
    code, text = result
    assert code == 1, text
    found = re.findall(r"WorldError: (.*)", text)
    assert found, text
    return found[-1]


def join():
    DistributedManager.initialize()
    x = torch.ones(1)
    dist.all_reduce(x)
    print(f"sum {x.item():g} as {DistributedManager()}")


@pytest.mark.parametrize("method", ["env", "slurm", "openmpi"])
def test_world_forms_and_exits_silently(tmp_path, method):
    results = run_world(tmp_path, join, envs=launched(method, 2, free_port()))
    assert results == [(0, f"sum 2 as process {r} of 2 on cpu, started by '{method}'\n") for r in range(2)]


# The rendezvous port belongs to another program.


@pytest.mark.parametrize("method", ["env", "slurm", "openmpi"])
def test_port_in_use(tmp_path, method):
    with listener() as port:
        begin = time.monotonic()
        first, *others = run_world(tmp_path, join, envs=launched(method, 3, port))
        assert time.monotonic() - begin < 20
    assert f"rank 0 cannot listen at localhost:{port}: the port is taken" in error_of(first)
    for rank, other in enumerate(others, 1):
        assert (
            f"rank {rank}: the port localhost:{port} is taken by another program, which sends no greeting"
            in error_of(other)
        )


@pytest.mark.parametrize(
    "behave, says",
    [
        (lambda c: c.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n"), "sends another greeting"),
        (lambda c: c.sendall(b'{"shardfield": 99}\n'), "sends another greeting"),
        (lambda c: c.sendall(b"[]\n"), "sends another greeting"),
        (lambda c: None, "closes the connection"),
    ],
    ids=["http", "other version", "other json", "closes the connection"],
)
def test_foreign_program_at_the_port(tmp_path, behave, says):
    with listener(behave) as port:
        (result,) = run_world(tmp_path, join, envs=launched("env", 2, port)[1:])
    assert f"the port localhost:{port} is taken by another program, which {says}" in error_of(result)


# Ranks that are missing, duplicated or of another job.


def test_missing_ranks(tmp_path):
    envs = launched("env", 4, free_port(), SHARDFIELD_TIMEOUT="2")
    for result in run_world(tmp_path, join, envs=[envs[0], envs[2]]):
        assert re.match(r"2 of 4 ranks did not connect to localhost:\d+ within 2 s: 1, 3\.", error_of(result))


def test_missing_rank_0(tmp_path):
    port = free_port()
    envs = launched("env", 3, port, SHARDFIELD_TIMEOUT="1.5")
    for rank, result in enumerate(run_world(tmp_path, join, envs=envs[1:]), 1):
        assert f"rank {rank} could not connect to rank 0 at localhost:{port} in 1.5 s" in error_of(result)


def test_duplicate_rank(tmp_path):
    envs = launched("env", 3, free_port())
    for result in run_world(tmp_path, join, envs=[envs[0], envs[1], envs[1]]):
        assert re.match(r"two processes have rank 1: pid \d+ on \S+ and pid \d+ on \S+", error_of(result))


def test_ranks_with_different_world_sizes(tmp_path):
    port = free_port()
    envs = [launched("env", 3, port)[0], launched("env", 2, port)[1]]
    for result in run_world(tmp_path, join, envs=envs):
        assert re.match(r"rank 1 \(pid .*\) has a world size of 2, and rank 0 of 3", error_of(result))


def test_two_jobs_at_one_port(tmp_path):
    port = free_port()
    one = launched("slurm", 2, port, SLURM_JOB_ID="1")
    stray = launched("slurm", 2, port, SLURM_JOB_ID="2")[1]
    # The second job's rank 0 cannot listen; its rank 1 must not join the first job's world.
    *first_job, result = run_world(tmp_path, join_late, envs=[*one, stray])
    assert f"the port localhost:{port} is taken by another job" in error_of(result)
    assert [code for code, _ in first_job] == [0, 0], first_job


def join_late():
    if os.environ["SLURM_JOB_ID"] == "1" and os.environ["SLURM_PROCID"] == "1":
        time.sleep(2)  # the world of job 1 is still forming when the other job connects
    join()


def end_while_others_come():
    if os.environ["RANK"] == "1":
        # Connects as a rank does, and dies before the world has formed.
        rank_0 = tcp.connect(1, "localhost", int(os.environ["MASTER_PORT"]), GREETING, 10)
        rank_0.send({"job": "", "world_size": 3, "peer": {"rank": 1, "pid": os.getpid(), "host": "here"}})
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    join()


def test_rank_dies_while_the_world_forms(tmp_path):
    envs = launched("env", 3, free_port())
    (result,) = run_world(tmp_path, end_while_others_come, envs=envs[:2])[:1]
    assert re.match(r"rank 1 \(pid \d+ on here\) ended while other ranks were still connecting", error_of(result))


# Worlds that lose a rank.


def lose(how, victim):
    DistributedManager.initialize()
    dm = DistributedManager()
    dist.barrier()
    if dm.rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("bad sample 17")
        elif how == "leaves":
            return
    if how == "killed while the others work":
        if dm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(120)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how, what", [("killed", "died"), ("raises", "failed with ValueError: bad sample 17")])
def test_lost_rank_is_named(tmp_path, how, what, victim):
    results = run_world(tmp_path, lose, how, victim, envs=launched("env", 3, free_port()))
    assert results[victim][0] == (-signal.SIGKILL if how == "killed" else 1)
    for rank in {0, 1, 2} - {victim}:
        code, text = results[rank]
        assert code == 1
        named = rf"shardfield, rank {rank}: rank {victim} \(pid \d+ on {re.escape(socket.gethostname())}\) {what}"
        assert re.search(named, text), text
        assert re.search(rf"the error above follows from this: rank {victim} .* {what}", text), text


def test_others_exit_within_the_timeout(tmp_path):
    envs = launched("env", 3, free_port(), SHARDFIELD_TIMEOUT="2")
    results = run_world(tmp_path, lose, "killed while the others work", 1, envs=envs)
    for rank in (0, 2):
        code, text = results[rank]
        assert code == 1 and re.search(rf"rank {rank}: ends now, 2 s after rank 1 \(pid \d+ on .*\) died", text), text


def test_rank_that_left_early_is_named(tmp_path):
    results = run_world(tmp_path, lose, "leaves", 1, envs=launched("env", 3, free_port()))
    assert results[1] == (0, "")
    for rank in (0, 2):
        code, text = results[rank]
        assert code == 1 and "before the error above, these ranks had left the world: [1]" in text, text


def fork_a_child(log_of_rank_0):
    """Fork a child that outlives its parent, as a data loader's worker may; it must not hide the parent's death."""
    DistributedManager.initialize()
    dist.barrier()
    if DistributedManager().rank == 1:
        if os.fork() == 0:
            end = time.monotonic() + 60
            while "died" not in log_of_rank_0.read_text() and time.monotonic() < end:
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def test_forked_child_does_not_hide_a_death(tmp_path):
    envs = launched("env", 2, free_port(), SHARDFIELD_TIMEOUT="2")
    results = run_world(tmp_path, fork_a_child, tmp_path / "0.log", envs=envs, limit=50)
    assert re.search(r"rank 1 \(pid \d+ on .*\) died", results[0][1])


def wait_for_sleepers():
    DistributedManager.initialize()
    dm = DistributedManager()
    dm.initialize_mesh((2, 2), ("data", "domain"))
    dm.create_process_subgroup("pair", 2)
    for group in (dm.mesh("domain").get_group(), dm.group("pair")):
        if dm.rank == 0:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
                dist.all_reduce(torch.ones(1), group=group)
            assert time.monotonic() - begin < 60  # torch's own limit is half an hour
    time.sleep(0 if dm.rank == 0 else 5)


def test_timeout_holds_for_every_group(tmp_path):
    envs = launched("env", 4, free_port(), SHARDFIELD_TIMEOUT="2")
    assert [code for code, _ in run_world(tmp_path, wait_for_sleepers, envs=envs)] == [0] * 4


# Worlds in which a rank does not come to a message.


def stall(how, victim):
    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), mesh_dim_names=["domain"])
    x = scatter_tensor(torch.arange(12.0).reshape(6, 2), 0, mesh, (Shard(0),))
    for step in range(4):
        x = x.roll(1, 0)
        if step == 2 and dm.rank == victim:
            if how == "stopped":
                subprocess.Popen(["sh", "-c", f"sleep 13; kill -9 {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        x.cumsum(0)


@pytest.mark.parametrize("how, victim", [("stopped", 2), ("slow", 1)])
def test_the_rank_that_did_not_come_is_named(tmp_path, how, victim):
    results = run_world(tmp_path, stall, how, victim, envs=launched("env", 3, free_port(), SHARDFIELD_TIMEOUT="5"))
    for rank in {0, 1, 2} - {victim}:
        error = error_of(results[rank])
        assert re.match(rf"cumsum at test_world_errors\.py:\d+: rank {victim} did not take part", error), error
        if how == "slow":
            assert re.search(r"it is at stall at test_world_errors\.py:\d+, 1 messages behind", error), error
        assert "The limit is 5 s" in error
