"""Membership of a process in its world: join, leave, and react to a rank that died.

torch would report the death of a rank as a reset connection to some address, after a timeout, or (NCCL) not at all.
Here every remaining rank prints which rank was lost, and ends within the timeout if it has not ended by itself.
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
from .rendezvous import GREETING, Peer, RendezvousServer
from .tcp import Connection, connect, listen, listen_at_same_address

# Seconds that a leaving rank waits for the others: short, because they may have work left.
LINGER_SECONDS = 5.0
# Seconds to wait for the notice of a death: the broken collective may raise before it arrives.
LOSS_NOTICE_SECONDS = 2.0

_rendezvous_count = itertools.count()


class Membership:
    """This process's membership in its world, from the rendezvous until it leaves."""

    def __init__(self, launch: Launch, timeout: float, gloo: bool):
        loopback = _gloo_loopback_address() if gloo else ""
        self.local_peer = Peer(launch.rank, os.getpid(), socket.gethostname(), loopback)
        self.timeout = timeout
        self.lost_peers: dict[int, str] = {}  # in the order of the notices: the first is the cause
        self.departed: set[int] = set()
        self.failed = False
        self._server: RendezvousServer | None = None
        self._leaving, self._watch_ended, self._loss_seen = (threading.Event() for _ in range(3))
        self._connection = self._rendezvous(launch)
        self.store = self._open_store(launch)
        self._watcher = threading.Thread(target=self._watch_peers, name="shardfield-watch", daemon=True)
        self._watcher.start()
        _install_excepthook(self)

    def _rendezvous(self, launch: Launch) -> Connection:
        """Connect to the rendezvous server; rank 0 starts it."""
        number = next(_rendezvous_count)
        # torchrun's store listens at addr:port, so the server uses any free port and publishes it in that store.
        agent = key = None
        if launch.store_prefix:
            agent, key = _store_client(launch.addr, launch.port, self.timeout), f"{launch.store_prefix}/{number}"
        if launch.rank == 0:
            server = listen(launch.addr, 0 if agent else launch.port)
            store = _store_server(server, self.timeout)
            if agent:
                agent.set(key, str(server.getsockname()[1]))
            near, far = (Connection(sock) for sock in socket.socketpair())
            self._server = RendezvousServer(launch, self.local_peer, server, far, store, self.timeout)
            self._server.start()
            near.receive()
            return near
        port = launch.port
        if agent:
            try:
                port = int(agent.get(key))
            except dist.DistError:
                raise WorldError(
                    f"rank {launch.rank}: rank 0 published no rendezvous address in {self.timeout:g} s"
                ) from None
        return connect(launch.rank, launch.addr, port, GREETING, self.timeout)

    def _open_store(self, launch: Launch):
        """Register this process, wait for the others, and connect to the store of the world."""
        self._connection.send({"job": launch.job, "world_size": launch.world_size, "peer": vars(self.local_peer)})
        try:
            # Rank 0 times out first and sends the reason.
            answer = self._connection.receive(self.timeout + 10.0)
        except TimeoutError:
            answer = None
        if answer is None:
            self._connection.close()
            raise WorldError(
                f"rank {self.local_peer.rank}: rank 0 at {launch.addr}:{launch.port} ended "
                "while ranks were still connecting"
            )
        if "error" in answer:
            self._connection.close()
            raise WorldError(answer["error"])
        self._rank0 = Peer(**answer["host"])
        if self._server:
            return self._server.store
        return _store_client(self._connection.addresses[1], answer["store"], self.timeout)

    def _watch_peers(self) -> None:
        """Block until rank 0 reports that a rank is gone, or is gone itself."""
        while not self.lost_peers:
            message = self._connection.receive()
            if message is None and not (self._leaving.is_set() or 0 in self.departed):
                peer, how = self._rank0, "died"
            elif message is None or "end" in message:
                break
            else:
                peer, how = Peer(**message["gone"]), message["how"]
            if how == "left":
                self.departed.add(peer.rank)
            elif not self._leaving.is_set():
                self.lost_peers[peer.rank] = f"{peer} {how}"
                self._print_error(f"{self.lost_peers[peer.rank]}; this rank ends within {self.timeout:g} s")
                self._loss_seen.set()
        if self.lost_peers and not self._leaving.wait(self.timeout):
            self._print_error(f"ends now, {self.timeout:g} s after {next(iter(self.lost_peers.values()))}")
            os._exit(1)
        self._watch_ended.set()

    def report_error(self, error: BaseException, show: Callable[[], object]) -> None:
        """Report the error that ends this rank: `show` it, print its likely cause, and notify the other ranks."""
        echo = _is_distributed_error(error)
        if echo:
            self._loss_seen.wait(LOSS_NOTICE_SECONDS)
        show()
        if self.departed and echo:
            self._print_error(f"before the error above, these ranks had left the world: {sorted(self.departed)}")
        if self.lost_peers:
            self._print_error(f"the error above follows from this: {next(iter(self.lost_peers.values()))}")
        text = str(error).strip().split("\n")[0][:200]
        self.leave(f"failed with {type(error).__name__}" + (f": {text}" if text else ""))

    def _print_error(self, text: str) -> None:
        sys.stderr.write(f"shardfield, rank {self.local_peer.rank}: {text}\n")
        sys.stderr.flush()

    def active(self) -> bool:
        """Return whether this process is still in the world. A forked child never is."""
        return not self._leaving.is_set() and os.getpid() == self.local_peer.pid

    def leave(self, how: str = "left") -> None:
        """Notify the other ranks that this rank leaves; a second call does nothing.

        Blocks until they leave too, at most `LINGER_SECONDS`: slower ranks may still be connecting to this rank, in a
        program that ends as soon as its groups are created. A rank that failed does not block, because the others may
        be blocked in a collective with it.
        """
        if not self.active():
            return
        self.failed = how != "left"
        self._leaving.set()
        self._connection.send({"leave": how})
        if not self.failed:
            self._watch_ended.wait(LINGER_SECONDS)
        elif self._server:
            self._server.own_departure_sent.wait(LINGER_SECONDS)

    def close(self) -> None:
        """Close the connection after the process group has ended. Rank 0 is last, because it has the store."""
        if os.getpid() == self.local_peer.pid:
            self._connection.close()
            self._watcher.join(1.0)
            if self._server and not self.failed:
                self._server.join(LINGER_SECONDS)


_active_memberships: list[Membership] = []  # the one that is in a world, if any


def _install_excepthook(member: Membership) -> None:
    """Report uncaught errors to the membership. Installed once, because others may wrap the hook."""
    if not _active_memberships:
        show = sys.excepthook

        def hook(kind, error, trace):
            if _active_memberships[0].active():
                _active_memberships[0].report_error(error, lambda: show(kind, error, trace))
            else:
                show(kind, error, trace)

        sys.excepthook = hook
    _active_memberships[:] = [member]


def _store_server(server: socket.socket, timeout: float):
    """Start the store of the world at the address of `server`, on any free port."""
    sock = listen_at_same_address(server)
    host, port, *_ = sock.getsockname()
    return dist.TCPStore(
        "127.0.0.1" if host in ("0.0.0.0", "::") else host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=sock.detach(),
    )


def _store_client(addr: str, port: int, timeout: float):
    return dist.TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def _gloo_loopback_address() -> str:
    """Return the address that gloo would publish for this process, if it is a loopback address.

    gloo resolves the host name, which on many systems is 127.0.1.1.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    except OSError:
        address = "127.0.0.1"  # what gloo falls back to
    return str(address) if ipaddress.ip_address(address).is_loopback else ""


def _is_distributed_error(error: BaseException) -> bool:
    """Return whether an error may be caused by a rank that is gone. gloo raises a plain RuntimeError."""
    words = ("gloo", "nccl", "connection", "store", "process group")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)
    )
