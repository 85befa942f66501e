"""Frames between a worker and a process that it starts, over a stream socket: 4 bytes of length, then the frame."""

import socket
import sys
from typing import Generic, TypeVar

import msgspec

READ_BYTES = 1 << 16
LENGTH_BYTES = 4

In = TypeVar("In")


class ControlFrame(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the frames. Both ends are of one version, because the worker starts the process."""


class FrameSocket(Generic[In]):
    """One end of the socket. Neither end ever waits for the other: what does not fit is kept until `flush`."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[In]") -> None:
        sock.setblocking(False)
        self.sock, self.is_open = sock, True
        self._decoder, self._encoder = decoder, msgspec.msgpack.Encoder()
        self._inbound, self._outbound = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbound)

    def send(self, frame: ControlFrame) -> None:
        data = self._encoder.encode(frame)
        self._outbound += len(data).to_bytes(LENGTH_BYTES, "little") + data
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        while self._outbound and self.is_open:
            try:
                sent = self.sock.send(self._outbound)
            except BlockingIOError:
                return
            except OSError:
                self.is_open = False
                return
            del self._outbound[:sent]

    def receive(self, most: int = sys.maxsize) -> list[In]:
        """Returns the frames that are there, at most so many. `is_open` is False once the other end is closed."""
        self.flush()
        frames, is_more = self._decode(most), True
        while self.is_open and is_more and len(frames) < most:
            try:
                data = self.sock.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open, is_more = bool(data), len(data) == READ_BYTES
            self._inbound += data
            frames += self._decode(most - len(frames))
        return frames

    def _decode(self, most: int) -> list[In]:
        """Takes whole frames out of what was received."""
        frames: list[In] = []
        at = 0
        while len(self._inbound) - at >= LENGTH_BYTES and len(frames) < most:
            size = int.from_bytes(self._inbound[at : at + LENGTH_BYTES], "little")
            if len(self._inbound) - at - LENGTH_BYTES < size:
                break
            frames.append(self._decoder.decode(self._inbound[at + LENGTH_BYTES : at + LENGTH_BYTES + size]))
            at += LENGTH_BYTES + size
        del self._inbound[:at]
        return frames

    def close(self) -> None:
        self.is_open = False
        self.sock.close()
