"""One script under every launcher: python, torchrun on one and two hosts, mpirun, srun and sbatch."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, clean_env

SCRIPT = str(Path(__file__).with_name("world.py"))
PYTHON = [sys.executable, SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run(*command, env=None, code=0, limit=240, more=()):
    """Run commands concurrently; return the stdout of the first and the stderr of all."""
    jobs = [
        subprocess.Popen(
            [str(word) for word in words],
            cwd=ROOT,
            env=clean_env() | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for words in (command, *more)
    ]
    try:
        outputs = [job.communicate(timeout=limit) for job in jobs]
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for job in jobs:
                if job.poll() is None:
                    os.killpg(job.pid, number)
                    time.sleep(2)  # for launchers to end their processes
    err = "".join(e for _, e in outputs)
    for job, (out, _) in zip(jobs, outputs, strict=True):
        assert (job.returncode == 0) == (code == 0), f"{job.args}: exit {job.returncode}\n{out}\n{err}"
    return "".join(out for out, _ in outputs), err


def check(printed, method, size, local_ranks=None):
    """Check the ranks that printed, and that their sums and trained weight are those of the world."""
    said = sorted((json.loads(line) for line in printed.splitlines() if line.startswith("{")), key=lambda s: s["rank"])
    assert [s["rank"] for s in said] == list(range(size)), printed
    for s in said:
        assert (s["method"], s["world_size"], s["mesh"]) == (method, size, [size])
        assert s["total"] == size * (size + 1) / 2
        # Each rank's gradient is 3 rows of rank + 1; DDP takes their mean.
        assert s["weight"] == pytest.approx(0.5 - 3 * (size + 1) / 2)
    assert [s["local_rank"] for s in said] == (list(range(size)) if local_ranks is None else local_ranks)


def quiet(err):
    """Check that stderr has only messages of the launchers.

    torchrun's agents end one by one, and the last may find the first one's store gone: a warning with C++ frames.
    """
    theirs = re.compile(r"\[?W\d{4} |Exception raised from|frame #\d+:")
    lines = [line for line in err.splitlines() if not theirs.match(line)]
    ours = [line for line in lines if re.search(r"shardfield|Traceback|Error|Warning", line)]
    assert not ours, err


# One host.


def test_python():
    printed, err = run(*PYTHON)
    check(printed, "single", 1)
    assert err == ""


def test_torchrun():
    printed, err = run(*TORCHRUN, "--standalone", "--nproc-per-node=3", SCRIPT)
    check(printed, "env", 3)
    quiet(err)


def test_mpirun(mpirun):
    printed, err = run(*mpirun, "-np", 3, *PYTHON)
    check(printed, "openmpi", 3)
    assert err == ""


def test_srun(slurm):
    printed, err = run("srun", "-n", 3, *PYTHON, env=slurm.env)
    check(printed, "slurm", 3)
    quiet(err)


def batch(slurm, tmp_path, text, *options):
    """Run a batch script and return its output."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(f"#!/bin/bash\n{text}\n")
    run("sbatch", "--wait", "-n", 2, f"--output={out}", *options, script, env=slurm.env)
    return out.read_text()


def test_sbatch(slurm, tmp_path):
    check(batch(slurm, tmp_path, f"srun {sys.executable} {SCRIPT}"), "slurm", 2)


def test_batch_script_itself_is_one_process(slurm, tmp_path):
    # Not started by srun, it has no SLURM_LAUNCH_NODE_IPADDR and must not wait for a second task.
    printed = batch(slurm, tmp_path, f"env | grep -c LAUNCH_NODE; {sys.executable} {SCRIPT}")
    assert printed.startswith("0\n") and "sbatch reserved 2 tasks and started one process" in printed
    check(printed, "slurm", 1)


def test_other_launchers_in_a_batch_script(slurm, mpirun, tmp_path):
    # Their processes have the variables of the batch script too.
    check(batch(slurm, tmp_path, f"{' '.join(mpirun)} -np 2 {sys.executable} {SCRIPT}"), "openmpi", 2)
    check(batch(slurm, tmp_path, f"{' '.join(TORCHRUN)} --standalone --nproc-per-node=2 {SCRIPT}"), "env", 2)


def test_two_steps_at_once(slurm, tmp_path):
    # Each step has a port of its own.
    step = f"srun -n 1 --exact {sys.executable} {SCRIPT}"
    two = "srun -n 2 --overlap"
    printed = batch(slurm, tmp_path, f"{two} {sys.executable} {SCRIPT} > {tmp_path}/a & {step}; wait; cat {tmp_path}/a")
    assert printed.count('"world_size": 1') == 1 and printed.count('"world_size": 2') == 2, printed


def test_forced_method(mpirun):
    forced = {"SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD": "ENV"}
    _, err = run(*mpirun, "-np", 2, *PYTHON, env=forced, code=1)
    assert "env launch: none of its variables set" in err


# A rank that dies is named, and the others end.

DEATH = """
import os, signal, sys, time, torch, torch.distributed as dist
from shardfield.distributed import DistributedManager
DistributedManager.initialize()
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
dist.barrier()
"""


def test_rank_dies_under_srun(slurm):
    # srun does not end the other tasks.
    _, err = run("srun", "-n", 3, sys.executable, "-c", DEATH, env=slurm.env, code=1)
    for rank in (0, 2):
        assert re.search(rf"shardfield, rank {rank}: rank 1 \(pid \d+ on .*\) died", err), err


def test_rank_dies_under_mpirun(mpirun):
    # mpirun ends the others at once, perhaps before they can report, and names the rank.
    _, err = run(*mpirun, "-np", 3, sys.executable, "-c", DEATH, code=1)
    assert re.search(r"process rank 1 .* exited on signal 9", err), err


# Two hosts.


def torchrun_on(hosts, i, *options, hostname=None):
    rendezvous = ["--nnodes=2", "--nproc-per-node=2", *options]
    return hosts.on(i, *TORCHRUN, *rendezvous, SCRIPT, hostname=hostname)


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_on_two_hosts(hosts, kind):
    def command(i):
        if kind == "c10d":
            return torchrun_on(
                hosts, i, "--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint={hosts.names[0]}:29400"
            )
        return torchrun_on(hosts, i, f"--node-rank={i}", f"--master-addr={hosts.names[0]}", "--master-port=29400")

    printed, err = run(*command(0), more=[command(1)])
    check(printed, "env", 4, local_ranks=[0, 1, 0, 1])
    quiet(err)


def by_hand(hosts, i, hostname=None, variables=()):
    names = {"RANK": i, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": 29500}
    words = [f"{k}={v}" for k, v in names.items()]
    return hosts.on(i, "env", *words, *variables, *PYTHON, hostname=hostname)


def test_two_hosts_by_hand(hosts):
    printed, err = run(*by_hand(hosts, 0), more=[by_hand(hosts, 1)])
    check(printed, "env", 2, local_ranks=[0, 0])
    assert err == ""


def test_host_name_that_resolves_to_loopback(hosts):
    # As on many systems, where /etc/hosts maps the host name to 127.0.1.1: gloo alone would fail to connect.
    _, err = run(*by_hand(hosts, 0), more=[by_hand(hosts, 1, hostname="localhost")], code=1)
    says = r"gloo would offer rank 1 \(pid \d+ on localhost\) to the others at \S+, .* that has 10\.77\.0\.2"
    assert len(re.findall(says, err)) == 2, err
    variables = ["GLOO_SOCKET_IFNAME=eth0"]
    printed, _ = run(*by_hand(hosts, 0), more=[by_hand(hosts, 1, hostname="localhost", variables=variables)])
    check(printed, "env", 2, local_ranks=[0, 0])


def test_mpirun_on_two_hosts(hosts, mpirun, tmp_path):
    # Open MPI starts its daemons by a remote shell; here it enters the other namespace.
    shell = tmp_path / "shell"
    there = shlex.join(hosts.on(1, "sh", "-c"))
    shell.write_text(f'#!/bin/sh\nshift\nexec {there} "$*"\n')
    shell.chmod(0o755)
    places = ",".join(f"{name}:2" for name in hosts.names)
    options = ["--mca", "plm_rsh_agent", shell, "--mca", "oob_tcp_if_include", "eth0", "--host", places]
    printed, _ = run(*hosts.on(0, *(str(w) for w in [*mpirun, *options, "-np", 4, *PYTHON])))
    check(printed, "openmpi", 4, local_ranks=[0, 1, 0, 1])


def test_srun_on_two_hosts(hosts, slurm_on_two_hosts, tmp_path):
    cluster = slurm_on_two_hosts
    srun = ["srun", "-N", "2", "--ntasks-per-node=2", *PYTHON]
    printed, err = run(*cluster.on(0, *srun), env=cluster.env)
    check(printed, "slurm", 4, local_ranks=[0, 1, 0, 1])
    quiet(err)
    # Started on the second host, which is then the launch node; rank 0 is on the first.
    printed, _ = run(*cluster.on(1, *srun), env=cluster.env)
    check(printed, "slurm", 4, local_ranks=[0, 1, 0, 1])
