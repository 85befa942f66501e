"""A member's entry in the membership list and its direct links to other members.

Each member binds one ROUTER and opens one DEALER to each member it sends to; answers return on the same link. A link
serves one incarnation of its peer. When it breaks, the peer is Gone at once; if the same incarnation answers a new link
within 0.3 s it is Joined again, otherwise the registry removes it. The peer sees a second link of the same incarnation
and also reports Gone and Joined. So both sides treat a broken link like the death of the peer.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.inbound import InboundLinks
from blockyard.shared.bus.member_list import Event, Gone, Joined, MemberList
from blockyard.shared.bus.outbound import OutboundLinks
from blockyard.shared.bus.poller import Poller, Readable
from blockyard.shared.bus.registry_link import RegistryLink
from blockyard.shared.bus.sockets import Sockets
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import Frame, Hello, LinkLost, Member, Role, Stats
from blockyard.shared.process.liveness import LivenessPipe

In = TypeVar("In", bound=Frame)

MAX_FRAMES_A_TURN = 512  # per socket, so that no socket starves the others


def new_incarnation() -> int:
    """64 random bits, never 0."""
    return secrets.randbits(64) or 1


class Links(Generic[In]):
    """All sockets of one process. Not thread safe: one loop owns it.

    `accepts` is the union of frames this member accepts. Frames of other types are malformed: they are counted, logged
    once a sender, and dropped. With `own_heartbeat` a thread announces this member while its loop is busy with a step.
    `liveness` is told of each turn of the loop.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        bus: BusConfig,
        accepts: Any,
        model: str = "",
        own_heartbeat: bool = False,
        liveness: LivenessPipe | None = None,
    ) -> None:
        self._liveness = liveness or LivenessPipe(None)
        self._sockets = sockets = Sockets(bus)
        bound = sockets.bind_router()
        self.me = me = Member(name, role, new_incarnation(), bound.endpoint, model=model)
        self._encode = msgspec.msgpack.Encoder().encode
        self._list = MemberList(me.incarnation)
        self._malformed = Malformed()
        self._poller = Poller()
        self._poller.add(bound.socket)
        self._registry_link = RegistryLink(sockets, self._poller, bus.registry, me, self._malformed, own_heartbeat)
        reader: FrameReader[In | Hello] = FrameReader(accepts | Hello, self._malformed)
        self._in = InboundLinks(bound.socket, me, reader, self._list.members, self._opened_again)
        self._out = OutboundLinks(sockets, me, reader, self._list, self._poller, self._link_lost)

    @property
    def members(self) -> dict[int, Member]:
        """Live members by incarnation, without this one."""
        return self._list.members

    @property
    def malformed_total(self) -> int:
        """Frames that were dropped because they did not decode or came before a Hello."""
        return self._malformed.total

    def of(self, role: Role, model: str = "") -> list[Member]:
        """Returns the ready members of a role; with `model`, only members that serve it or serve any model."""
        live = self._list.members.values()
        return [m for m in live if m.role == role and m.ready and (not model or m.model in ("", model))]

    def update(self, **fields: Any) -> None:
        """Changes this member's entry and announces it at once, unless only `stats` changed."""
        if self.me.ready:  # a worker that wakes up reports its progress
            self._liveness.turned()
        self.me = msgspec.structs.replace(self.me, **fields)
        self._registry_link.update(self.me, urgent=fields.keys() != {"stats"})

    def count(self, stats: Stats) -> None:
        """Publishes counters, and adds the links' own."""
        self.update(stats=msgspec.structs.replace(stats, malformed_total=self.malformed_total))

    def send(self, to: int, frame: Frame) -> bool:
        """Queues a frame on the link to a member, opening it on first use. Never blocks.

        Returns False if no such member is alive or its link is full; a member with a full link is treated as lost.
        """
        sent = self._out.send(to, self._encode(frame))
        self._poller.wake()
        return sent

    def answer(self, to: int, frame: Frame) -> bool:
        """Sends on the link that member `to` opened to us. Returns False if there is none or it is full."""
        sent = self._in.send(to, self._encode(frame))
        self._poller.wake()
        return sent

    def poll(self, timeout_s: float) -> list[tuple[int, Event | In]]:
        """For plain threads: returns all arrived events, and waits up to `timeout_s` for the first."""
        events = self._drain()
        if events or timeout_s <= 0:
            return events
        self._poller.wait(min(timeout_s, self._registry_link.due_in()))
        return self._drain()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event | In]]:
        """For asyncio: yields frames of known peers and membership events in order of arrival, for ever."""
        self._poller.enter_loop()
        while True:
            self._poller.clear()
            events = self._drain()
            for event in events:
                yield event
            if events:
                await asyncio.sleep(0)  # lets HTTP connections run
            else:
                await self._poller.wait_in_loop(self._registry_link.due_in())

    def watch(self, *sources: Readable) -> None:
        """Makes `poll` return early, without events, while one of these sockets or descriptors is readable."""
        self._poller.add(*sources)

    def unwatch(self, *sources: Readable) -> None:
        """The sockets may be closed already."""
        self._poller.remove(*sources)

    def close(self) -> None:
        """Removes this member from the list and closes its links, which have 0.2 s to send queued frames."""
        self._out.close()
        self._poller.remove(self._in.socket)
        self._in.socket.close(200)
        self._registry_link.close()
        self._sockets.close()

    def __enter__(self) -> "Links[In]":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drain(self) -> list[tuple[int, Event | In]]:
        """Returns all arrived events. The membership list comes first, because it says which peers are gone."""
        self._liveness.turned()
        now = time.monotonic()
        events: list[tuple[int, Event | In]] = self._out.take_events()  # of sends since the last call
        for news in self._registry_link.beat(now):
            events.extend((event.member.incarnation, event) for event in self._list.push(news, now))
        self._out.receive(now, MAX_FRAMES_A_TURN)
        events += self._out.take_events()
        self._in.receive(events, MAX_FRAMES_A_TURN)
        return events

    def _link_lost(self, incarnation: int) -> None:
        self._registry_link.send(LinkLost(incarnation))

    def _opened_again(self, peer: int) -> list[Event]:
        member = self._list.members.get(peer)
        return [Gone(member), Joined(member)] if member is not None else []
