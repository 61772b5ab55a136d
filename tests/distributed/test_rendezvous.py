"""Other programs connect to the rendezvous server: whatever they send, the world forms, at its own address only."""

import json
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from torch import distributed as dist

from shardfield.distributed import membership, tcp
from shardfield.distributed.launch import Launch
from shardfield.distributed.membership import Membership
from shardfield.distributed.rendezvous import MAX_UNREGISTERED, Peer, read_registration

HELLO = {"job": "", "world_size": 2, "peer": {"rank": 1, "pid": 5, "host": "here", "loopback": ""}}
DEEP = b"[" * 60_000 + b"\n"


def draw_value(rng, depth=0):
    """Draw a JSON value; some are nested, huge or not finite."""
    kinds = ["int", "float", "text", "none", "bool", "huge", *(["list", "dict"] if depth < 6 else [])]
    kind = rng.choice(kinds)
    if kind == "list":
        return [draw_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == "dict":
        keys = ["peer", "rank", "pid", "host", "job", "world_size", "loopback", "leave", ""]
        return {rng.choice(keys): draw_value(rng, depth + 1) for _ in range(rng.randrange(5))}
    return {
        "int": rng.randrange(-3, 10),
        "float": rng.choice([0.5, float("nan"), float("inf"), -1e308]),
        "text": "".join(map(chr, rng.choices(range(1, 300), k=rng.randrange(8)))),
        "none": None,
        "bool": rng.random() < 0.5,
        "huge": 10 ** rng.randrange(5, 400),
    }[kind]


def draw_input(rng):
    """Draw what another program may send: bytes, JSON, brackets, or a registration with one part changed."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(300)) + b"\n"
    if kind == 1:
        return json.dumps(draw_value(rng)).encode() + b"\n"
    if kind == 2:
        return rng.choice([b"[", b"{", b'{"a":', b'[{"', b'"', b"\\", b"9"]) * rng.randrange(1, 3000) + b"\n"
    if kind == 3:
        changed = json.loads(json.dumps(HELLO))
        target = rng.choice([changed, changed["peer"]])
        target[rng.choice([*target, "more"])] = draw_value(rng)
        return json.dumps(changed).encode() + b"\n"
    if kind == 4:
        line = bytearray(json.dumps(HELLO).encode())
        line[rng.randrange(len(line))] = rng.randrange(256)
        return bytes(line) + b"\n"
    return rng.choice(
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\n", b"\n\n\n", b"\x00" * 500 + b"\n"]
    )


def test_ten_thousand_inputs_are_parsed_or_refused():
    rng = random.Random(0)
    registered = 0
    for data in [DEEP, b'{"a":' * 10_000, *(draw_input(rng) for _ in range(10_000))]:
        for line in data.split(b"\n"):
            try:
                peer, size, job = read_registration(tcp.parse_message(line), 2)
            except ValueError:
                continue
            assert isinstance(peer, Peer) and type(size) is int and isinstance(job, str)
            assert size != 2 or peer.rank in (0, 1)
            registered += 1
    assert registered > 20  # some changes leave a valid registration: the test reaches the checks behind the parser


@pytest.mark.parametrize("start, part", [(b'"', b'\\"'), (b"", b'\\"'), (b'{"a":"', b"\\\\"), (b"", b'"'), (b"", b"{")])
def test_no_line_takes_long_to_refuse(start, part):
    """One thread reads what every rank and every stranger sends: a line that takes it seconds stops the world."""
    line = (start + part * tcp.MAX_BYTES)[: tcp.MAX_BYTES]
    before = time.thread_time()
    with pytest.raises(ValueError):
        tcp.parse_message(line)
    assert time.thread_time() - before < 0.5


def join_world(launch, members):
    members.append(Membership(launch, 60.0, gloo=False))


def form(port, between=lambda: None, addr="127.0.0.1", size=2):
    """Form a world of threads in this process, calling `between` before the last rank connects."""
    members, threads = [], []
    for rank in range(size):
        if rank == size - 1:
            between()
        launch = Launch("env", rank, size, rank, addr=addr, port=port, job="here")
        threads.append(threading.Thread(target=join_world, args=(launch, members), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert len(members) == size
    return members


def end(members):
    leaving = [threading.Thread(target=member.leave) for member in members]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(20)
    for member in sorted(members, key=lambda member: -member.local_peer.rank):  # rank 0 waits for the others
        member.close()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def quiet(monkeypatch):
    """Keep the excepthook of this process as it is."""
    monkeypatch.setattr(membership, "_install_excepthook", lambda member: None)


def test_a_world_forms_while_other_programs_connect(quiet):
    port, rng = free_port(), random.Random(1)
    silent = []

    def other_programs():
        tcp.connect(1, "127.0.0.1", port, {"shardfield": 1}, 20).close()  # rank 0 listens now
        for data in [DEEP, b"x" * 200_000, *(draw_input(rng) for _ in range(300))]:
            with socket.create_connection(("127.0.0.1", port), 10) as sock:
                try:
                    # A valid registration of a world of another size would be an error of the launch.
                    if b'"host": "here"' not in data:
                        sock.sendall(data)
                except OSError:
                    pass  # refused while it was sent
        silent.extend(socket.create_connection(("127.0.0.1", port), 10) for _ in range(MAX_UNREGISTERED + 20))

    members = form(port, other_programs)
    try:
        members[0].store.set("key", "value")
        assert members[1].store.get("key") == b"value"
        assert sorted(member.local_peer.rank for member in members) == [0, 1]
    finally:
        end(members)
        for sock in silent:
            sock.close()


def listening_at(port):
    """Return the local addresses at which sockets of this host listen on a port, as the kernel writes them."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.split(":")[1], 16) == port:
                found.append(local.split(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.parametrize("addr", ["127.0.0.1", "localhost"])
def test_listens_only_at_the_given_address(quiet, addr):
    port, seen = free_port(), []

    def look():
        tcp.connect(1, "127.0.0.1", port, {"shardfield": 1}, 20).close()
        seen.extend(listening_at(port))

    members = form(port, look, addr)
    try:
        assert seen == ["0100007F"]
        assert listening_at(members[0].store.port) == ["0100007F"]
    finally:
        end(members)


def test_addresses_that_do_not_tell_the_interface(monkeypatch):
    everywhere = tcp._listen_addresses("no.such.host.invalid")
    assert everywhere[-1] == (socket.AF_INET, "")

    def resolve(*hosts):
        infos = [(socket.AF_INET6 if ":" in h else socket.AF_INET, 1, 6, "", (h, 0)) for h in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: infos)

    resolve("127.0.1.1")  # what /etc/hosts says of the host's own name: other hosts know another address
    assert tcp._listen_addresses("node7") == everywhere
    assert tcp._listen_addresses("localhost")[0] == (socket.AF_INET, "127.0.1.1")
    resolve("2001:db8::7", "192.0.2.7")
    assert tcp._listen_addresses("node7") == [
        (socket.AF_INET, "192.0.2.7"),
        (socket.AF_INET6, "2001:db8::7"),
        *everywhere,
    ]
    with tcp.listen("192.0.2.7", 0) as server:  # not an address of this host: it may be forwarded
        assert server.getsockname()[0] in ("::", "0.0.0.0")
        with tcp.listen_at_same_address(server) as sock:
            assert sock.getsockname()[0] == server.getsockname()[0]
            store = dist.TCPStore("127.0.0.1", sock.getsockname()[1], is_master=True, master_listen_fd=sock.detach())
    store.set("key", "value")
