"""Messages between processes outside of torch: one JSON object per line over a TCP socket."""

import contextlib
import errno
import ipaddress
import json
import os
import re
import socket
import time
import weakref
from collections import deque

from ..errors import WorldError

# Seconds to wait for a greeting. A program at the port that sends none is not rank 0, and `connect` raises.
GREETING_SECONDS = 5.0
OTHER_GREETING = "sends another greeting than rank 0"

# Bounds of a message, far above those that ranks send: anyone who finds the port can send anything.
MAX_BYTES = 65536
MAX_NESTING = 4

# A string without an end is matched too: else each of its quotes begins another search, 7 s for a line of 64 kB.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?')
_open_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the parent's connections in a forked data loader: else the end of the parent would go unnoticed."""
    for sock in list(_open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def parse_message(line: bytes) -> dict:
    """Return the message of a line. Raises ValueError for anything else: any program can send to the port."""
    if len(line) > MAX_BYTES:
        raise ValueError(f"a line of {len(line)} bytes")
    structure = _STRING.sub(b"", line)
    if structure.count(b"{") > MAX_NESTING or b"[" in structure:
        raise ValueError("nested too deeply")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


class Connection:
    """A TCP connection for messages."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.messages: deque[dict] = deque()
        self._buffer = b""
        _open_sockets.add(sock)
        self.addresses = ("", "")  # local and remote
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # the other side has disconnected
                self.addresses = (sock.getsockname()[0], sock.getpeername()[0])
            # A host that loses power closes no connection: TCP keep-alive detects it after a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict) -> None:
        """Send a message; if the other side is gone, `read_available` returns False."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def read_available(self, timeout: float | None = 5.0) -> bool:
        """Read available messages. Returns False once the other side is gone; raises ValueError for invalid data."""
        try:
            self.sock.settimeout(timeout)
            data = self.sock.recv(65536)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
                raise  # the caller's timeout; ETIMEDOUT means that the other host no longer responds
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self.messages += [parse_message(line) for line in lines]
        if len(self._buffer) > MAX_BYTES:
            raise ValueError("a line without an end")
        return bool(data)

    def receive(self, timeout: float | None = None) -> dict | None:
        """Return the next message; None once the other side is gone. Raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.messages:
            if not self.read_available(None if deadline is None else max(deadline - time.monotonic(), 1e-3)):
                return None
        return self.messages.popleft()

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in receive
        except OSError:
            pass
        self.sock.close()


def listen(addr: str, port: int) -> socket.socket:
    """Open a socket that accepts connections at `addr`; port 0 selects any free port.

    It listens on every interface only if the address does not identify one: a host name that resolves to a loopback
    address on its own host, as on many systems, or an address that another machine forwards to this one.
    """
    problem = OSError()
    for family, host in _listen_addresses(addr):
        try:
            both = family == socket.AF_INET6 and not host
            server = socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=both)
            _open_sockets.add(server)
            return server
        except OSError as error:
            problem = error
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6; not an address of this host
                break
    taken = problem.errno == errno.EADDRINUSE
    why = "the port is taken by another program" if taken else os.strerror(problem.errno or 0)
    raise WorldError(f"rank 0 cannot listen at {addr}:{port}: {why}; set MASTER_PORT to one that is free on its host")


def listen_at_same_address(server: socket.socket) -> socket.socket:
    """Open a socket at the address of `server`, on any free port."""
    host = server.getsockname()[0]
    both = host == "::" and not server.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return socket.create_server((host, 0), family=server.family, backlog=512, dualstack_ipv6=both)


def _listen_addresses(addr: str) -> list[tuple[int, str]]:
    """Return the families and addresses to listen at, the best first; "" is every interface."""
    families = [socket.AF_INET6] * socket.has_dualstack_ipv6() + [socket.AF_INET]
    every = [(int(family), "") for family in families]
    try:
        found = socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return every
    # IPv4 first: a client tries all addresses of a name, and may have no route to the IPv6 one.
    hosts = sorted(
        {(int(family), str(place[0])) for family, *_, place in found if family in (socket.AF_INET, socket.AF_INET6)}
    )
    loopback = all(ipaddress.ip_address(host).is_loopback for _, host in hosts)
    return every if loopback and not _means_this_host(addr) else [*hosts, *every]


def _means_this_host(addr: str) -> bool:
    """Return whether an address is a loopback address wherever it is read."""
    if addr.split(".")[0].lower() in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(addr).is_loopback
    except ValueError:  # a name
        return False


def connect(rank: int, addr: str, port: int, greeting: dict, timeout: float) -> Connection:
    """Connect to rank 0, which may not listen yet, and verify its greeting."""
    deadline = time.monotonic() + timeout
    first_closed: float | None = None
    while True:
        try:
            sock = socket.create_connection((addr, port), timeout=max(min(10.0, deadline - time.monotonic()), 0.1))
        except OSError as error:
            if time.monotonic() >= deadline:
                raise WorldError(
                    f"rank {rank} could not connect to rank 0 at {addr}:{port} in {timeout:g} s ({error}). It "
                    f"listens until all ranks have connected: does it run, and is {addr} its host (MASTER_ADDR, "
                    "MASTER_PORT)?"
                ) from None
            time.sleep(0.05)
            continue
        connection = Connection(sock)
        try:
            # A socket in the ephemeral port range can connect to itself while no process listens.
            own = sock.getsockname() == sock.getpeername()
            answer = None if own else connection.receive(GREETING_SECONDS)
            if answer is not None and answer.items() >= greeting.items():
                return connection
            problem = OTHER_GREETING if answer is not None else None
        except TimeoutError:
            problem = "sends no greeting"
        except ValueError:
            problem = OTHER_GREETING
        except OSError:
            problem = None
        connection.close()
        if problem is None:
            # Closed at once: rank 0 of an earlier world that is ending (retry), or another program.
            first_closed = first_closed or time.monotonic()
            problem = "closes the connection"
            if time.monotonic() - first_closed < GREETING_SECONDS:
                time.sleep(0.05)
                continue
        raise WorldError(
            f"rank {rank}: the port {addr}:{port} is taken by another program, which {problem}. "
            f"Set MASTER_PORT to a port that is free on the host of rank 0"
        )
