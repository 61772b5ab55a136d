"""A process's place in its world: how it gets there, and what it does when another is lost.

torch would report the death of a rank as a reset connection to some address, or after a time-out, or (NCCL) not at
all. Here every rank that is left prints which rank was lost, and ends within the time-out if it has not ended by
itself.
"""

import ipaddress
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..errors import WorldError
from .launch import Launch
from .rendezvous import GREETING, Host, Peer
from .wire import Wire, connect, listen

# How long a rank that leaves waits for the others: not for long, since they may have work left.
LINGER_SECONDS = 5.0
# A broken collective may be noticed before the death that broke it.
NEWS_SECONDS = 2.0

_meetings = itertools.count()


class Member:
    """This process's place in its world, from the meeting until it leaves."""

    def __init__(self, launch: Launch, timeout: float, gloo: bool):
        loopback = _loopback_of_gloo() if gloo else ""
        self.me = Peer(launch.rank, os.getpid(), socket.gethostname(), loopback)
        self.timeout = timeout
        self.lost: dict[int, str] = {}  # in the order of the news: the first is the cause
        self.left: set[int] = set()
        self.failed = False
        self._host: Host | None = None
        self._done, self._ended, self._news = (threading.Event() for _ in range(3))
        self._wire = self._meet(launch)
        self.store = self._open_store(launch)
        self._watcher = threading.Thread(target=self._watch, name="shardfield-watch", daemon=True)
        self._watcher.start()
        _install_hook(self)

    def _meet(self, launch: Launch) -> Wire:
        """Come to the meeting point; rank 0 opens it."""
        meeting = next(_meetings)
        # torchrun's store holds addr:port, so the meeting point is any free port and the store passes it on.
        agent = key = None
        if launch.agent:
            agent, key = _store_client(launch.addr, launch.port, self.timeout), f"{launch.agent}/{meeting}"
        if launch.rank == 0:
            limit = timedelta(seconds=self.timeout)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            server = listen(launch.addr, 0 if agent else launch.port)
            if agent:
                agent.set(key, str(server.getsockname()[1]))
            near, far = (Wire(sock) for sock in socket.socketpair())
            self._host = Host(launch, self.me, server, far, store, self.timeout)
            self._host.start()
            near.receive()
            return near
        port = launch.port
        if agent:
            try:
                port = int(agent.get(key))
            except dist.DistError:
                raise WorldError(f"rank {launch.rank}: rank 0 opened no meeting point in {self.timeout:g} s") from None
        return connect(launch.rank, launch.addr, port, GREETING, self.timeout)

    def _open_store(self, launch: Launch):
        """Say who this is, wait for the others, and connect to the store of the world that came about."""
        self._wire.send({"job": launch.job, "world_size": launch.world_size, "peer": vars(self.me)})
        try:
            # The host gives up first, and says why.
            answer = self._wire.receive(self.timeout + 10.0)
        except TimeoutError:
            answer = None
        if answer is None:
            self._wire.close()
            raise WorldError(
                f"rank {self.me.rank}: rank 0 at {launch.addr}:{launch.port} ended while the ranks were still coming"
            )
        if "error" in answer:
            self._wire.close()
            raise WorldError(answer["error"])
        self._rank0 = Peer(**answer["host"])
        if self._host:
            return self._host.store
        return _store_client(self._wire.ends[1], answer["store"], self.timeout)

    def _watch(self) -> None:
        """Sleep until rank 0 says that somebody is gone, or is gone itself."""
        while not self.lost:
            message = self._wire.receive()
            if message is None and not (self._done.is_set() or 0 in self.left):
                peer, how = self._rank0, "died"
            elif message is None or "end" in message:
                break
            else:
                peer, how = Peer(**message["gone"]), message["how"]
            if how == "left":
                self.left.add(peer.rank)
            elif not self._done.is_set():
                self.lost[peer.rank] = f"{peer} {how}"
                self._say(f"{self.lost[peer.rank]}; this rank ends within {self.timeout:g} s")
                self._news.set()
        if self.lost and not self._done.wait(self.timeout):
            self._say(f"ends now, {self.timeout:g} s after {next(iter(self.lost.values()))}")
            os._exit(1)
        self._ended.set()

    def report(self, error: BaseException, show: Callable[[], object]) -> None:
        """Report the error that ends this rank: `show` it, say what is known of the cause, and tell the others."""
        echo = _from_torch_distributed(error)
        if echo:
            self._news.wait(NEWS_SECONDS)
        show()
        if self.left and echo:
            self._say(f"before the error above, these ranks had left the world: {sorted(self.left)}")
        if self.lost:
            self._say(f"the error above follows from this: {next(iter(self.lost.values()))}")
        text = str(error).strip().split("\n")[0][:200]
        self.leave(f"failed with {type(error).__name__}" + (f": {text}" if text else ""))

    def _say(self, text: str) -> None:
        sys.stderr.write(f"shardfield, rank {self.me.rank}: {text}\n")
        sys.stderr.flush()

    def active(self) -> bool:
        """Whether this process is in the world still. A forked child never is."""
        return not self._done.is_set() and os.getpid() == self.me.pid

    def leave(self, how: str = "left") -> None:
        """Tell the others that this rank leaves; a second call does nothing.

        It waits until they leave too, or for a moment: those that are behind may still be connecting to this rank,
        in a program that ends as soon as its groups are made. A rank that failed does not wait, since the others may
        be waiting for it in a collective.
        """
        if not self.active():
            return
        self.failed = how != "left"
        self._done.set()
        self._wire.send({"leave": how})
        if not self.failed:
            self._ended.wait(LINGER_SECONDS)
        elif self._host:
            self._host.own_told.wait(LINGER_SECONDS)

    def close(self) -> None:
        """Hang up, after the process group has ended. Rank 0 goes last: it holds the store."""
        if os.getpid() == self.me.pid:
            self._wire.close()
            self._watcher.join(1.0)
            if self._host and not self.failed:
                self._host.join(LINGER_SECONDS)


_members: list[Member] = []  # the one that is in a world, if any


def _install_hook(member: Member) -> None:
    """Have errors that end the process reported by its member. Once for good: others may hook in on top."""
    if not _members:
        show = sys.excepthook

        def hook(kind, error, trace):
            if _members[0].active():
                _members[0].report(error, lambda: show(kind, error, trace))
            else:
                show(kind, error, trace)

        sys.excepthook = hook
    _members[:] = [member]


def _store_client(addr: str, port: int, timeout: float):
    return dist.TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def _loopback_of_gloo() -> str:
    """The address at which gloo offers this process to others, if only this host has it.

    gloo takes what the name of the host stands for, which on many systems is 127.0.1.1.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    except OSError:
        address = "127.0.0.1"  # what gloo falls back to
    return str(address) if ipaddress.ip_address(address).is_loopback else ""


def _from_torch_distributed(error: BaseException) -> bool:
    """Whether an error may be the echo of a rank that is gone. gloo raises a plain RuntimeError."""
    words = ("gloo", "nccl", "connection", "store", "process group")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)
    )
