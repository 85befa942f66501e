"""The links this process opened to its peers: a DEALER each, with a monitor that reports a broken connection."""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from blockyard.shared.bus.frames import FrameReader
from blockyard.shared.bus.member_list import REFUSED_S, Event, MemberList
from blockyard.shared.bus.poller import Poller
from blockyard.shared.bus.sockets import Sockets, readable, receive_frame, send_frame
from blockyard.shared.messages import PROTOCOL_VERSION, Hello, Member

log = logging.getLogger(__name__)

HELLO_S = 4.0  # the peer may be busy with a long step
RETURN_S = 0.3  # a broken link must be restored within this time

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class OutboundLink:
    """One DEALER to one incarnation of a peer. It connects at construction and is `greeted` after the peer's Hello."""

    def __init__(self, sockets: Sockets, member: Member, hello: bytes, now: float, again: bool = False) -> None:
        self.member = member
        self.again = again  # this link replaces one that broke
        self.greeted = False
        self.deadline = now + (RETURN_S if again else HELLO_S)
        self.socket = sockets.connect_dealer(member.endpoint, b"m")
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(_BROKEN)
        send_frame(self.socket, hello)

    def broke(self) -> bool:
        """Returns True once the monitor has reported the end of the connection."""
        seen = False
        while readable(self.monitor):
            recv_monitor_message(self.monitor)
            seen = True
        return seen

    def on_hello(self) -> bool:
        """The peer answered. Returns True if this link replaces one that broke."""
        replaced, self.again, self.greeted = self.again, False, True
        return replaced

    def overdue(self, now: float) -> bool:
        return not self.greeted and now > self.deadline

    def close(self, linger_ms: int = 0) -> None:
        """Linger 0 keeps queued frames from reaching the peer's next incarnation."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class OutboundLinks:
    """One DEALER a peer and incarnation, opened on first use.

    When a link breaks its peer is Gone at once, and one new link is tried. If the same incarnation answers it is Joined
    again, otherwise `lost` is called.
    """

    def __init__(
        self,
        sockets: Sockets,
        me: Member,
        reader: FrameReader[Any],
        members: MemberList,
        poller: Poller,
        lost: Callable[[int], None],
    ) -> None:
        self._sockets, self._me, self._members, self._poller = sockets, me, members, poller
        self._reader, self._lost = reader, lost
        self._links: dict[int, OutboundLink] = {}
        self._events: list[tuple[int, Any]] = []

    def send(self, to: int, data: bytes) -> bool:
        """False if no such member is alive, or its link is full: it is then treated as lost."""
        member = self._members.members.get(to)
        if member is None or not member.endpoint:
            return False
        try:
            link = self._links.get(to) or self._dial(member, again=False)
        except zmq.ZMQError as e:  # an endpoint that libzmq does not take
            self._reader.malformed.count(to, f"its endpoint {member.endpoint}: {e}")
            self._tell(self._members.link_broke(to, time.monotonic()))
            self._lost(to)
            return False
        try:
            send_frame(link.socket, data)
        except zmq.Again:
            log.warning("the link to %s is full: treated as lost", link.member.name)
            self.broke(to)
            return False
        return True

    def take_events(self) -> list[tuple[int, Any]]:
        """Returns (incarnation, frame or membership event) since the last call, in order."""
        events, self._events = self._events, []
        return events

    def receive(self, now: float, at_most: int) -> None:
        """Reads arrived frames of all links, and closes links to peers that are gone."""
        for incarnation, link in list(self._links.items()):
            if incarnation not in self._members.members and not link.again:
                self._forget(link)
                continue
            if not self._receive(link, at_most):
                continue
            if link.broke():
                self.broke(incarnation)
            elif link.overdue(now):
                self._give_up(link)

    def broke(self, incarnation: int) -> None:
        """Handles a closed or full link: the peer is Gone, and one new link is tried."""
        link = self._links[incarnation]
        if link.again:
            self._give_up(link)
            return
        self._forget(link)
        self._tell(self._members.link_broke(incarnation, time.monotonic()))
        self._dial(link.member, again=True)

    def close(self) -> None:
        """Closes all links, which have 0.2 s to send queued frames."""
        for link in self._links.values():
            self._poller.remove(link.socket, link.monitor)
            link.close(linger_ms=200)

    def _receive(self, link: OutboundLink, at_most: int) -> bool:
        """Returns False if the link was closed, because another incarnation or protocol version answered."""
        if not readable(link.socket):  # the usual case: most links carry frames one way
            return True
        peer = link.member.incarnation
        for _ in range(at_most):
            try:
                data = receive_frame(link.socket)
            except zmq.Again:
                return True
            frame = self._reader.read(data, peer)
            if isinstance(frame, Hello):
                if not self._greeted(link, frame):
                    return False
            elif frame is not None and link.greeted:
                self._events.append((peer, frame))
            elif frame is not None:
                self._reader.malformed.count(peer, f"{type(frame).__name__} without a Hello")
        return True

    def _greeted(self, link: OutboundLink, hello: Hello) -> bool:
        """Returns False if another incarnation or protocol version answered: the link is closed."""
        peer = link.member.incarnation
        if hello.version != PROTOCOL_VERSION:
            self._reader.malformed.count(peer, f"{hello.name} speaks protocol {hello.version}, we {PROTOCOL_VERSION}")
            self._forget(link)  # the registry is not told: members of its version have good links to it
            self._tell(self._members.link_broke(peer, time.monotonic(), REFUSED_S))
            return False
        if hello.incarnation != peer:
            self._reader.malformed.count(peer, f"{hello.name} answers for it at {link.member.endpoint}")
            self._give_up(link)
            return False
        if link.on_hello():
            self._tell(self._members.link_returned(link.member))
        return True

    def _dial(self, member: Member, again: bool) -> OutboundLink:
        hello = Hello(PROTOCOL_VERSION, self._me.incarnation, self._me.name, member.incarnation)
        link = OutboundLink(self._sockets, member, msgspec.msgpack.encode(hello), time.monotonic(), again)
        self._links[member.incarnation] = link
        self._poller.add(link.socket, link.monitor)
        self._poller.wake()
        return link

    def _give_up(self, link: OutboundLink) -> None:
        self._forget(link)
        self._tell(self._members.link_broke(link.member.incarnation, time.monotonic()))
        self._lost(link.member.incarnation)
        self._poller.wake()

    def _forget(self, link: OutboundLink) -> None:
        del self._links[link.member.incarnation]
        self._poller.remove(link.socket, link.monitor)
        link.close()

    def _tell(self, events: list[Event]) -> None:
        self._events.extend((event.member.incarnation, event) for event in events)
