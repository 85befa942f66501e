"""The links this process opened to its peers, and what becomes of them."""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from blockyard.shared.frames import FrameReader, Malformed
from blockyard.shared.member_list import Event, MemberList
from blockyard.shared.messages import PROTOCOL_VERSION, Hello, Member
from blockyard.shared.outlink import OutLink
from blockyard.shared.sockets import Sockets, readable, receive_frame, send_frame
from blockyard.shared.watch import Watch

log = logging.getLogger(__name__)


class OutLinks:
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
        watch: Watch,
        events: list[tuple[int, Any]],
        lost: Callable[[int], None],
        malformed: Malformed,
    ) -> None:
        self._sockets, self._me, self._members, self._watch = sockets, me, members, watch
        self._reader: FrameReader[Any] = FrameReader(accepts | Hello, malformed)
        self._events, self._lost, self._malformed = events, lost, malformed
        self._links: dict[int, OutLink] = {}

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
            self._watch.remove(link.socket, link.monitor)
            link.close(linger_ms=200)

    def _receive(self, link: OutLink, at_most: int) -> None:
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

    def _greeted(self, link: OutLink, hello: Hello) -> bool:
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

    def _dial(self, member: Member, again: bool) -> OutLink:
        hello = Hello(PROTOCOL_VERSION, self._me.incarnation, self._me.name, member.incarnation)
        link = OutLink(self._sockets, member, msgspec.msgpack.encode(hello), time.monotonic(), again)
        self._links[member.incarnation] = link
        self._watch.add(link.socket, link.monitor)
        self._watch.wake()
        return link

    def _give_up(self, link: OutLink) -> None:
        self._forget(link)
        self._tell(self._members.link_broke(link.member.incarnation, time.monotonic()))
        self._lost(link.member.incarnation)
        self._watch.wake()

    def _forget(self, link: OutLink) -> None:
        del self._links[link.member.incarnation]
        self._watch.remove(link.socket, link.monitor)
        link.close()

    def _tell(self, events: list[Event]) -> None:
        self._events.extend((event.member.incarnation, event) for event in events)
