"""The ZMQ network alone: where it listens and writes, what an address may be, and that no flood holds up a turn."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from diptych.errors import ConfigError
from diptych.transfer import sockets
from diptych.transfer.sockets import ZmqNetwork, is_loopback

WAIT_S = 5.0


@pytest.fixture
def network() -> Iterator[Callable[..., ZmqNetwork]]:
    networks: list[ZmqNetwork] = []

    def create(key: str | None = None, host: str = "127.0.0.1", port: int = 0) -> ZmqNetwork:
        networks.append(ZmqNetwork(host, port, cluster_key=key))
        return networks[-1]

    yield create
    for each in networks:
        each.close()


def address(network: ZmqNetwork) -> str:
    return f"127.0.0.1:{network.port}"


def wait_for(network: ZmqNetwork, count: int, timeout_s: float = WAIT_S) -> list[list[bytes]]:
    """Until so many messages are there."""
    messages: list[list[bytes]] = []
    deadline = time.monotonic() + timeout_s
    while len(messages) < count and time.monotonic() < deadline:
        network.inboxes[0].poll(20)
        messages += [frames for _, frames in network.receive()]
    return messages


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_beyond_loopback_a_cluster_key_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{host}.*set cluster_key"):
        ZmqNetwork(host, 0, cluster_key=None)


def test_a_port_in_use_is_a_configuration_error(network) -> None:
    with pytest.raises(ConfigError, match="choose another peer_port"):
        ZmqNetwork("127.0.0.1", network().port, cluster_key=None)


def test_messages_arrive_in_order(network) -> None:
    here, there = network(), network()
    for number in range(20):
        here.send(address(there), [b"a", b"%d" % number])
    assert wait_for(there, 20) == [[b"a", b"%d" % number] for number in range(20)]


@pytest.mark.parametrize("keys", [("a", "a"), ("a", "b"), ("a", None), (None, "a")])
def test_only_the_same_key_gets_through(network, keys: tuple[str | None, str | None]) -> None:
    here, there = network(keys[0]), network(keys[1])
    here.send(address(there), [b"hello"])
    same = keys[0] == keys[1]
    assert wait_for(there, 1, WAIT_S if same else 0.5) == ([[b"hello"]] if same else [])


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "nowhere", ":", ":1", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1"),
        *("*:80", "a..b:80", "[::1]:x", "127.0.0.1:8\u0663", "localhost.example.org:80", "\0:1", "x" * 300 + ":1"),
    ],
)
def test_what_is_no_address_is_dropped(network, wrong: str) -> None:
    here = network()
    here.send(wrong, [b"x"])
    assert here.is_refused(wrong) is False
    here.forget(wrong)


@pytest.mark.parametrize("far", ["192.0.2.1:80", "[2001:db8::1]:80", "10.0.0.1:1"])
def test_without_a_key_nothing_leaves_the_machine(network, far: str, monkeypatch) -> None:
    here = network()
    monkeypatch.setattr(sockets.socket, "create_connection", lambda *_, **__: pytest.fail("connected"))
    here.send(far, [b"x"])
    assert here.is_refused(far) is False
    assert not here._outboxes


def test_a_name_is_never_looked_up(network, monkeypatch) -> None:
    here = network("key")
    monkeypatch.setattr(sockets.socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked a name server"))
    here.send("peer.example.org:80", [b"x"])
    assert here.is_refused("peer.example.org:80") is False


def test_a_silent_host_does_not_hold_up_the_loop(network) -> None:
    here = network()
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(5):  # its queue is full: whoever comes now gets no answer
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        started = time.monotonic()
        for _ in range(5):
            assert here.is_refused(f"127.0.0.1:{server.getsockname()[1]}") is False
        assert 5 * sockets.PROBE_S <= time.monotonic() - started < 0.5


def test_only_a_refusal_is_one(network) -> None:
    here, there = network(), network()
    assert here.is_refused(address(there)) is False
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert here.is_refused(f"localhost:{port}") is False
    assert here.is_refused(f"127.0.0.1:{port}") is True


def test_a_flood_is_taken_in_by_turns(network) -> None:
    here, there = network(), network()
    for number in range(1000):
        here.send(address(there), [b"%d" % number])
    wait_until_readable(there)
    sizes = []
    messages: list[list[bytes]] = []
    deadline = time.monotonic() + WAIT_S
    while len(messages) < 1000 and time.monotonic() < deadline:
        sizes.append(len(got := there.receive()))
        messages += [frames for _, frames in got]
    assert max(sizes) <= sockets.MAX_MESSAGES_A_TURN
    assert messages == [[b"%d" % number] for number in range(1000)]


def wait_until_readable(network: ZmqNetwork) -> None:
    assert network.inboxes[0].poll(WAIT_S * 1000)
    time.sleep(0.2)


def test_large_messages_end_a_turn(network) -> None:
    here, there = network(), network()
    for _ in range(4):
        here.send(address(there), [bytes(sockets.MAX_NBYTES_A_TURN // 2)])
    assert there.inboxes[0].poll(WAIT_S * 1000)
    time.sleep(0.5)
    assert len(there.receive()) <= 2
    assert len(wait_for(there, 2)) == 2


def test_a_message_of_many_frames_is_cut(network) -> None:
    here, there = network(), network()
    here.send(address(there), [b"x"] * 5000)
    here.send(address(there), [b"next"])
    cut, following = wait_for(there, 2)
    assert len(cut) == sockets.MAX_FRAMES + 1 and following == [b"next"]


def test_an_oversized_frame_closes_its_connection_alone(network) -> None:
    here, there = network(), network()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PUSH) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{address(there)}")
        stranger.send(bytes(sockets.MAX_EXTENSION_NBYTES + 1))
        here.send(address(there), [b"fine"])
        assert wait_for(there, 1) == [[b"fine"]]
    context.term()


def test_connections_are_bounded(network, monkeypatch) -> None:
    monkeypatch.setattr(sockets, "MAX_OUTBOXES", 3)
    here, there = network(), network()
    here.send(address(there), [b"first"])
    assert wait_for(there, 1) == [[b"first"]]
    for port in (1, 2, 3, 4):
        here.send(f"127.0.0.1:{port}", [b"x"])
        here.send(address(there), [b"still"])
    assert len(here._outboxes) == 3 and address(there) in here._outboxes
    assert wait_for(there, 4) == [[b"still"]] * 4


def test_a_thousand_addresses_raise_nothing(network) -> None:
    here = network()
    for port in range(1, 1500):
        here.send(f"127.0.0.1:{port}", [b"x"])
    assert len(here._outboxes) <= sockets.MAX_OUTBOXES


def test_loopback_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""))


def test_what_nobody_has_read_can_be_withdrawn(network) -> None:
    here = network("a")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and says nothing
        somewhere = f"127.0.0.1:{listener.getsockname()[1]}"
        here.send(somewhere, [b"secret"])
        time.sleep(0.2)
        assert here.withdraw(somewhere)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            assert b"secret" not in b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize("keys", [("a", "b"), ("a", None), (None, "a")])
def test_what_another_key_could_not_read_can_be_withdrawn(network, keys: tuple[str | None, str | None]) -> None:
    here, there = network(keys[0]), network(keys[1])
    here.send(address(there), [b"hello"])
    assert wait_for(there, 1, 0.3) == []
    assert here.withdraw(address(there))


def test_what_has_left_cannot_be_withdrawn(network) -> None:
    here, there = network("a"), network("a")
    here.send(address(there), [b"hello"])
    wait_for(there, 1)
    assert not here.withdraw(address(there))
    here.send(address(there), [b"again"])
    assert wait_for(there, 1) == [[b"again"]], "the connection is as it was"


def test_to_whom_nothing_was_sent_nothing_has_left(network) -> None:
    assert network().withdraw("127.0.0.1:1")
    here = network()
    here.send("192.0.2.1:80", [b"x"])  # not allowed without a key
    assert here.withdraw("192.0.2.1:80")


def test_an_evicted_connection_makes_it_uncertain(network, monkeypatch) -> None:
    monkeypatch.setattr(sockets, "MAX_OUTBOXES", 1)
    here, there = network(), network()
    here.send(address(there), [b"hello"])
    here.send("127.0.0.1:9", [b"x"])
    assert not here.withdraw(address(there)) and not here.withdraw("127.0.0.1:9")


def test_a_message_is_read_or_withdrawn_never_both(network) -> None:
    """Withdrawn at any moment while the connection opens."""
    outcomes = set()
    for delay_us in range(0, 6000, 120):
        here, there = network(), network()
        here.send(address(there), [b"hello"])
        time.sleep(delay_us / 1e6)
        is_withdrawn = here.withdraw(address(there))
        is_read = bool(wait_for(there, 1, 0.1))
        assert not (is_withdrawn and is_read)
        outcomes.add((is_withdrawn, is_read))
    assert (False, True) in outcomes


def test_what_is_not_read_is_not_taken_in(network) -> None:
    there = network()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pushing = context.socket(zmq.PUSH)
    pushing.setsockopt(zmq.SNDHWM, 1)
    pushing.setsockopt(zmq.SNDTIMEO, 300)
    pushing.connect(f"tcp://{address(there)}")
    num_taken = 0
    with pytest.raises(zmq.Again):
        while num_taken < 4000:
            pushing.send_multipart([b"x" * 2**16])
            num_taken += 1
    assert num_taken < 400, "more than libzmq's and the kernel's buffers"
    pushing.close(linger=0)
    context.term()
