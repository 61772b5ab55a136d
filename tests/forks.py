"""Run many small programs without imports for each: one process imports torch, shardfield and others, then forks.

`Forks` starts this file as a process of its own. It reads one job per line from stdin, forks a process per rank with
the variables torchrun would set, and answers with their exit codes. Nothing has run in it but imports, so a forked
program starts as a new one would.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.launch import ROOT, clean_env

GRACE_SECONDS = 5.0  # before the other ranks are ended after one has failed


class ForkServer:
    """Start and drive the process that forks. Programs print into files; `run` returns what each rank printed."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_env(),
            text=True,
        )

    def run(self, program: Path, cwd: Path, ranks: int | None = None, *args: str, timeout: float = 120) -> list[str]:
        """Return the stdout of every rank; without `ranks`, of one process without a launcher's variables."""
        names = ["alone"] if ranks is None else [f"rank{r}" for r in range(ranks)]
        job = {"argv": [str(program), *args], "cwd": str(cwd), "ranks": ranks, "names": names, "timeout": timeout}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        out = [(cwd / f"{n}.out").read_text() for n in names]
        err = [(cwd / f"{n}.err").read_text() for n in names]
        message = "\n".join(f"{n}: exit {c}\n{o}{e}" for n, c, o, e in zip(names, codes, out, err, strict=True))
        assert not any(codes), f"{program.name} failed\n{message}"
        return out

    def close(self):
        self.process.communicate()  # closes its stdin, which ends it


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def become_rank(job: dict, rank: int, port: int) -> None:
    """Turn the forked process into the rank that a launcher would have started."""
    os.setsid()  # a group of its own, to be ended together with its children
    os.chdir(job["cwd"])
    if job["ranks"] is not None:
        size = str(job["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{job['names'][rank]}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    sys.argv = job["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def wait_for_exit(pids: list[int], timeout: float) -> list[int | None]:
    """Return the exit codes; None for a process that had to be ended."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in (p for p in pids if p not in codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
            elif time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    return [codes[p] for p in pids]


def main() -> str | None:
    """Answer jobs until stdin ends; in a fork, return the program to run."""
    import matplotlib.figure  # noqa: F401
    import neuralop  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401 - optimizers import it when they are made
    import torch.distributed.tensor  # noqa: F401
    import xarray  # noqa: F401
    import zarr  # noqa: F401

    import shardfield  # noqa: F401
    import shardfield.distributed  # noqa: F401
    import shardfield.train  # noqa: F401

    # Without freeze, garbage collection at the end of a fork touches these pages and copies all of them.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job, port, pids = json.loads(line), free_port(), []
        for rank in range(len(job["names"])):
            pid = os.fork()
            if not pid:
                become_rank(job, rank, port)
                return sys.argv[0]
            pids.append(pid)
        print(json.dumps(["not done" if c is None else c for c in wait_for_exit(pids, job["timeout"])]), flush=True)
    return None


if __name__ == "__main__":
    program = main()
    if program is not None:
        # Run at the end of this file, not in a nested call, so that the program ends with its exit handlers.
        runpy.run_path(program, run_name="__main__")
