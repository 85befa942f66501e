"""The links this process opened to its peers, and what becomes of them."""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.member_list import Event, MemberList
from blockyard.shared.bus.poller import Poller
from blockyard.shared.bus.sockets import Sockets, readable, receive_frame, send_frame
from blockyard.shared.messages import PROTOCOL_VERSION, Hello, Member

log = logging.getLogger(__name__)

HELLO_S = 4.0  # a member may be busy with a long step when it is dialled first
RETURN_S = 0.3  # a link that broke has this long to come back

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class OutboundLink:
    """Opens at construction; `greeted` once the peer's Hello came back."""

    def __init__(self, sockets: Sockets, member: Member, hello: bytes, now: float, again: bool = False) -> None:
        self.member = member
        self.again = again  # this link replaces one that broke
        self.greeted = False
        self.deadline = now + (RETURN_S if again else HELLO_S)
        self.socket = sockets.connect_dealer(member.endpoint, b"m")
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(_BROKEN)
        send_frame(self.socket, hello)

    def broke(self) -> bool:
        """True once the monitor has seen the connection end."""
        seen = False
        while readable(self.monitor):
            recv_monitor_message(self.monitor)
            seen = True
        return seen

    def overdue(self, now: float) -> bool:
        return not self.greeted and now > self.deadline

    def close(self, linger_ms: int = 0) -> None:
        """With linger 0, so that nothing queued here reaches the peer's successor."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class OutboundLinks:
    """One DEALER a peer and incarnation, opened on first use.

    A link that breaks makes its peer Gone at once and is tried once more: the same incarnation on a new link is
    Joined again, otherwise `lost` hears of it. `events` receives (incarnation, frame or event); `malformed` counts.
    """

    def __init__(
        self,
        sockets: Sockets,
        me: Member,
        accepts: Any,
        members: MemberList,
        poller: Poller,
        events: list[tuple[int, Any]],
        lost: Callable[[int], None],
        malformed: Malformed,
    ) -> None:
        self._sockets, self._me, self._members, self._poller = sockets, me, members, poller
        self._reader: FrameReader[Any] = FrameReader(accepts | Hello, malformed)
        self._events, self._lost, self._malformed = events, lost, malformed
        self._links: dict[int, OutboundLink] = {}

    def send(self, to: int, data: bytes) -> bool:
        """False if no such member is alive, or its link is full: it is then treated as lost."""
        member = self._members.members.get(to)
        if member is None or not member.endpoint:
            return False
        try:
            link = self._links.get(to) or self._dial(member, again=False)
        except zmq.ZMQError as e:  # an endpoint that libzmq does not take
            self._malformed.count(to, f"its endpoint {member.endpoint}: {e}")
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

    def receive(self, now: float, at_most: int) -> None:
        """Takes what waits on all links, and drops those whose peer is gone."""
        for incarnation, link in list(self._links.items()):
            if incarnation not in self._members.members and not link.again:
                self._forget(link)
                continue
            self._receive(link, at_most)
            if link.broke():
                self.broke(incarnation)
            elif link.overdue(now):
                self._give_up(link)

    def broke(self, incarnation: int) -> None:
        """Its connection ended, or it takes nothing more: gone, with one try to reach it again."""
        link = self._links[incarnation]
        if link.again:
            self._give_up(link)
            return
        self._forget(link)
        self._tell(self._members.link_broke(incarnation, time.monotonic()))
        self._dial(link.member, again=True)

    def close(self) -> None:
        """What was sent has a moment to leave."""
        for link in self._links.values():
            self._poller.remove(link.socket, link.monitor)
            link.close(linger_ms=200)

    def _receive(self, link: OutboundLink, at_most: int) -> None:
        if not readable(link.socket):  # nearly always: most links carry frames one way
            return
        peer = link.member.incarnation
        for _ in range(at_most):
            try:
                data = receive_frame(link.socket)
            except zmq.Again:
                return
            frame = self._reader.read(data, peer)
            if frame is None:
                continue
            if not isinstance(frame, Hello):
                self._events.append((peer, frame))
            elif not self._greeted(link, frame):
                self._give_up(link)
                return

    def _greeted(self, link: OutboundLink, hello: Hello) -> bool:
        """False if whoever answers is not the peer that was meant."""
        if hello.version != PROTOCOL_VERSION:
            words = f"{hello.name} speaks protocol {hello.version}, we {PROTOCOL_VERSION}"
            self._malformed.count(link.member.incarnation, words)
            return False
        if hello.incarnation != link.member.incarnation:
            return False
        link.greeted = True
        if link.again:
            link.again = False
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
