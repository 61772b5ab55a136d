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
from .tcp import Connection

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


class RendezvousServer(threading.Thread):
    """Rank 0's side: gathers the ranks, then tells each which others it lost."""

    def __init__(
        self, launch: Launch, local_peer: Peer, server: socket.socket, own_connection: Connection, store, timeout: float
    ):
        super().__init__(name="shardfield-host", daemon=True)
        self.launch, self.local_peer, self.server, self.timeout = launch, local_peer, server, timeout
        self.store = store  # lives as long as somebody may ask it
        self.peers: dict[Connection, Peer] = {}
        self.leaving: set[Connection] = set()
        self.own_connection, self.own_departure_sent = own_connection, threading.Event()
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)
        self._accept(own_connection)

    def run(self) -> None:
        try:
            error = self._wait_for_ranks()
            self.selector.unregister(self.server)
            self.server.close()
            answer = {"error": error} if error else {"store": self.store.port, "host": vars(self.local_peer)}
            for wire in self._connections():
                wire.send(answer)
                if error or wire not in self.peers:
                    self._drop(wire)
            while self.peers:
                for key, _ in self.selector.select():
                    self._handle_message(key.data)
        finally:
            for wire in self._connections():
                wire.close()
            self.selector.close()

    def _connections(self) -> list[Connection]:
        return [key.data for key in self.selector.get_map().values() if key.data]

    def _accept(self, wire: Connection) -> None:
        wire.sock.settimeout(5.0)
        wire.send(GREETING)
        self.selector.register(wire.sock, selectors.EVENT_READ, wire)

    def _drop(self, wire: Connection) -> Peer | None:
        self.selector.unregister(wire.sock)
        wire.close()
        return self.peers.pop(wire, None)

    def _wait_for_ranks(self) -> str | None:
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
                        self._accept(Connection(self.server.accept()[0]))
                elif error := self._register_peer(key.data):
                    return error
        return self._check_reachable()

    def _check_reachable(self) -> str | None:
        """Whether a rank would be offered to ranks on other hosts at an address that means themselves there."""
        far = [wire for wire in self.peers if wire.addresses[0] != wire.addresses[1]]
        hidden = next((p for p in self.peers.values() if p.loopback), None)
        if not far or not hidden:
            return None
        there = next((wire.addresses[1] for wire in far if self.peers[wire] is hidden), far[0].addresses[0])
        return (
            f"the world spans several hosts, and gloo would offer {hidden} to the others at {hidden.loopback}, since "
            f"that is what the name of its host stands for there. Set GLOO_SOCKET_IFNAME on that host to the interface "
            f"that has {there.removeprefix('::ffff:')}, or mend its /etc/hosts"
        )

    def _register_peer(self, wire: Connection) -> str | None:
        """Hear one that has come; says what went wrong if the world can no longer form."""
        try:
            there = wire.read_available()
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
        if not there and (gone := self._drop(wire)):
            return f"{gone} ended while the others were still coming"
        return None

    def _handle_message(self, wire: Connection) -> None:
        """A rank says that it leaves, or is gone without a word: tell the others."""
        try:
            there = wire.read_available()
        except (ValueError, TimeoutError):
            there = False
        how = next((m["leave"] for m in wire.messages if "leave" in m), None if there else "died")
        wire.messages.clear()
        peer, news = self.peers[wire], how is not None and wire not in self.leaving
        if how == "left" and there:
            self.leaving.add(wire)
        elif how is not None:
            self._drop(wire)
        if news:
            for other in self.peers.keys() - {wire}:
                other.send({"gone": vars(peer), "how": how})
            if wire is self.own_connection:
                self.own_departure_sent.set()
        if how is not None and self.peers.keys() <= self.leaving:
            for other in self.peers:
                other.send({"end": True})
