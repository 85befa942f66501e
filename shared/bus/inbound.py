"""The links that peers opened to this process: one bound ROUTER. The first frame of each link is a Hello."""

import logging
from collections.abc import Callable, Container
from typing import Any

import msgspec
import zmq

from blockyard.shared.bus.frames import FrameReader, in_log
from blockyard.shared.bus.member_list import Event
from blockyard.shared.bus.sockets import readable, receive_routed, send_frame
from blockyard.shared.messages import PROTOCOL_VERSION, Hello, Member

log = logging.getLogger(__name__)

MAX_UNLISTED = 4096  # remembered links of peers off the membership list; the newest are kept


class InboundLinks:
    """Knows each link's sender by its Hello. Drops frames before a Hello, and links meant for another incarnation."""

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        me: Member,
        reader: FrameReader[Any],
        members: Container[int],
        again: Callable[[int], list[Event]],
    ) -> None:
        """`members`: the incarnations on the membership list; the container changes with the list.

        `again`: returns the events to report when a peer opens a second link because its first one broke.
        """
        self.socket = router
        self._me = me
        self._members = members
        self._again = again
        self._reader = reader
        self._hello = msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, me.incarnation, me.name))
        self._sender: dict[bytes, int] = {}  # routing id -> incarnation
        self._route: dict[int, bytes] = {}  # incarnation -> its newest routing id
        self._prune_at = 2 * MAX_UNLISTED  # links

    def receive(self, events: list[tuple[int, Any]], at_most: int) -> None:
        """Appends (sender, frame) for up to `at_most` arrived frames."""
        if not readable(self.socket):
            return
        for _ in range(at_most):
            try:
                route, data = receive_routed(self.socket)
            except zmq.Again:
                return
            sender = self._sender.get(route)
            frame = self._reader.read(data, route if sender is None else sender)
            if frame is None:
                continue
            if isinstance(frame, Hello):
                self._greet(route, frame, events)
            elif sender is not None:
                events.append((sender, frame))
            else:
                self._reader.malformed.count(route, f"{type(frame).__name__} without a Hello")

    def send(self, to: int, data: bytes) -> bool:
        """Sends on the newest link that `to` opened. Returns False if there is none, it closed, or it is full."""
        route = self._route.get(to)
        if route is None:
            return False
        try:
            send_frame(self.socket, data, route)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            del self._route[to]
            self._sender.pop(route, None)
            return False
        return True

    def _greet(self, route: bytes, hello: Hello, events: list[tuple[int, Any]]) -> None:
        if hello.to == self._me.incarnation and hello.version == PROTOCOL_VERSION:
            if len(self._sender) >= self._prune_at:
                self._prune()
            if hello.incarnation in self._route:  # frames in flight on its first link are lost
                events.extend((hello.incarnation, event) for event in self._again(hello.incarnation))
            self._sender[route] = hello.incarnation
            self._route[hello.incarnation] = route
        elif hello.version != PROTOCOL_VERSION:
            words = f"{hello.name} speaks protocol {hello.version}, we {PROTOCOL_VERSION}"
            self._reader.malformed.count(hello.incarnation, words)  # one line, though it dials again
        try:
            send_frame(self.socket, self._hello, route)
        except zmq.ZMQError as e:
            log.debug("%s left before it was greeted: %s", in_log(hello.name), e)

    def _prune(self) -> None:
        """Forgets links of peers off the membership list, oldest first, and links that a newer one replaced.

        A peer sends Hello before the list names it, so the newest unlisted links are kept.
        """
        kept: dict[bytes, int] = {}
        unlisted: dict[bytes, int] = {}
        for route, incarnation in self._sender.items():
            if self._route.get(incarnation) == route:
                (kept if incarnation in self._members else unlisted)[route] = incarnation
        kept |= dict(list(unlisted.items())[-MAX_UNLISTED:])
        self._sender = kept
        self._route = {incarnation: route for route, incarnation in kept.items()}
        self._prune_at = len(kept) + MAX_UNLISTED
