"""The sockets between an engine and its ranks: one ROUTER that all of them write to, and that answers each by name.

Beyond this machine they speak CURVE with the cluster key, as `transfer.sockets` does. Typed msgpack, no pickle. Engine
thread, except that a DEALER belongs to whoever opened it. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from diptych.core.channel import MAX_FRAME_NBYTES, Codec
from diptych.core.ranks import FromRank, ToNode, ToRank
from diptych.errors import ConfigError
from diptych.transfer.sockets import curve_keys

# libzmq's own signs of life: they tell of a machine or a process that has gone without a word.
ALIVE_INTERVAL_MS = 500
ALIVE_TIMEOUT_MS = 3000


class RankInbox:
    """The engine's socket, not bound yet. Args: cluster_key: None on one machine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], cluster_key: str | None) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _set_options(self.socket)
        if cluster_key is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = curve_keys(cluster_key)
            self.socket.curve_server = True
        self._codec: Codec[ToRank | ToNode, FromRank] = Codec(FromRank)

    def bind(self, endpoint: str) -> None:
        """Listen there, besides where it listens already. Raises: ConfigError if the endpoint cannot be had."""
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen for ranks on {endpoint}: {error}; choose another --dist-init-addr"
            ) from error

    def send(self, message: ToRank | ToNode, names: Sequence[str]) -> None:
        """Queue a message for each of these; never blocks. Who is not connected does not get it."""
        frame = self._codec.encode(message)
        for name in names:
            self.socket.send_multipart([name.encode(), frame])

    def receive_all(self) -> list[tuple[str, FromRank]]:
        """Every message that has arrived, with its sender's name, without waiting."""
        received: list[tuple[str, FromRank]] = []
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            message = self._codec.decode(frames[-1])
            if message is not None:
                received.append((frames[0].decode(errors="replace"), message))
        return received

    def close(self) -> None:
        """Close; queued messages get a moment to leave."""
        self.socket.close(linger=500)


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], *, name: str, cluster_key: str | None) -> zmq.Socket[bytes]:
    """A rank's or a node's end, to be connected. Args: name: under which the engine answers."""
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    if cluster_key is not None:
        keys = curve_keys(cluster_key)
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_serverkey = keys[0]
    return socket


class Connection:
    """Whether a DEALER that has once reached its engine still does. Args: socket: not connected yet."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        socket.setsockopt(zmq.HEARTBEAT_IVL, ALIVE_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ALIVE_TIMEOUT_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.reports: zmq.Socket[bytes] = socket.get_monitor_socket(events)

    def has_ended(self) -> bool:
        """Whether the connection has been lost since the last call."""
        has_ended = False
        while self.reports.poll(0):
            has_ended |= recv_monitor_message(self.reports)["event"] == zmq.EVENT_DISCONNECTED
        return has_ended

    def close(self) -> None:
        """Stop listening to the socket's events."""
        self._socket.disable_monitor()
        self.reports.close(linger=0)


def _set_options(socket: zmq.Socket[bytes]) -> None:
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
