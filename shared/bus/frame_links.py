"""Links of their own for ordered streams of frames, beside the ring's links: between the ranks of a worker.

One end listens (`FrameListener`), the other ends dial (`FrameLink`). Frames arrive once and in order, encrypted on tcp.
A link that breaks is never restored, because frames on their way may be lost: both ends count as closed from then on.
All of it is for one thread at a time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.poller import Readable
from blockyard.shared.bus.sockets import Sockets, readable, receive_frame, receive_routed, send_frame

WAIT_S = 60.0  # of one call of a poller

H = TypeVar("H", bound=msgspec.Struct)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED  # it could not connect
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_encode = msgspec.msgpack.Encoder().encode


class FrameEnd(Protocol[T_co]):
    """One end of a stream of frames in both directions: a `FramePipe` of one machine, or a link."""

    @property
    def sources(self) -> Sequence[Readable]:
        """For a poller: after each wait, ask `is_readable`."""

    @property
    def is_readable(self) -> bool:
        """Whether `receive` returns at once."""

    def send(self, frame: msgspec.Struct) -> None:
        """Raises OSError if the other end is closed, or takes nothing."""

    def send_encoded(self, body: bytes) -> None:
        """As `send`, of a frame in msgpack."""

    def receive(self) -> T_co | None:
        """Waits for the next frame. None: the other end is closed. Raises TimeoutError."""

    def close(self) -> None: ...


class FrameListener(Generic[H, T]):
    """The end that others dial. Each says first who it is; frames of a peer come once it is accepted."""

    def __init__(self, sockets: Sockets, hello: type[H], accepts: Any, on_hello: Callable[[bytes, H], None]) -> None:
        """hello: the first frame of a peer. accepts: the union of other frames. on_hello: also takes its route."""
        bound = sockets.bind_router()
        self.socket, self.endpoint = bound.socket, bound.endpoint
        self._hello, self._on_hello = hello, on_hello
        self._reader: FrameReader[H | T] = FrameReader(accepts | hello, Malformed())
        self._arrived: dict[bytes, deque[T]] = {}  # by route

    def accept(self, route: bytes, timeout_s: float) -> "AcceptedLink[T]":
        """Frames of a peer are kept for this end from here on. timeout_s: of its `receive`."""
        self._arrived[route] = deque()
        return AcceptedLink(self, route, timeout_s)

    def forget(self, route: bytes) -> None:
        """The peer is a stranger from here on."""
        self._arrived.pop(route, None)

    def send(self, route: bytes, body: bytes) -> None:
        """Raises ConnectionError if the peer is gone or its link is full."""
        try:
            send_frame(self.socket, body, route)
        except zmq.ZMQError as e:
            raise ConnectionError(f"its link is closed or full: {e}") from e

    def pump(self) -> None:
        while readable(self.socket):
            route, data = receive_routed(self.socket)
            frame = self._reader.read(data, route)
            if frame is None:
                continue
            if isinstance(frame, self._hello):
                self._on_hello(route, frame)
            elif (kept := self._arrived.get(route)) is not None:
                kept.append(frame)  # type: ignore[arg-type]  # not of type H

    def wait(self, timeout_s: float) -> None:
        """Waits for a frame of any peer, and takes it."""
        self.socket.poll(max(int(1000 * timeout_s), 0))
        self.pump()

    def arrived(self, route: bytes) -> deque[T]:
        """Returns the frames of an accepted peer that nobody has received."""
        self.pump()
        return self._arrived[route]

    def close(self) -> None:
        """Peers lose what they have not read."""
        self.socket.close(0)


class AcceptedLink(Generic[T]):
    """Implements `FrameEnd` at the listener. A peer that is gone is noticed by the next `send`."""

    def __init__(self, listener: FrameListener[Any, T], route: bytes, timeout_s: float) -> None:
        self._listener, self._route, self._timeout_s = listener, route, timeout_s
        self.sources: Sequence[Readable] = (listener.socket,)

    @property
    def is_readable(self) -> bool:
        return bool(self._listener.arrived(self._route))

    def send(self, frame: msgspec.Struct) -> None:
        self.send_encoded(_encode(frame))

    def send_encoded(self, body: bytes) -> None:
        self._listener.send(self._route, body)

    def receive(self) -> T | None:
        if not self.is_readable:
            self._listener.wait(self._timeout_s)
        if not self.is_readable:
            raise TimeoutError(f"no frame within {self._timeout_s:g} s")
        return self._listener.arrived(self._route).popleft()

    def close(self) -> None:
        """The peer is a stranger from here on; the listener's socket stays."""
        self._listener.forget(self._route)


class FrameLink(Generic[T]):
    """Implements `FrameEnd` at the peer that dials."""

    def __init__(self, sockets: Sockets, endpoint: str, accepts: object) -> None:
        """accepts: the union of frames that come here. Raises ConnectionError for an endpoint that is none."""
        try:
            self._socket = sockets.connect_dealer(endpoint, b"r", reconnects=False, monitored=_ENDED)
        except zmq.ZMQError as e:
            raise ConnectionError(f"{endpoint}: {e}") from e
        self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket()
        self.sources: Sequence[Readable] = (self._socket, self._monitor)
        self._reader: FrameReader[T] = FrameReader(accepts, Malformed())
        self._endpoint, self._has_ended = endpoint.encode(), False

    @property
    def is_readable(self) -> bool:
        return readable(self._socket) or self._ended()

    def send(self, frame: msgspec.Struct) -> None:
        self.send_encoded(_encode(frame))

    def send_encoded(self, body: bytes) -> None:
        if self._ended():
            raise ConnectionError("the link is closed")
        try:
            send_frame(self._socket, body)
        except zmq.ZMQError as e:
            raise ConnectionError(f"the link is full: {e}") from e

    def wait(self, timeout_s: float) -> bool:
        """Waits until `receive` returns at once. Returns False if the time is over."""
        if not self.is_readable:
            poller = zmq.Poller()
            for source in self.sources:
                poller.register(source, zmq.POLLIN)
            poller.poll(max(int(1000 * timeout_s), 0))
        return self.is_readable

    def receive(self) -> T | None:
        """Waits without limit."""
        while True:
            while not self.wait(WAIT_S):
                pass
            if not readable(self._socket):
                return None
            frame = self._reader.read(receive_frame(self._socket), self._endpoint)
            if frame is not None:
                return frame

    def of(self, accepts: object) -> "FrameLink[Any]":
        """Returns this link, for another union of frames that come from here on."""
        self._reader = FrameReader(accepts, Malformed())
        return self

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _ended(self) -> bool:
        while not self._has_ended and readable(self._monitor):
            recv_monitor_message(self._monitor)
            self._has_ended = True
        return self._has_ended
