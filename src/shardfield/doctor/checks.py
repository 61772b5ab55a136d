"""What one process can check without messages: versions, launcher, devices, limits, the address of the rendezvous."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from .. import native
from ..distributed.launch import Launch, detect
from ..errors import WorldError

PYTHONS = (3, 11), (3, 13)  # the oldest and the newest version that are tested
TORCHES = (2, 11), (2, 15)
MIN_FILES = 1024  # open files of a process; one rank has a connection to every other rank of each process group
MIN_SHARED = 1 << 30  # bytes of /dev/shm, through which NCCL connects the GPUs of a host
NVIDIA = Path("/proc/driver/nvidia/version")  # exists where the kernel has NVIDIA's driver

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """The outcome of one check. `mend` says what to do; it is empty if nothing is wrong."""

    name: str
    level: Level
    text: str
    mend: str = ""


class Process(NamedTuple):
    """What the checks read of this process, as a value: tests make their own."""

    env: Mapping[str, str]
    python: str
    torch: str
    cuda_build: bool
    driver: bool  # the kernel has NVIDIA's driver
    devices: int
    nccl: str | None
    gloo: bool
    threads: int
    cores: int
    files: int  # soft limit of open files
    files_max: int  # hard limit
    shared: int | None  # free bytes of /dev/shm
    leaves: str  # which leaf functions run


def this_process() -> Process:
    """Return what the checks read of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 62
    return Process(
        env=dict(os.environ),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_build=torch.version.cuda is not None,
        driver=NVIDIA.exists(),
        devices=torch.cuda.device_count(),
        nccl=nccl_version(),
        gloo=dist.is_gloo_available(),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        files=soft if soft != resource.RLIM_INFINITY else unlimited,
        files_max=hard if hard != resource.RLIM_INFINITY else unlimited,
        shared=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None,
        leaves=native.state(),
    )


def nccl_version() -> str | None:
    """Return the version of NCCL, or None if torch has none."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def check_process(process: Process) -> tuple[list[Finding], Launch | None]:
    """Return the findings of this process, and its launch if its launcher's variables are complete."""
    findings = [
        _version("python", process.python, PYTHONS, f"install Python {_dotted(PYTHONS[0])} to {_dotted(PYTHONS[1])}"),
        _version("torch", process.torch, TORCHES, f"install torch {_dotted(TORCHES[0])} to {_dotted(TORCHES[1])}"),
    ]
    findings.append(Finding("native", "ok", f"leaf functions {process.leaves}"))
    launch, found = _launcher(process.env)
    findings += [*found, *_backend(process), *_devices(process, launch), _files(process, launch)]
    if launch is not None and launch.world_size > 1:
        findings.append(_address(launch))
    return findings, launch


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _version(name: str, found: str, tested: tuple[tuple[int, int], tuple[int, int]], mend: str) -> Finding:
    oldest, newest = tested
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if release < oldest:
        return Finding(name, "problem", f"{found} is older than {_dotted(oldest)}", mend)
    if release > newest:
        return Finding(name, "warning", f"{found} is newer than {_dotted(newest)}, the newest that is tested", mend)
    return Finding(name, "ok", found)


def _launcher(env: Mapping[str, str]) -> tuple[Launch | None, Iterator[Finding] | list[Finding]]:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launch = detect(env)
    except WorldError as error:
        text, _, mend = str(error).partition(". ")
        return None, [Finding("launcher", "problem", text, mend or "start the program with torchrun, srun or mpirun")]
    for warning in caught:  # a batch script without srun
        text, _, mend = str(warning.message).partition("; ")
        return launch, [Finding("launcher", "problem", text, mend)]
    names = {"env": "torchrun, or variables set by hand", "slurm": "srun", "openmpi": "mpirun", "single": "none"}
    if launch.method == "single":
        text = "none: one process. Links between ranks are measured under one, for example torchrun --nproc-per-node 2"
        return launch, [Finding("launcher", "ok", text)]
    return launch, [Finding("launcher", "ok", f"{names[launch.method]}: {launch.world_size} ranks")]


def _backend(process: Process) -> Iterator[Finding]:
    if not process.gloo:
        mend = "install a build of torch with gloo: ranks on CPUs need it"
        yield Finding("gloo", "warning" if process.nccl else "problem", "this build of torch has no gloo", mend)
    else:
        yield Finding("gloo", "ok", "available")
    if process.devices and process.nccl is None:
        mend = "install a build of torch with NCCL; until then messages between GPUs are staged through host memory"
        yield Finding("nccl", "problem", f"{process.devices} GPUs, and this build of torch has no NCCL", mend)
    else:
        yield Finding("nccl", "ok", process.nccl or "not needed: no GPU")
    if process.devices and process.shared is not None and process.shared < MIN_SHARED:
        text = f"/dev/shm has {process.shared >> 20} MiB left; NCCL connects the GPUs of a host through it"
        yield Finding("shared memory", "warning", text, "start the container with --shm-size=8g, or --ipc=host")


def _devices(process: Process, launch: Launch | None) -> Iterator[Finding]:
    here = local_ranks(process.env, launch)
    if process.driver and not process.devices:
        if not process.cuda_build:
            yield Finding(
                "devices",
                "problem",
                f"this machine has an NVIDIA driver, and torch {process.torch} has no CUDA",
                "install torch's CUDA build",
            )
        else:
            hidden = process.env.get("CUDA_VISIBLE_DEVICES")
            text = "this machine has an NVIDIA driver, and torch sees no GPU"
            mend = f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it" if hidden is not None else "check nvidia-smi"
            yield Finding("devices", "problem", text, mend)
    elif process.devices > 1 and here > process.devices:
        text = f"{here} ranks on this host share {process.devices} GPUs"
        yield Finding("devices", "problem", text, f"start {process.devices} ranks on a host: one for each GPU")
    elif process.devices > 1 and here == 1 and launch is not None and launch.world_size == 1:
        text = f"{process.devices} GPUs, and one process uses one of them"
        yield Finding("devices", "warning", text, f"torchrun --standalone --nproc-per-node {process.devices} ...")
    else:
        yield Finding("devices", "ok", f"{process.devices} GPUs" if process.devices else "no GPU: ranks use the CPU")


def local_ranks(env: Mapping[str, str], launch: Launch | None) -> int:
    """Return the number of ranks on this host, as far as the launcher says."""
    names = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    found = next((env[n] for n in names if env.get(n, "").isdigit()), None)
    return int(found) if found and launch is not None and launch.world_size > 1 else 1


def _files(process: Process, launch: Launch | None) -> Finding:
    # A connection to each rank, in the groups of a mesh of some axes, beside files of data and libraries.
    needed = max(MIN_FILES, 256 + 4 * (launch.world_size if launch else 1))
    if process.files >= needed:
        return Finding("open files", "ok", f"limit {_limit(process.files)}")
    text = f"limit {process.files}, and {needed} are advised"
    if process.files_max >= needed:
        return Finding("open files", "warning", text, f"ulimit -n {min(process.files_max, 65536)}, in every job script")
    return Finding("open files", "warning", text, "raise the hard limit (limits.conf, or LimitNOFILE of the service)")


def _limit(files: int) -> str:
    return str(files) if files < 1 << 40 else "none"


def _address(launch: Launch) -> Finding:
    """Check that this host can resolve the address at which rank 0 listens."""
    where = f"{launch.addr}:{launch.port}"
    try:
        found: Any = socket.getaddrinfo(launch.addr, launch.port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"{where}: this host cannot resolve {launch.addr!r} ({error.strerror or error})"
        return Finding("rendezvous", "problem", text, "set MASTER_ADDR to the address of rank 0's host, on all ranks")
    addresses = sorted({entry[4][0] for entry in found})
    return Finding("rendezvous", "ok", f"{where} ({', '.join(addresses)})" if addresses != [launch.addr] else where)
