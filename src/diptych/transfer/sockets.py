"""The control network over ZMQ: a PULL a rank that everybody pushes to, one PUSH for each address that we write to.

Without a cluster key sockets stay on loopback addresses. With one they speak CURVE: all engines share a key pair
derived from it, so whoever lacks it can neither connect nor read. Engine thread; never imports torch.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import socket
import sys
from ipaddress import ip_address

import zmq
from zmq.utils import z85

from diptych.errors import ConfigError
from diptych.transfer.extension import MAX_EXTENSION_NBYTES
from diptych.transfer.wire import MAX_FRAMES

logger = logging.getLogger(__name__)

# What libzmq holds for us: of each connection to us while we do not read, and for each address that does not read us.
# Frames beyond the size close their connection before anything is allocated. A message of many frames is held until its
# last one has come, however many they are; only those who have the cluster key, or are on this machine, can send one.
MAX_INBOX_MESSAGES = 16
MAX_OUTBOX_MESSAGES = 1024
MAX_FRAME_NBYTES = MAX_EXTENSION_NBYTES
RECONNECT_MS = 100
MAX_RECONNECT_MS = 1000
# Within one network refusals come in less; the engine's loop waits for it, a few times a second for each lost peer.
PROBE_S = 0.01
# Beyond it the connection that was used least recently is closed; libzmq itself raises at a thousand.
MAX_OUTBOXES = 512
# Connections watched until they open, which takes two more sockets each; of others nobody knows.
MAX_WATCHED = 64
# How long the end of a connection that never opened may take.
CLOSE_MS = 500
# What one turn of the engine's loop takes in at most, so that no flood keeps it from its work.
MAX_MESSAGES_A_TURN = 256
MAX_NBYTES_A_TURN = MAX_EXTENSION_NBYTES


class ZmqNetwork:
    """The real `Network`. Args: host, port: where to listen; port 0 takes a free one. cluster_key: see above.
    num_ranks: each has a port of its own, which tells whom a base peer speaks to; those after the first take free ones.

    Raises ConfigError if the address cannot be had, or is not a loopback one and there is no cluster key.
    """

    def __init__(self, host: str, port: int, *, cluster_key: str | None, num_ranks: int = 1) -> None:
        if cluster_key is None and not is_loopback(host):
            raise ConfigError(
                f"peer_host is {host}, which others can reach: set cluster_key, or use a loopback address"
            )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = None if cluster_key is None else curve_keys(cluster_key)
        self._outboxes: dict[str, Outbox] = {}  # least recently used first
        self._numbers = itertools.count()
        self._is_uncertain = False
        self.inboxes: list[zmq.Socket[bytes]] = []
        self.ports = [self._listen(host, port if rank == 0 else 0) for rank in range(num_ranks)]

    def send(self, address: str, frames: list[bytes]) -> None:
        try:
            outbox = self._outboxes.pop(address, None) or self._connect(address)
            self._outboxes[address] = outbox
            outbox.send(frames)
        except zmq.Again:
            logger.debug("dropped a message to %s, which does not read", address)
        except (ConfigError, zmq.ZMQError) as error:
            # Addresses are what peers say of themselves, and so may be anything.
            logger.debug("dropped a message to %r: %s", address, error)

    @property
    def port(self) -> int:
        """Where engines of ours write to."""
        return self.ports[0]

    def receive(self) -> list[tuple[int, list[bytes]]]:
        messages: list[tuple[int, list[bytes]]] = []
        nbytes = 0
        for rank, inbox in enumerate(self.inboxes):
            while len(messages) < MAX_MESSAGES_A_TURN and nbytes < MAX_NBYTES_A_TURN:
                message = _receive_one(inbox)
                if message is None:
                    break
                messages.append((rank, message))
                nbytes += sum(len(frame) for frame in message)
        return messages

    def is_refused(self, address: str) -> bool:
        try:
            _, host, port = self._parse(address)
            socket.create_connection((host, port), timeout=PROBE_S).close()
        except ConnectionRefusedError:
            return True
        except (ConfigError, OSError):
            return False  # no answer proves nothing
        return False

    def withdraw(self, address: str) -> bool:
        # Of a connection that was evicted nobody remembers whether it had opened.
        if self._is_uncertain:
            return False
        outbox = self._outboxes.get(address)
        if outbox is None:
            return True
        if not outbox.may_have_opened():
            del self._outboxes[address]
            self._is_uncertain = outbox.close_and_see()
            return not self._is_uncertain
        return False

    def forget(self, address: str) -> None:
        outbox = self._outboxes.pop(address, None)
        if outbox is not None:
            outbox.close(linger=0)

    def close(self) -> None:
        """Close every socket; what was not sent gets a moment to leave."""
        for outbox in self._outboxes.values():
            outbox.close(linger=200)
        self._outboxes.clear()
        for inbox in self.inboxes:
            inbox.close(linger=0)
        self._context.term()

    def _listen(self, host: str, port: int) -> int:
        inbox = self._socket(zmq.PULL)
        self.inboxes.append(inbox)
        if self._keys is not None:
            inbox.curve_server = True
        try:
            inbox.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen for peers on {host}:{port}: {error}; choose another peer_port") from error
        return int(inbox.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _connect(self, address: str) -> Outbox:
        """Raises ConfigError or ZMQError for an address to which nothing can or may be sent."""
        family, host, port = self._parse(address)
        while len(self._outboxes) >= MAX_OUTBOXES:
            self._outboxes.pop(next(iter(self._outboxes))).close(linger=0)
            self._is_uncertain = True
        pushing = self._socket(zmq.PUSH)
        pushing.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        pushing.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        pushing.setsockopt(zmq.IPV6, family is socket.AF_INET6)
        if self._keys is not None:
            pushing.curve_serverkey = self._keys[0]
        num_watched = sum(outbox.is_watched for outbox in self._outboxes.values())
        watch = f"outbox-{next(self._numbers)}" if num_watched < MAX_WATCHED else None
        outbox = Outbox(pushing, watch=watch)
        try:
            pushing.connect(f"tcp://[{host}]:{port}" if family is socket.AF_INET6 else f"tcp://{host}:{port}")
        except zmq.ZMQError:
            outbox.close(linger=0)
            raise
        return outbox

    def _parse(self, address: str) -> tuple[socket.AddressFamily, str, int]:
        """Family, host and port of "ip:port", "[ip]:port" or "localhost:port".

        Raises ConfigError for anything else, since to ask a name server would stop the engine's loop, and for what is
        out of bounds without a cluster key.
        """
        host, _, port = address.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        try:
            version = ip_address(host).version
        except ValueError:
            raise ConfigError(f"{address!r} is no address of a peer; it must be an IP address and a port") from None
        if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
            raise ConfigError(f"{address!r} is no address of a peer; its port must be within 1 and 65535")
        if self._keys is None and not is_loopback(host):
            raise ConfigError(f"{address!r} is no loopback address, and there is no cluster key")
        return (socket.AF_INET if version == 4 else socket.AF_INET6), host, int(port)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        created = self._context.socket(kind)
        created.setsockopt(zmq.SNDHWM, MAX_OUTBOX_MESSAGES)
        created.setsockopt(zmq.RCVHWM, MAX_INBOX_MESSAGES)
        created.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        created.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            created.curve_publickey, created.curve_secretkey = self._keys
        return created


def _receive_one(inbox: zmq.Socket[bytes]) -> list[bytes] | None:
    """One message, cut off after as many frames as any of ours has (the rest is read and thrown away)."""
    try:
        frames = [inbox.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while inbox.getsockopt(zmq.RCVMORE):
        frame = inbox.recv()
        if len(frames) <= MAX_FRAMES:
            frames.append(frame)
    return frames


class Outbox:
    """A PUSH socket, not yet connected, that remembers whether its connection has ever opened; watch: a name for
    its reports, new to the context, or None: it is not watched, and may have opened.

    libzmq sends nothing before the handshake of ZMTP has succeeded, and reports that it has before it sends the first
    frame: as long as there is no such report, everything that was sent is still here.
    """

    def __init__(self, pushing: zmq.Socket[bytes], *, watch: str | None) -> None:
        self._socket = pushing
        self._reports: zmq.Socket[bytes] | None = None
        self._may_have_opened = watch is None
        if watch is not None:
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED
            self._reports = pushing.get_monitor_socket(events, f"inproc://{watch}")

    @property
    def is_watched(self) -> bool:
        """Whether it is still to open."""
        return self._reports is not None

    def send(self, frames: list[bytes]) -> None:
        """Queue a message. Raises zmq.Again if too many wait."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self.may_have_opened()  # libzmq's thread would stop if nobody read its reports

    def may_have_opened(self) -> bool:
        """Whether anything may have left."""
        if self._reports is not None and self._next_report(0) == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._may_have_opened = True
            self._socket.disable_monitor()
            self._end_reports()
        return self._may_have_opened

    def close(self, linger: int) -> None:
        """End; what has not left within `linger` milliseconds is dropped."""
        self._socket.close(linger=linger)
        self._end_reports()

    def close_and_see(self) -> bool:
        """End at once; whether anything may have left until the very end."""
        self._socket.close(linger=0)
        # The last report comes when libzmq's thread is done with the connection; if it is not in time, who knows.
        may_have_left = self._may_have_opened or self._next_report(CLOSE_MS) != zmq.EVENT_MONITOR_STOPPED
        self._end_reports()
        return may_have_left

    def _next_report(self, timeout_ms: int) -> int | None:
        """The next one's number, None if none comes in time."""
        if self._reports is None or not self._reports.poll(timeout_ms):
            return None
        number, _ = self._reports.recv_multipart()
        return int.from_bytes(number[:2], sys.byteorder)

    def _end_reports(self) -> None:
        if self._reports is not None:
            self._reports.close(linger=0)
            self._reports = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def curve_keys(cluster_key: str) -> tuple[bytes, bytes]:
    """CURVE key pair (public, secret) of a cluster: the secret is a slow hash of its key."""
    secret = z85.encode(hashlib.scrypt(cluster_key.encode(), salt=b"diptych cluster key", n=2**14, r=8, p=1, dklen=32))
    return zmq.curve_public(secret), secret
