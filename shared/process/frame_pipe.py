"""Frames between processes of one machine, over a stream socket: 4 bytes of length, then the frame."""

import select
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class FramePipe(Generic[T]):
    """One end of a pair of sockets of this machine: frames behind their length. Any thread may send."""

    def __init__(self, end: socket.socket, accepts: object) -> None:
        """accepts: the union of frames that come here."""
        self.socket = end
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(accepts)
        self._encoder, self._sending = msgspec.msgpack.Encoder(), threading.Lock()

    def send(self, frame: msgspec.Struct) -> None:
        """Waits for room. Raises OSError if the other end is closed."""
        self.send_encoded(self._encoder.encode(frame))

    def send_encoded(self, body: bytes) -> None:
        """As `send`, of a frame in msgpack."""
        data = _LENGTH.pack(len(body)) + body
        with self._sending:
            self.socket.sendall(data)

    @property
    def sources(self) -> tuple[int]:
        """For a poller."""
        return (self.socket.fileno(),)

    @property
    def is_readable(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])

    def receive(self) -> T | None:
        """Waits for the next frame. None: the other end is closed."""
        length = self._read(_LENGTH.size)
        body = None if length is None else self._read(_LENGTH.unpack(length)[0])
        return None if body is None else self._decoder.decode(body)

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.socket.recv(size - len(parts))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.socket.close()
