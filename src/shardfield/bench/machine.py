"""What a measurement was taken on: hardware and versions, and nothing else that would tell where."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PEERS = {"neuraloperator": "neuraloperator", "scipy": "scipy", "PhysicsNeMo": "nvidia-physicsnemo"}


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, how many programs want them now, memory, and devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cpu": _cpu(), "cores": cores, "memory_gb": _memory(), "gpu": None}
    found["load"] = round(os.getloadavg()[0], 1)
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": about.name,
            "count": torch.cuda.device_count(),
            "memory_gb": round(about.total_memory / 2**30),
        }
    return found


def label(machine: dict[str, Any], device: str) -> str:
    """A machine in a few words: its device, or its CPU."""
    if device != "cpu" and machine["gpu"]:
        return machine["gpu"]["name"].removeprefix("NVIDIA ")
    cpu = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@", " ", machine["cpu"])
    return f"{' '.join(cpu.split())}, {machine['cores']} cores"


def versions() -> dict[str, str]:
    """Of Python, torch, shardfield, and the peers that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name, package in {"shardfield": "shardfield", "numpy": "numpy", **PEERS}.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of the source that runs, "+" behind it where files of the package differ from it; None outside a repository."""
    here = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "tensor.py") is None:  # a repository of something else
        return None
    found = git("rev-parse", "--short=10", "HEAD")
    return f"{found}+" if found and git("status", "--porcelain", "--", ".") else found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M)
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _memory() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
