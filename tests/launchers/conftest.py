"""Fixtures of real launchers: installed when absent, started for the tests, stopped afterwards.

They need root on a Debian system, and use a temporary folder and separate network namespaces.
"""

import os
import shutil
import signal
import subprocess

import pytest

from tests.launchers.hosts import Hosts
from tests.launchers.slurm import Slurm


def end_in_order(*_) -> None:
    """End child processes on SIGTERM, as on an interrupt."""
    pytest.exit("terminated", returncode=143)


signal.signal(signal.SIGTERM, end_in_order)


def need(program: str, *packages: str) -> None:
    """Install missing packages."""
    if shutil.which(program):
        return
    assert os.geteuid() == 0, f"{program} is not installed, and only root can install it"
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)
    subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], **quiet)
    assert shutil.which(program), f"{packages} installed, and no {program}"


@pytest.fixture(scope="session")
def mpirun():
    """Return the start of an mpirun command line."""
    need("mpirun", "openmpi-bin")
    return ["mpirun", "--allow-run-as-root", "--oversubscribe"]


@pytest.fixture(scope="session")
def hosts():
    """Start two hosts with a network between them."""
    need("ip", "iproute2")
    with Hosts(2) as pair:
        yield pair


@pytest.fixture(scope="session")
def slurm():
    """Start a SLURM cluster of this machine alone."""
    need("slurmctld", "slurmctld", "slurmd", "slurm-client", "munge")
    with Slurm() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_on_two_hosts(hosts):
    """Start a SLURM cluster of two hosts, with its controller on the first."""
    need("slurmctld", "slurmctld", "slurmd", "slurm-client", "munge")
    with Slurm(hosts) as cluster:
        yield cluster
