"""Replicas with the experts together that are processes of `blockyard run`, on any hosts (--data-parallel-rank).

Replica 0 takes the others up as a leader does ranks of other hosts (`entrance`, `joining`), and agrees with them on
each step: it calls all, gets an offer of each, and tells all of them all offers. One that ends, or is silent for 4 s,
ends all.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from blockyard.services.gpu_worker.parallel.commands import RankFailed, Sign
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.replicas import Connect, ReplicaRanks, StepOffer
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.ranks import network
from blockyard.services.gpu_worker.ranks.entrance import RankEntrance
from blockyard.services.gpu_worker.ranks.group_digest import make_digest
from blockyard.services.gpu_worker.ranks.joining import JoinedGroup, RankTicket, join
from blockyard.services.gpu_worker.ranks.replica_team import LEADER, OnEnd
from blockyard.services.gpu_worker.ranks.several_hosts import OtherLeaders
from blockyard.services.gpu_worker.ranks.signs import RankSigns
from blockyard.shared.bus.frame_links import FrameEnd
from blockyard.shared.bus.poller import Readable
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, RankLostError
from blockyard.shared.messages import RankAddress
from blockyard.shared.messages.base import Frame

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.parallel.rank_group import RankGroup

FLAG = "--data-parallel-rank"
FIRST = f"{FLAG} 0"
T = TypeVar("T")


class StepCall(Frame, frozen=True):
    """Replica 0 asks for an offer for the next step."""


class StepAgreed(Frame, frozen=True):
    """What all replicas have for it."""

    offers: list[StepOffer]  # by replica


class Offers(Protocol):
    """The offers of all replicas, as one of them sees them."""

    @property
    def sources(self) -> list[Readable]: ...

    @property
    def is_called(self) -> bool: ...

    def agree(self, offer: StepOffer) -> list[StepOffer]: ...


class FirstOffers:
    """Implements `Offers` of replica 0."""

    def __init__(self, others: Mapping[int, FrameEnd[StepOffer]]) -> None:
        self._others = [others[replica] for replica in sorted(others)]

    @property
    def sources(self) -> list[Readable]:
        return list(dict.fromkeys(source for one in self._others for source in one.sources))

    @property
    def is_called(self) -> bool:
        return any(one.is_readable for one in self._others)

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        self._tell(StepCall())
        offers = [offer, *map(_wait, self._others)]
        self._tell(StepAgreed(offers))
        return offers

    def _tell(self, frame: Frame) -> None:
        for replica, one in enumerate(self._others, 1):
            try:
                one.send(frame)
            except OSError as e:
                raise RankLostError(f"replica {replica} takes no offers: {e.strerror or e}") from e


class OtherOffers:
    """Implements `Offers` of another replica."""

    def __init__(self, first: FrameEnd[StepCall | StepAgreed]) -> None:
        self._first, self._is_called = first, False

    @property
    def sources(self) -> list[Readable]:
        return list(self._first.sources)

    @property
    def is_called(self) -> bool:
        if not self._is_called and self._first.is_readable:
            self._is_called = isinstance(_wait(self._first), StepCall)
        return self._is_called

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        self._is_called = False
        try:
            self._first.send(offer)
        except OSError as e:
            raise RankLostError(f"replica 0 takes no offers: {e.strerror or e}") from e
        while not isinstance(frame := _wait(self._first), StepAgreed):
            pass
        return frame.offers


class DistantReplicas:
    """Implements `StepAgreement`."""

    def __init__(
        self,
        replica: Shard,
        offers: Offers,
        signs: Mapping[int, FrameEnd[Sign]],
        meeting: Meeting,
        on_end: OnEnd,
        links: RankEntrance | JoinedGroup,
    ) -> None:
        """on_end: called in a thread when a replica is gone; must end this process. links: of `offers` and `signs`."""
        self.folder, self.store = meeting.folder, meeting.store
        self._replica, self._offers, self._on_end = replica, offers, on_end
        self._links = links
        self._ranks = ReplicaRanks(meeting, replica, LEADER)
        self._watch = RankSigns(signs, self._lost)
        self._watch.start()

    def connect(self, connect: Connect) -> "RankGroup":
        return self._ranks.connect(connect)

    def connect_stage(self, connect: Connect, shard: Shard, stage: int) -> "RankGroup":
        return self._ranks.connect_stage(connect, shard, stage)

    @property
    def sources(self) -> list[Readable]:
        """What is readable when a step is to be offered."""
        return self._offers.sources

    @property
    def is_called(self) -> bool:
        return self._offers.is_called

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        return self._offers.agree(offer)

    def serve(self) -> None:
        """The start is over."""
        self._watch.serve()

    def close(self) -> None:
        """The others end."""
        self._watch.stop()
        self._links.close()

    def _lost(self, replica: int, what: str, failed: RankFailed | None) -> None:
        self._on_end(RankLostError(f"replica {replica} of {self._replica.size} {what}; all replicas end"))


def meet_distant(
    config: WorkerConfig,
    folder: Path,
    announce: Callable[[RankAddress], None],
    turn: Callable[[], None],
    on_end: OnEnd,
) -> DistantReplicas:
    """Waits for all replicas. folder: private to this process. announce: puts an address on the membership list.

    turn: called some times a second; ends the wait by raising. Raises ConfigError or LoadError.
    """
    replica, interface = Shard(config.replica, config.expert_replicas), network.interface_of(config.process.bus)
    own = Path(tempfile.mkdtemp(prefix="replicas-", dir=folder))
    if replica.rank:
        place = f"{FLAG} {replica.rank} ({socket.gethostname()})"
        joined = join(
            RankTicket(
                *(replica.rank, place, config, make_digest(config), config.rank_group, str(own), interface),
                *(os.getpid(), None, None, FIRST),
            ),
            config.rank_timeout_s,
            turn,
        )
        offers = OtherOffers(joined.commands.of(StepCall | StepAgreed))
        meeting = Meeting(own, interface, joined.store)
        return DistantReplicas(replica, offers, {0: joined.signs}, meeting, on_end, joined)
    places = {i: f"{FLAG} {i}" for i in range(1, replica.size)}
    entrance = RankEntrance(config.process.bus, config.rank_group, places, make_digest(config), accepts=StepOffer)
    try:
        announce(entrance.address)
        others = OtherLeaders(config, entrance.address, FIRST)

        def look() -> None:
            others.check(time.monotonic())
            turn()

        found = entrance.gather(config.rank_timeout_s, look)
        listener, store = network.listen(interface)
        entrance.complete(store)
    except BlockyardError as e:
        entrance.give_up(e)
        entrance.close()
        raise
    signs = {i: one.signs for i, one in found.items()}
    first = FirstOffers({i: one.commands for i, one in found.items()})
    meeting = Meeting(own, interface, store, listener.detach())
    return DistantReplicas(replica, first, signs, meeting, on_end, entrance)


def _wait(end: FrameEnd[T]) -> T:
    while True:
        try:
            frame = end.receive()
        except TimeoutError:
            continue  # its step may take longer, and one that hangs is noticed by its signs
        if frame is None:
            raise RankLostError("another replica has ended")
        return frame
