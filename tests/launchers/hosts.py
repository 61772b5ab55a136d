"""Emulate hosts on one machine: network namespaces, each with its own name and address, on one bridge."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


class Hosts:
    """Run `count` hosts that reach each other by name and address, and nothing else."""

    def __init__(self, count: int):
        # Names that are unique on this machine.
        self.names = [f"sf{os.getpid()}n{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.switch = f"sf{os.getpid()}sw"

    def __enter__(self):
        self._remove_leftovers()
        self.etc = Path(tempfile.mkdtemp(prefix="shardfield-hosts-"))
        lines = [f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True)]
        (self.etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # Names come from the file alone: a DNS lookup would run into timeouts.
        (self.etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
                ip("netns", "add", name)
                ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{i}", "netns", self.switch)
                ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._remove([*self.names, self.switch])
        shutil.rmtree(self.etc, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove the hosts of runs that were killed."""
        names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split()
        ours = [(name, re.fullmatch(r"sf(\d+)(n\d+|sw)", name)) for name in names]
        self._remove([name for name, match in ours if match and not Path("/proc", match[1]).exists()])

    def _remove(self, names: list[str]) -> None:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)

    def on(self, i: int, *command: str, hostname: str | None = None) -> list[str]:
        """Return the command line that runs a command on host i under its host name."""
        # Not `ip netns exec`, which hides /sys/fs/cgroup, without which slurmd does not start.
        files = [f"mount --bind {self.etc}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
        setup = "; ".join(["set -e", *files, 'hostname "$0"', 'exec "$@"'])
        enter = ["nsenter", f"--net=/run/netns/{self.names[i]}", "unshare", "--mount", "--uts", "sh", "-c", setup]
        return [*enter, hostname or self.names[i], *command]
