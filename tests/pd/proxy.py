"""A TCP proxy before an engine's control socket, which knows enough of ZMTP 3 to lose or delay whole messages."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from diptych.transfer.control import CONTROL_GUARD, decode_control

GREETING_NBYTES = 64
MORE, LONG_SIZE, COMMAND = 1, 2, 4

# Seconds to hold a message back; None: it is lost.
Fate = Callable[[list[bytes]], float | None]


def kind_of(frames: list[bytes]) -> str:
    """The name of a message: "Registration", "TransferInfo", or a control message's."""
    if frames[0] == CONTROL_GUARD:
        return type(decode_control(frames).message).__name__
    return "Registration" if frames[1] == b"None" else "TransferInfo"


class Proxy:
    """Listens on a port of its own and forwards what comes to `target`.

    rewrite: replacements within frames, of equal length, so that whoever is behind names the proxies instead of real
    ports. fate: asked for every message, in order; may be changed at any time. is_cut: whoever connects is cut off.
    """

    def __init__(self, target: int) -> None:
        self.rewrite: dict[bytes, bytes] = {}
        self.fate: Fate = lambda frames: 0.0
        self.seen: list[str] = []
        self.is_cut = False
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Reset every connection; new ones are taken, unless `is_cut`."""
        for connection in self._connections:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._connections += [client, server]
            for pump, source, sink in ((self._forward, client, server), (_copy, server, client)):
                self._threads.append(threading.Thread(target=_run, args=(pump, source, sink), daemon=True))
                self._threads[-1].start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        reader = source.makefile("rb")
        for _ in range(GREETING_NBYTES):  # each side waits for the other's beginning before it goes on
            sink.sendall(_exactly(reader, 1))
        for frames in _messages(reader, sink):
            frames = [self._rewritten(frame) for frame in frames]
            self.seen.append(kind_of(frames))
            delay_s = self.fate(frames)
            if delay_s is not None:
                time.sleep(delay_s)
                sink.sendall(_encoded(frames))

    def _rewritten(self, frame: bytes) -> bytes:
        for old, new in self.rewrite.items():
            frame = frame.replace(old, new)
        return frame


def _run(pump: Callable[[socket.socket, socket.socket], None], source: socket.socket, sink: socket.socket) -> None:
    """Until one end closes; then both do."""
    with suppress(OSError, EOFError):
        pump(source, sink)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(65536):
        sink.sendall(data)


def _exactly(reader, nbytes: int) -> bytes:
    data = reader.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data


def _messages(reader, sink: socket.socket) -> Iterator[list[bytes]]:
    """Multipart messages; commands are passed on at once."""
    frames: list[bytes] = []
    while True:
        head = _exactly(reader, 1)
        size = _exactly(reader, 8 if head[0] & LONG_SIZE else 1)
        body = _exactly(reader, int.from_bytes(size, "big"))
        if head[0] & COMMAND:
            sink.sendall(head + size + body)
            continue
        frames.append(body)
        if not head[0] & MORE:
            yield frames
            frames = []


def _encoded(frames: list[bytes]) -> bytes:
    parts = []
    for index, frame in enumerate(frames):
        flags = LONG_SIZE | (MORE if index + 1 < len(frames) else 0)
        parts += [bytes([flags]), struct.pack(">Q", len(frame)), frame]
    return b"".join(parts)
