"""The links that peers opened to this process: one bound ROUTER, a Hello first on each."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from blockyard.shared.member_list import Event
from blockyard.shared.messages import PROTOCOL_VERSION, Hello, Member
from blockyard.shared.sockets import readable

log = logging.getLogger(__name__)

MAX_ROUTES = 4096


class InLinks:
    """Knows each link's sender by its Hello; frames before one, or meant for another incarnation, are dropped."""

    def __init__(
        self, router: "zmq.Socket[bytes]", me: Member, accepts: Any, again: Callable[[int], list[Event]]
    ) -> None:
        """`again`: what it means to this member that a peer opened a second link, its first being lost."""
        self.socket = router
        self.malformed = 0
        self._me = me
        self._again = again
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(accepts | Hello)
        self._hello = msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, me.incarnation, me.name))
        self._sender: dict[bytes, int] = {}  # routing id -> incarnation
        self._route: dict[int, bytes] = {}  # incarnation -> its newest routing id
        self._complained: set[int | bytes] = set()

    def receive(self, events: list[tuple[int, Any]], at_most: int) -> None:
        """Appends (sender, frame) for up to `at_most` frames that wait."""
        if not readable(self.socket):
            return
        for _ in range(at_most):
            try:
                route, data = self.socket.recv_multipart(zmq.NOBLOCK)[:2]
            except zmq.Again:
                return
            except ValueError:  # a frame without a payload
                self.malformed += 1
                continue
            try:
                frame = self._decoder.decode(data)
            except msgspec.DecodeError as e:
                self.count_malformed(self._sender.get(route, route), e)
                continue
            if isinstance(frame, Hello):
                self._greet(route, frame, events)
            elif (sender := self._sender.get(route)) is not None:
                events.append((sender, frame))
            else:
                self.malformed += 1

    def send(self, to: int, data: bytes) -> bool:
        """On the newest link that `to` opened; False if there is none, it closed, or it is full."""
        route = self._route.get(to)
        if route is None:
            return False
        try:
            self.socket.send_multipart((route, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            del self._route[to]
            self._sender.pop(route, None)
            return False
        return True

    def count_malformed(self, sender: int | bytes, error: Exception) -> None:
        """Counted always, logged once a sender."""
        self.malformed += 1
        if sender not in self._complained:
            self._complained.add(sender)
            log.warning("dropped a malformed frame of %s: %s", sender, error)

    def _greet(self, route: bytes, hello: Hello, events: list[tuple[int, Any]]) -> None:
        if hello.to == self._me.incarnation and hello.version == PROTOCOL_VERSION:
            if len(self._sender) >= MAX_ROUTES:  # the oldest are of peers long gone
                del self._sender[next(iter(self._sender))]
            if hello.incarnation in self._route:  # what was on the way on its first link is lost
                events.extend((hello.incarnation, event) for event in self._again(hello.incarnation))
            self._sender[route] = hello.incarnation
            self._route[hello.incarnation] = route
        elif hello.version != PROTOCOL_VERSION:
            log.error("%s speaks protocol %d, we %d: its link is refused", hello.name, hello.version, PROTOCOL_VERSION)
        try:
            self.socket.send_multipart((route, self._hello), zmq.NOBLOCK)
        except zmq.ZMQError as e:
            log.info("%s was gone before it could be greeted: %s", hello.name, e)
