"""The rendezvous server on rank 0: it gathers all ranks, and notifies them when one of them dies.

Rank 0 listens until all ranks have connected, then sends them the port of the store that torch's process groups need.
The connections stay open and idle. The kernel closes them when a process ends in any way, so rank 0 is notified of
every death at once and notifies the others: no heartbeat, no polling, one blocked thread per process (two on rank 0).
"""

import selectors
import socket
import threading
import time
from dataclasses import dataclass

from .launch import Launch
from .tcp import Connection

GREETING = {"shardfield": 1}
# Limit on connections that have not registered. Beyond it the oldest is closed: a rank registers at once.
MAX_UNREGISTERED = 256


@dataclass(frozen=True)
class Peer:
    """A process of the world. `loopback` is set if gloo would publish a loopback address for it."""

    rank: int
    pid: int
    host: str
    loopback: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def read_registration(message: dict, world_size: int) -> tuple[Peer, int, str]:
    """Return the peer, world size and job that a rank sends. Raises ValueError for anything else."""
    fields, size, job = message.get("peer"), message.get("world_size"), message.get("job")
    if not isinstance(fields, dict) or type(size) is not int or not isinstance(job, str):
        raise ValueError("no registration")
    types = {k: type(v) for k, v in ({"loopback": ""} | fields).items()}
    if types != {"rank": int, "pid": int, "host": str, "loopback": str}:
        raise ValueError("no peer")
    peer = Peer(**fields)
    if size == world_size and not 0 <= peer.rank < size:
        raise ValueError(f"no rank of a world of {size}")
    return peer, size, job


class RendezvousServer(threading.Thread):
    """Gathers the ranks, then notifies each of them when another is lost."""

    def __init__(
        self, launch: Launch, local_peer: Peer, server: socket.socket, own_connection: Connection, store, timeout: float
    ):
        super().__init__(name="shardfield-host", daemon=True)
        self.launch, self.local_peer, self.server, self.timeout = launch, local_peer, server, timeout
        self.store = store  # kept alive as long as a rank may use it
        self.peers: dict[Connection, Peer] = {}
        self.unregistered: dict[Connection, None] = {}  # connections that have not registered, the oldest first
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
            for connection in self._connections():
                connection.send(answer)
                if error or connection not in self.peers:
                    self._drop(connection)
            while self.peers:
                for key, _ in self.selector.select():
                    self._handle_message(key.data)
        finally:
            for connection in self._connections():
                connection.close()
            self.selector.close()

    def _connections(self) -> list[Connection]:
        return [key.data for key in self.selector.get_map().values() if key.data]

    def _accept(self, connection: Connection) -> None:
        if len(self.unregistered) >= MAX_UNREGISTERED + self.launch.world_size:
            self._drop(next(iter(self.unregistered)))
        connection.sock.settimeout(5.0)
        connection.send(GREETING)
        self.selector.register(connection.sock, selectors.EVENT_READ, connection)
        self.unregistered[connection] = None

    def _drop(self, connection: Connection) -> Peer | None:
        self.selector.unregister(connection.sock)
        connection.close()
        self.unregistered.pop(connection, None)
        return self.peers.pop(connection, None)

    def _wait_for_ranks(self) -> str | None:
        """Wait until all ranks have connected; return the error if the world cannot form."""
        where, size = f"{self.launch.addr}:{self.launch.port}", self.launch.world_size
        deadline = time.monotonic() + self.timeout
        while len(self.peers) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = sorted(set(range(size)) - {p.rank for p in self.peers.values()})
                names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
                return (
                    f"{len(missing)} of {size} ranks did not connect to {where} within {self.timeout:g} s: {names}. "
                    f"Were they started, and can their hosts reach {where}?"
                )
            for key, _ in self.selector.select(remaining):
                if key.fileobj is self.server:
                    try:
                        self._accept(Connection(self.server.accept()[0]))
                    except OSError:  # the client has disconnected, or this process has no file descriptor left
                        time.sleep(0.01)
                elif error := self._register_peer(key.data):
                    return error
        return self._check_reachable()

    def _check_reachable(self) -> str | None:
        """Return an error if gloo would publish a loopback address to ranks on other hosts."""
        far = [connection for connection in self.peers if connection.addresses[0] != connection.addresses[1]]
        hidden = next((p for p in self.peers.values() if p.loopback), None)
        if not far or not hidden:
            return None
        there = next(
            (connection.addresses[1] for connection in far if self.peers[connection] is hidden), far[0].addresses[0]
        )
        return (
            f"the world spans several hosts, and gloo would offer {hidden} to the others at {hidden.loopback}, because "
            f"its host name resolves to that address there. Set GLOO_SOCKET_IFNAME on that host to the interface that "
            f"has {there.removeprefix('::ffff:')}, or correct its /etc/hosts"
        )

    def _register_peer(self, connection: Connection) -> str | None:
        """Read the registration of a rank; return the error if the world can no longer form."""
        try:
            there = connection.read_available()
        except (ValueError, TimeoutError):
            there = False
        for hello in connection.messages:
            try:
                peer, size, job = read_registration(hello, self.launch.world_size)
            except ValueError:
                there = False
                continue
            if job != self.launch.job:
                where = f"{self.launch.addr}:{self.launch.port}"
                connection.send({"error": f"the port {where} is taken by another job; set MASTER_PORT to a free one"})
                there = False
                continue
            if size != self.launch.world_size:
                return f"{peer} has a world size of {size}, and rank 0 of {self.launch.world_size}"
            other = next((p for p in self.peers.values() if p.rank == peer.rank), None)
            if other:
                places = [f"pid {p.pid} on {p.host}" for p in (other, peer)]
                return f"two processes have rank {peer.rank}: {' and '.join(places)}"
            self.peers[connection] = peer
            self.unregistered.pop(connection, None)
        connection.messages.clear()
        if not there and (gone := self._drop(connection)):
            return f"{gone} ended while other ranks were still connecting"
        return None

    def _handle_message(self, connection: Connection) -> None:
        """Notify the other ranks that a rank leaves, or that its connection is closed."""
        try:
            there = connection.read_available()
        except (ValueError, TimeoutError):
            there = False
        how = next((m["leave"] for m in connection.messages if "leave" in m), None if there else "died")
        connection.messages.clear()
        peer, news = self.peers[connection], how is not None and connection not in self.leaving
        if how == "left" and there:
            self.leaving.add(connection)
        elif how is not None:
            self._drop(connection)
        if news:
            for other in self.peers.keys() - {connection}:
                other.send({"gone": vars(peer), "how": how})
            if connection is self.own_connection:
                self.own_departure_sent.set()
        if how is not None and self.peers.keys() <= self.leaving:
            for other in self.peers:
                other.send({"end": True})
