"""Describe the machine of a measurement: hardware and versions, without host names or paths."""

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
    """Return CPU, number of cores that this process may use, load average, memory, and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info: dict[str, Any] = {"cpu": _cpu(), "cores": cores, "memory_gb": _memory(), "gpu": None}
    info["load"] = round(os.getloadavg()[0], 1)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        info["gpu"] = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gb": round(properties.total_memory / 2**30),
        }
    return info


def label(machine: dict[str, Any], device: str) -> str:
    """Return a short name of a machine: its GPU, or its CPU and cores."""
    if device != "cpu" and machine["gpu"]:
        return machine["gpu"]["name"].removeprefix("NVIDIA ")
    cpu = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@", " ", machine["cpu"])
    return f"{' '.join(cpu.split())}, {machine['cores']} cores"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, shardfield, and the installed libraries it is compared with."""
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for name, package in {"shardfield": "shardfield", "numpy": "numpy", **PEERS}.items():
        try:
            installed[name] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def commit() -> str | None:
    """Return the commit of the running source, with "+" if the package has uncommitted changes; None outside git."""
    here = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str | None:
        try:
            process = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "layout.py") is None:  # installed inside another repository
        return None
    head = git("rev-parse", "--short=10", "HEAD")
    return f"{head}+" if head and git("status", "--porcelain", "--", ".") else head


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M)
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _memory() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
