"""How the processes of a world meet, and how those that are left learn whom they lost.

Rank 0 listens at the meeting point until all ranks have come, then tells them where the store is that torch's
process groups need. The connections stay open. They carry nothing while all is well, and since the kernel
closes them when a process ends, however it ends, rank 0 hears of every death at once and tells the others: no
heartbeat, no polling, one sleeping thread per process (two on rank 0).

torch would report such a death as a reset connection to some address, or after a time-out, or (NCCL) not at
all. Here every rank that is left prints which rank was lost, and ends within the time-out if it has not ended
by itself.
"""

import itertools
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..errors import WorldError
from .launch import Launch
from .wire import Wire, connect, listen

GREETING = {"shardfield": 1}
# Rank 0 holds the store, so it lets the others leave first; not for long, since they may have work left.
LINGER_SECONDS = 5.0
# A broken collective may be noticed before the death that broke it.
NEWS_SECONDS = 2.0

_meetings = itertools.count()


@dataclass(frozen=True)
class Peer:
    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Host(threading.Thread):
    """Rank 0's side: gathers the ranks, then tells each which others it lost."""

    def __init__(self, launch: Launch, me: Peer, server: socket.socket, own: Wire, store, timeout: float):
        super().__init__(name="shardfield-host", daemon=True)
        self.launch, self.me, self.server, self.timeout = launch, me, server, timeout
        self.store = store  # lives as long as somebody may ask it
        self.peers: dict[Wire, Peer] = {}
        self.own, self.own_left = own, threading.Event()
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)
        self._admit(own)

    def run(self) -> None:
        error = self._gather()
        self.selector.unregister(self.server)
        self.server.close()
        answer = {"error": error} if error else {"store": self.store.port, "host": vars(self.me)}
        for key in list(self.selector.get_map().values()):
            key.data.send(answer)
            if key.data not in self.peers:
                self._dismiss(key.data)
        while self.peers and not error:
            for key, _ in self.selector.select():
                self._hear(key.data)
        for key in list(self.selector.get_map().values()):
            key.data.close()
        self.selector.close()

    def _admit(self, wire: Wire) -> None:
        wire.sock.settimeout(5.0)
        wire.send(GREETING)
        self.selector.register(wire.sock, selectors.EVENT_READ, wire)

    def _dismiss(self, wire: Wire, message: dict | None = None) -> Peer | None:
        if message:
            wire.send(message)
        self.selector.unregister(wire.sock)
        wire.close()
        return self.peers.pop(wire, None)

    def _gather(self) -> str | None:
        """Wait until all ranks are there; says what went wrong if they never will be."""
        where, size = f"{self.launch.addr}:{self.launch.port}", self.launch.world_size
        deadline = time.monotonic() + self.timeout
        while len(self.peers) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = sorted(set(range(size)) - {p.rank for p in self.peers.values()})
                names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
                return (
                    f"{len(missing)} of {size} ranks did not come to {where} within {self.timeout:g} s: {names}. "
                    f"Were they started, and can their hosts reach {where}?"
                )
            for key, _ in self.selector.select(remaining):
                if key.fileobj is self.server:
                    self._admit(Wire(self.server.accept()[0]))
                elif error := self._greet(key.data):
                    return error
        return None

    def _greet(self, wire: Wire) -> str | None:
        """Hear one that has come; says what went wrong if the world can no longer form."""
        try:
            there = wire.fill()
        except (ValueError, TimeoutError):
            there = False
        for hello in wire.messages:
            if not hello.keys() >= {"job", "rank", "world_size", "pid", "host"}:
                there = False
            elif hello["job"] != self.launch.job:
                where = f"{self.launch.addr}:{self.launch.port}"
                self._dismiss(
                    wire, {"error": f"the port {where} is taken by another job; set MASTER_PORT to a free one"}
                )
                return None
            else:
                peer = Peer(hello["rank"], hello["pid"], hello["host"])
                if hello["world_size"] != self.launch.world_size:
                    return (
                        f"{peer} was told of a world of {hello['world_size']} processes, and rank 0 of one of "
                        f"{self.launch.world_size}"
                    )
                twin = next((p for p in self.peers.values() if p.rank == peer.rank), None)
                if twin:
                    places = [f"pid {p.pid} on {p.host}" for p in (twin, peer)]
                    return f"two processes have rank {peer.rank}: {' and '.join(places)}"
                self.peers[wire] = peer
        wire.messages.clear()
        if not there and (gone := self._dismiss(wire)):
            return f"{gone} ended while the others were still coming"
        return None

    def _hear(self, wire: Wire) -> None:
        """A rank says that it leaves, or is gone without a word: tell the others."""
        try:
            there = wire.fill()
        except (ValueError, TimeoutError):
            there = False
        if there and not wire.messages:
            return
        how = wire.messages[0].get("leave", "died") if wire.messages else "died"
        peer = self._dismiss(wire)
        for other in self.peers:
            other.send({"gone": vars(peer), "how": how})
        if wire is self.own:
            self.own_left.set()


class Member:
    """This process's place in its world, from the meeting until it leaves."""

    def __init__(self, launch: Launch, timeout: float):
        self.me = Peer(launch.rank, os.getpid(), socket.gethostname())
        self.timeout = timeout
        self.lost: dict[int, str] = {}  # in the order of the news: the first is the cause
        self.left: set[int] = set()
        self.failed = False
        self._host: Host | None = None
        self._done = threading.Event()
        self._news = threading.Event()
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
        port = int(agent.get(key)) if agent else launch.port
        return connect(launch.rank, launch.addr, port, GREETING, self.timeout)

    def _open_store(self, launch: Launch):
        """Say who this is, wait for the others, and connect to the store of the world that came about."""
        self._wire.send({"job": launch.job, "world_size": launch.world_size, **vars(self.me)})
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
        return _store_client(self._wire.sock.getpeername()[0], answer["store"], self.timeout)

    def _watch(self) -> None:
        """Sleep until rank 0 says that somebody is gone, or is gone itself."""
        while not self.lost:
            message = self._wire.receive()
            if self._done.is_set() or (message is None and 0 in self.left):
                return
            peer, how = (Peer(**message["gone"]), message["how"]) if message else (self._rank0, "died")
            if how == "left":
                self.left.add(peer.rank)
            else:
                self.lost[peer.rank] = f"{peer} {how}"
                self._say(f"{self.lost[peer.rank]}; this rank ends within {self.timeout:g} s")
                self._news.set()
        if not self._done.wait(self.timeout):
            self._say(f"ends now, {self.timeout:g} s after {next(iter(self.lost.values()))}")
            os._exit(1)

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
        """Part from the others, who are told how. The second call does nothing."""
        if not self.active():
            return
        self.failed = how != "left"
        self._done.set()
        self._wire.send({"leave": how})
        if self._host and how == "left":
            self._host.join(LINGER_SECONDS)
        elif self._host:
            # The others may be waiting for this rank in a collective: it must go, once they were told.
            self._host.own_left.wait(LINGER_SECONDS)
        self._wire.close()
        self._watcher.join(1.0)


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


def _from_torch_distributed(error: BaseException) -> bool:
    """Whether an error may be the echo of a rank that is gone. gloo raises a plain RuntimeError."""
    words = ("gloo", "nccl", "connection", "store", "process group")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)
    )
