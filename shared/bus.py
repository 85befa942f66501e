"""A member's place in the ring: its entry in the membership list and its direct links.

One pattern: each member binds one ROUTER and opens one DEALER to each member it sends to; answers return on
the same link. A link serves one incarnation of its peer. When it breaks, the peer is Gone at once; if the same
incarnation answers a new link within 0.3 s it is Joined again, otherwise the registry is told. The other end sees
the second link of the same incarnation, and for it too the peer is Gone and Joined: a link that broke is one case
with a death, on both sides.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from blockyard.shared.config.process import BusConfig
from blockyard.shared.heart import Heart
from blockyard.shared.inlinks import InLinks
from blockyard.shared.member_list import Changed, Event, Gone, Joined, MemberList
from blockyard.shared.messages import PROTOCOL_VERSION, Frame, Hello, LinkLost, Member, Role, Stats
from blockyard.shared.outlink import OutLink
from blockyard.shared.sockets import Sockets, descriptor

__all__ = ["Changed", "Event", "Gone", "Joined", "Links", "new_incarnation"]

log = logging.getLogger(__name__)

In = TypeVar("In", bound=Frame)

MAX_FRAMES_A_TURN = 512  # a socket: others get their turn


def new_incarnation() -> int:
    """64 random bits, never 0."""
    return secrets.randbits(64) or 1


class Links(Generic[In]):
    """All sockets of one process. Not thread safe: one loop owns it.

    `accepts` is the union of frames this member takes; frames of other types are malformed here: counted,
    logged once a sender, and dropped. With `own_heartbeat` a thread announces this member while the loop is
    deep in a step.
    """

    def __init__(
        self, name: str, role: Role, bus: BusConfig, accepts: Any, model: str = "", own_heartbeat: bool = False
    ) -> None:
        self._sockets = Sockets(bus)
        bound = self._sockets.bind_router()
        self.me = Member(name, role, new_incarnation(), bound.endpoint, model=model)
        self._in: InLinks = InLinks(bound.socket, self.me, accepts, self._opened_again)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(accepts | Hello)
        self._encode = msgspec.msgpack.Encoder().encode
        self._list = MemberList(self.me.incarnation)
        self._out: dict[int, OutLink] = {}
        self._events: list[tuple[int, Event | In]] = []
        self._heart = Heart(self._sockets, bus.registry, self.me, own_thread=own_heartbeat)
        self._poller = zmq.Poller()
        self._watched: list[zmq.Socket[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awake = asyncio.Event()
        for sock in (bound.socket, self._heart.socket):
            self._watch(sock)

    @property
    def members(self) -> dict[int, Member]:
        """Live members by incarnation, without this one."""
        return self._list.members

    def of(self, role: Role, model: str = "") -> list[Member]:
        """Live members of a role that are ready; with `model`, those that serve it or any."""
        return [
            m
            for m in self._list.members.values()
            if m.role == role and m.ready and (not model or m.model in ("", model))
        ]

    def update(self, **fields: Any) -> None:
        """Changes this member's entry; goes out at once unless only `stats` changed."""
        self.me = msgspec.structs.replace(self.me, **fields)
        self._heart.update(self.me, urgent=fields.keys() != {"stats"})

    def count(self, stats: Stats) -> None:
        """Publishes counters; adds those the links keep themselves."""
        self.update(stats=msgspec.structs.replace(stats, malformed_total=self._in.malformed))

    def send(self, to: int, frame: Frame) -> bool:
        """Queues a frame on the link to a member, opening it on first use. Never blocks.

        False if no such member is alive, or its link is full: it is then treated as lost.
        """
        member = self._list.members.get(to)
        if member is None or not member.endpoint:
            return False
        link = self._out.get(to) or self._dial(member, again=False)
        try:
            link.socket.send(self._encode(frame), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the link to %s is full: treated as lost", link.member.name)
            self._broke(link)
            return False
        self._wake_soon()
        return True

    def answer(self, to: int, frame: Frame) -> bool:
        """Sends on the link that member `to` opened to us. False if there is none or it is full."""
        sent = self._in.send(to, self._encode(frame))
        self._wake_soon()
        return sent

    def poll(self, timeout_s: float) -> list[tuple[int, Event | In]]:
        """For plain threads: what has arrived, waiting up to `timeout_s` for the first of it."""
        events = self._drain()
        if events or timeout_s <= 0:
            return events
        self._poller.poll(math.ceil(1000 * min(timeout_s, self._heart.due_in())))
        return self._drain()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event | In]]:
        """For asyncio: frames of known peers and membership events, in order of arrival, for ever."""
        self._loop = asyncio.get_running_loop()
        for sock in self._watched:
            self._loop.add_reader(descriptor(sock), self._awake.set)
        while True:
            self._awake.clear()
            events = self._drain()
            for event in events:
                yield event
            if events:
                await asyncio.sleep(0)  # HTTP connections get their turn
                continue
            timer = self._loop.call_later(self._heart.due_in(), self._awake.set)
            await self._awake.wait()
            timer.cancel()

    def close(self) -> None:
        """Takes this member off the list; what was sent has a moment to leave."""
        for link in list(self._out.values()):
            self._unwatch(link)
            link.close(linger_ms=200)
        for sock in (self._in.socket, self._heart.socket):
            self._unwatch_socket(sock)
        self._in.socket.close(200)
        self._heart.close()
        self._sockets.close()

    def __enter__(self) -> "Links[In]":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drain(self) -> list[tuple[int, Event | In]]:
        """Everything that can be had without waiting. Membership first: it says who is gone."""
        now = time.monotonic()
        for news in self._heart.beat(now):
            self._happened(self._list.push(news, now))
        for incarnation in [i for i in self._out if i not in self._list.members and not self._out[i].again]:
            self._forget(self._out[incarnation])
        for link in list(self._out.values()):
            self._receive(link)
            if link.broke():
                self._broke(link)
            elif link.overdue(now):
                self._give_up(link)
        self._in.receive(self._events, MAX_FRAMES_A_TURN)
        events, self._events = self._events, []
        return events

    def _receive(self, link: OutLink) -> None:
        peer = link.member.incarnation
        for _ in range(MAX_FRAMES_A_TURN):
            try:
                data = link.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                frame = self._decoder.decode(data)
            except msgspec.DecodeError as e:
                self._in.count_malformed(peer, e)
                continue
            if not isinstance(frame, Hello):
                self._events.append((peer, frame))
            elif frame.version != PROTOCOL_VERSION:
                log.error("%s speaks protocol %d, we %d", frame.name, frame.version, PROTOCOL_VERSION)
                self._give_up(link)
                return
            elif frame.incarnation != peer:
                self._give_up(link)
                return
            else:
                link.greeted = True
                if link.again:
                    link.again = False
                    self._happened(self._list.link_returned(link.member))

    def _dial(self, member: Member, again: bool) -> OutLink:
        hello = self._encode(Hello(PROTOCOL_VERSION, self.me.incarnation, self.me.name, member.incarnation))
        link = OutLink(self._sockets, member, hello, time.monotonic(), again)
        self._out[member.incarnation] = link
        self._watch(link.socket)
        self._watch(link.monitor)
        return link

    def _broke(self, link: OutLink) -> None:
        """Gone at once; one try to reach the same incarnation on a new link."""
        again = link.again
        self._forget(link)
        self._happened(self._list.link_broke(link.member.incarnation, time.monotonic()))
        if again:
            self._heart.send(LinkLost(link.member.incarnation))
        else:
            self._dial(link.member, again=True)
        self._wake_soon()

    def _give_up(self, link: OutLink) -> None:
        self._forget(link)
        self._happened(self._list.link_broke(link.member.incarnation, time.monotonic()))
        self._heart.send(LinkLost(link.member.incarnation))
        self._wake_soon()

    def _forget(self, link: OutLink) -> None:
        del self._out[link.member.incarnation]
        self._unwatch(link)
        link.close()

    def _opened_again(self, peer: int) -> list[Event]:
        member = self._list.members.get(peer)
        return [Gone(member), Joined(member)] if member is not None else []

    def _happened(self, events: list[Event]) -> None:
        self._events.extend((event.member.incarnation, event) for event in events)

    def _watch(self, sock: "zmq.Socket[Any]") -> None:
        self._poller.register(sock, zmq.POLLIN)
        self._watched.append(sock)
        if self._loop is not None:
            self._loop.add_reader(descriptor(sock), self._awake.set)

    def _unwatch(self, link: OutLink) -> None:
        self._unwatch_socket(link.socket)
        self._unwatch_socket(link.monitor)

    def _unwatch_socket(self, sock: "zmq.Socket[Any]") -> None:
        self._poller.unregister(sock)
        self._watched.remove(sock)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(descriptor(sock))

    def _wake_soon(self) -> None:
        """libzmq's descriptors are edge-triggered, and a send may swallow the edge of what arrived meanwhile."""
        if self._loop is not None:
            self._awake.set()
