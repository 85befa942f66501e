"""The link to the registry: announces this member twice a second and receives the list."""

import threading
import time

import msgspec
import zmq

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.poller import Poller
from blockyard.shared.bus.sockets import Sockets, readable, receive_frame, send_frame
from blockyard.shared.messages import Announce, Frame, Leave, Member, Members

HEARTBEAT_S = 0.5
DEAF_S = 3.0  # the registry sends its list every second: after this time without one the member dials anew


class RegistryLink:
    """Sends heartbeats from the owner's loop; with `own_thread` a thread also repeats the last entry.

    A link without news is replaced by a new one: the registry may have stood still, and the old connection be dead.
    """

    def __init__(
        self,
        sockets: Sockets,
        poller: Poller,
        registry: str,
        me: Member,
        malformed: Malformed,
        own_thread: bool = False,
    ) -> None:
        self._sockets, self._poller, self._registry = sockets, poller, registry
        self._socket, self._dialled_at = self._dial(b"m"), time.monotonic()
        poller.add(self._socket)
        self._reader: FrameReader[Members] = FrameReader(Members, malformed)
        self._incarnation = me.incarnation
        self._heard_at = self._dialled_at  # time of the last list
        self._next = 0.0
        self._entry = msgspec.msgpack.encode(Announce(me))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True) if own_thread else None
        if self._thread is not None:
            self._thread.start()

    def update(self, me: Member, urgent: bool) -> None:
        """Replaces the announced entry. An urgent one is sent at once instead of with the next heartbeat."""
        self._entry = msgspec.msgpack.encode(Announce(me))
        if urgent and not self._send_raw(self._entry):
            self._next = 0.0

    def send(self, frame: Frame) -> None:
        """Best effort: the frame is lost if the registry is down."""
        self._send_raw(msgspec.msgpack.encode(frame))

    def due_in(self) -> float:
        """Returns the seconds until the next heartbeat."""
        return max(0.0, self._next - time.monotonic())

    def beat(self, now: float) -> list[Members]:
        """Sends a heartbeat if one is due, and returns the lists that arrived."""
        if now >= self._next:
            # nothing is queued while the registry is not connected, so retry soon
            self._next = now + (HEARTBEAT_S if self._send_raw(self._entry) else HEARTBEAT_S / 10)
        lists = []
        while readable(self._socket):
            news = self._reader.read(receive_frame(self._socket), b"message_bus")
            if news is not None:
                lists.append(news)
                self._heard_at = now
        if self._is_deaf(now, self._dialled_at):
            self._poller.remove(self._socket)
            self._socket.close(0)
            self._socket, self._dialled_at = self._dial(b"m"), now
            self._poller.add(self._socket)
            self._next = now
        return lists

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.send(Leave(self._incarnation))
        self._poller.remove(self._socket)
        self._socket.close(200)

    def _dial(self, prefix: bytes) -> "zmq.Socket[bytes]":
        return self._sockets.connect_dealer(self._registry, prefix, only_when_connected=True)

    def _is_deaf(self, now: float, dialled_at: float) -> bool:
        return now - max(self._heard_at, dialled_at) > DEAF_S

    def _send_raw(self, data: bytes) -> bool:
        try:
            send_frame(self._socket, data)
        except zmq.Again:
            return False
        return True

    def _repeat(self) -> None:
        # "h": the registry pushes its list to "m" sockets only
        sock, dialled_at = self._dial(b"h"), time.monotonic()
        while not self._stop.wait(HEARTBEAT_S):
            if self._is_deaf(now := time.monotonic(), dialled_at):  # or the loop reads nothing during a long step
                sock.close(0)
                sock, dialled_at = self._dial(b"h"), now
                continue  # it connects meanwhile
            try:
                send_frame(sock, self._entry)
            except zmq.Again:
                continue  # the registry is down; the next heartbeat repeats it
        sock.close(0)
