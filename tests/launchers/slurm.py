"""Run a SLURM cluster for a test: munged, slurmctld and a slurmd per host, in a temporary folder."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.launchers.hosts import Hosts

CONFIG = """
ClusterName=shardfield
SlurmctldHost={controller}
SlurmctldPort={port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """Run a cluster on this machine, or on `hosts` with the controller on the first, where `on(0, ...)` runs."""

    def __init__(self, hosts: Hosts | None = None):
        self.hosts = hosts
        self.names = hosts.names if hosts else [socket.gethostname().split(".")[0]]
        self.addresses = hosts.addresses if hosts else ["127.0.0.1"]
        self.folder = Path(tempfile.mkdtemp(prefix="shardfield-slurm-"))
        self.daemons: list[subprocess.Popen] = []

    def on(self, i: int, *command: str) -> list[str]:
        return self.hosts.on(i, *command) if self.hosts else list(command)

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        nodes = [
            f"NodeName={n} NodeAddr={a} CPUs=4 State=UNKNOWN" for n, a in zip(self.names, self.addresses, strict=True)
        ]
        ports = _free_ports(2)
        controller = f"{self.names[0]}({self.addresses[0]})"
        text = CONFIG.format(
            folder=self.folder, nodes="\n".join(nodes), controller=controller, port=ports[0], slurmd_port=ports[1]
        )
        (self.folder / "slurm.conf").write_text(text)
        files = {n: f"--{n}-file={self.folder}/munge.{n}" for n in ("key", "pid", "log", "seed")}
        # --force: the folder belongs to root and not to the user munge.
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files.values())
        _wait(lambda: (self.folder / "munge.socket").exists(), "munged does not start", self.folder / "munge.log")
        self._daemon(*self.on(0, "slurmctld", "-D"))
        for i in range(len(self.names)):
            self._daemon(*self.on(i, "slurmd", "-D", "-N", self.names[i]))
        _wait(
            self._idle,
            "the nodes do not come up",
            self.folder / "slurmctld.log",
            self.folder / f"slurmd.{self.names[-1]}.log",
        )

    def _daemon(self, *command: str) -> None:
        # The daemons end with the test run, also if that is killed.
        bound = ["setpriv", "--pdeathsig", "TERM", *command]
        with open(self.folder / "daemons.log", "a") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            # In separate sessions: after a signal to the test run they must still end their jobs.
            self.daemons.append(subprocess.Popen(bound, env=os.environ | self.env, start_new_session=True, **streams))

    def _idle(self) -> bool:
        command = self.on(0, "sinfo", "--noheader", "--format=%T %D")
        seen = subprocess.run(command, env=os.environ | self.env, capture_output=True, text=True).stdout
        return seen.strip() == f"idle {len(self.names)}"

    def _jobs(self) -> str:
        command = self.on(0, "squeue", "--noheader")
        return subprocess.run(command, env=os.environ | self.env, capture_output=True, text=True).stdout

    def __exit__(self, *_):
        if len(self.daemons) > 1 and self._jobs():
            # Cancel jobs of a failed test: their processes would outlive the daemons.
            subprocess.run(self.on(0, "scancel", "--user=root", "--full"), env=os.environ | self.env)
            _wait(lambda: not self._jobs(), "jobs do not end")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def _wait(ready, problem: str, *logs: Path, limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not ready():
        if time.monotonic() > end:
            tails = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs if log.exists()]
            raise AssertionError("\n".join([problem, *tails]))
        time.sleep(0.2)
