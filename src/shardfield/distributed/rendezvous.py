"""Rank 0's side of a world: it waits for all ranks to come, and tells those that are left whom they lost.

Rank 0 listens at the meeting point until all ranks have come, then tells them where the store is that torch's
process groups need. The connections stay open. They carry nothing while all is well, and since the kernel
closes them when a process ends, however it ends, rank 0 hears of every death at once and tells the others: no
heartbeat, no polling, one sleeping thread per process (two on rank 0).
"""

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from .launch import Launch
from .wire import Wire

GREETING = {"shardfield": 1}


@dataclass(frozen=True)
class Peer:
    """A process of the world. `loopback` is set where gloo would offer it at an address that only its host has."""

    rank: int
    pid: int
    host: str
    loopback: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Host(threading.Thread):
    """Rank 0's side: gathers the ranks, then tells each which others it lost."""

    def __init__(self, launch: Launch, me: Peer, server: socket.socket, own: Wire, store, timeout: float):
        super().__init__(name="shardfield-host", daemon=True)
        self.launch, self.me, self.server, self.timeout = launch, me, server, timeout
        self.store = store  # lives as long as somebody may ask it
        self.peers: dict[Wire, Peer] = {}
        self.leaving: set[Wire] = set()
        self.own, self.own_told = own, threading.Event()
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)
        self._admit(own)

    def run(self) -> None:
        try:
            error = self._gather()
            self.selector.unregister(self.server)
            self.server.close()
            answer = {"error": error} if error else {"store": self.store.port, "host": vars(self.me)}
            for wire in self._wires():
                wire.send(answer)
                if error or wire not in self.peers:
                    self._dismiss(wire)
            while self.peers:
                for key, _ in self.selector.select():
                    self._hear(key.data)
        finally:
            for wire in self._wires():
                wire.close()
            self.selector.close()

    def _wires(self) -> list[Wire]:
        return [key.data for key in self.selector.get_map().values() if key.data]

    def _admit(self, wire: Wire) -> None:
        wire.sock.settimeout(5.0)
        wire.send(GREETING)
        self.selector.register(wire.sock, selectors.EVENT_READ, wire)

    def _dismiss(self, wire: Wire) -> Peer | None:
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
                    with contextlib.suppress(OSError):  # gone again already
                        self._admit(Wire(self.server.accept()[0]))
                elif error := self._greet(key.data):
                    return error
        return self._unreachable()

    def _unreachable(self) -> str | None:
        """Whether a rank would be offered to ranks on other hosts at an address that means themselves there."""
        far = [wire for wire in self.peers if wire.ends[0] != wire.ends[1]]
        hidden = next((p for p in self.peers.values() if p.loopback), None)
        if not far or not hidden:
            return None
        there = next((wire.ends[1] for wire in far if self.peers[wire] is hidden), far[0].ends[0])
        return (
            f"the world spans several hosts, and gloo would offer {hidden} to the others at {hidden.loopback}, since "
            f"that is what the name of its host stands for there. Set GLOO_SOCKET_IFNAME on that host to the interface "
            f"that has {there.removeprefix('::ffff:')}, or mend its /etc/hosts"
        )

    def _greet(self, wire: Wire) -> str | None:
        """Hear one that has come; says what went wrong if the world can no longer form."""
        try:
            there = wire.fill()
        except (ValueError, TimeoutError):
            there = False
        for hello in wire.messages:
            try:
                peer, size = Peer(**hello["peer"]), hello["world_size"]
                other_job = hello["job"] != self.launch.job
            except (KeyError, TypeError):
                there = False
                continue
            if other_job:
                where = f"{self.launch.addr}:{self.launch.port}"
                wire.send({"error": f"the port {where} is taken by another job; set MASTER_PORT to a free one"})
                there = False
                continue
            if size != self.launch.world_size:
                told = f"was told of a world of {size} processes, and rank 0 of one of {self.launch.world_size}"
                return f"{peer} {told}"
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
        how = next((m["leave"] for m in wire.messages if "leave" in m), None if there else "died")
        wire.messages.clear()
        peer, news = self.peers[wire], how is not None and wire not in self.leaving
        if how == "left" and there:
            self.leaving.add(wire)
        elif how is not None:
            self._dismiss(wire)
        if news:
            for other in self.peers.keys() - {wire}:
                other.send({"gone": vars(peer), "how": how})
            if wire is self.own:
                self.own_told.set()
        if how is not None and self.peers.keys() <= self.leaving:
            for other in self.peers:
                other.send({"end": True})
