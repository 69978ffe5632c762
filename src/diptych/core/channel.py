"""Typed ZMQ: one socket, one union of messages each way, msgpack on the wire. No pickle.

A frame that does not decode is dropped and counted, never raised: what reaches a socket may come from anywhere.
"""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

import msgspec
import zmq

from diptych.errors import DiptychError

logger = logging.getLogger(__name__)

Outgoing = TypeVar("Outgoing")
Incoming = TypeVar("Incoming")

MAX_FRAME_NBYTES = 256 * 1024 * 1024


class Codec(Generic[Outgoing, Incoming]):
    """Encodes one union of messages and decodes another; shared by the blocking and the asyncio side."""

    def __init__(self, incoming: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self.num_dropped = 0

    def encode(self, message: Outgoing) -> bytes:
        """Bytes of one message."""
        return self._encoder.encode(message)

    def decode(self, frame: bytes) -> Incoming | None:
        """The message, or None for a frame that is not one of ours (dropped and counted)."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError, DiptychError) as error:
            self.num_dropped += 1
            logger.warning("dropped a frame of %d bytes that is no message: %s", len(frame), error)
            return None


class Channel(Generic[Outgoing, Incoming]):
    """One end of a blocking channel. Used by one thread.

    Args: socket: connected or bound DEALER. incoming: the union of messages that this end receives.
    """

    def __init__(self, socket: zmq.Socket[bytes], incoming: object) -> None:
        self.socket = socket
        self.codec: Codec[Outgoing, Incoming] = Codec(incoming)

    def send(self, message: Outgoing) -> None:
        """Queue one message; never blocks (the high-water mark is unlimited)."""
        self.socket.send(self.codec.encode(message))

    def receive_all(self) -> list[Incoming]:
        """Every message that has arrived, without waiting."""
        messages: list[Incoming] = []
        # Asked first: the exception of a refused recv costs more than all else in a turn that has nothing to do.
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = self.codec.decode(self.socket.recv(zmq.NOBLOCK))
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close the socket; queued messages get a second to leave."""
        self.socket.close(linger=1000)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, bind: bool) -> zmq.Socket[bytes]:
    """A DEALER for `endpoint` (ipc://, inproc:// or tcp://) with no high-water mark and a bounded frame size."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
    (socket.bind if bind else socket.connect)(endpoint)
    return socket
