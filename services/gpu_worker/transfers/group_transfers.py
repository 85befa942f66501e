"""The transfers of a worker with one or several ranks, as its leader drives them."""

from collections.abc import Sequence
from typing import Protocol

from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.parallel.commands import (
    AbortBlocks,
    CloseTransfers,
    LosePeer,
    OpenTransfers,
    ReceiveBlocks,
    SendBlocks,
    SharePlaces,
    TransferAnswer,
    TransferEvents,
    TransfersOpened,
)
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.transfers.joined_transfers import JoinedTransfers
from blockyard.services.gpu_worker.transfers.rank_transfers import Events, RankTransfers
from blockyard.services.kv_transfer.link_counts import LinkCounts
from blockyard.services.kv_transfer.routes import encode_places
from blockyard.services.kv_transfer.transfer_blocks import SocketWatch
from blockyard.shared.bus.poller import Readable
from blockyard.shared.messages import KVAbort, KVReceive, KVSend


class TransferFollowers(Protocol):
    """The followers of a leader. Implemented by `ranks.LeaderTeam`."""

    @property
    def send(self) -> SendCommand: ...

    @property
    def answers(self) -> Sequence[Readable]:
        """Sockets and file descriptors, readable when there is an answer."""

    def take_answers(self) -> list[tuple[int, TransferAnswer]]:
        """Returns what followers have said, with their ranks. Does not wait. Raises RankLostError."""

    def wait_answer(self, rank: int) -> TransferAnswer:
        """Waits for the next answer of a rank. Raises RankLostError."""

    @property
    def followers(self) -> Sequence[int]:
        """Their ranks."""


class GroupTransfers:
    """Sends what the scheduler says to all ranks, and joins what happens to their parts of the blocks.

    Without followers it is one `RankTransfers`. None of the calls waits for long.
    """

    def __init__(
        self, watch: SocketWatch, worker: int, own: RankTransfers, followers: TransferFollowers | None
    ) -> None:
        """worker: incarnation of the leader. Raises RankLostError if a follower is gone."""
        self.own, self.sent_to = own, set[int]()
        self._watch, self._followers = watch, followers
        self._joined = JoinedTransfers()
        self._counts: dict[int, TransferEvents] = {}  # the last of each follower
        places = [own.place]
        if followers is not None:
            followers.send(OpenTransfers(worker, own.place.generation))
            for rank in followers.followers:
                answer = followers.wait_answer(rank)
                assert isinstance(answer, TransfersOpened), f"rank {rank} answers {answer}"
                places.append(answer.place)
            followers.send(SharePlaces(places))
            watch.watch(*followers.answers)
        own.share(places)
        self.endpoint = encode_places(places)

    @property
    def open_sends(self) -> dict[int, list[int]]:
        """Source blocks named so far of the sends that have not ended, by transfer."""
        return self._joined.open_sends

    @property
    def num_sends(self) -> int:
        return self._joined.num_sends

    def is_sending(self, number: int) -> bool:
        return self._joined.is_sending(number)

    def receive(self, frame: KVReceive) -> None:
        """Raises ValueError for a transfer that cannot be."""
        pairs = self.own.receive(frame)
        self._joined.open_receive(frame.transfer, pairs, len(frame.blocks))
        if self._followers is not None:
            self._followers.send(ReceiveBlocks(frame))

    def send(self, send: KVSend, stored: Sequence[StoredLayers] = ()) -> None:
        """See `RankTransfers.send`. Followers have recorded the layers of the same step."""
        pairs = self.own.send(send, stored)
        self._joined.send(send.transfer, pairs, send.blocks)
        self.sent_to.add(send.target)
        if self._followers is not None:
            self._followers.send(SendBlocks(send, is_running=bool(stored)))

    def abort(self, frame: KVAbort) -> None:
        self.own.abort(frame)
        if self._followers is not None:
            self._followers.send(AbortBlocks(frame))

    def lose(self, worker: int) -> None:
        self.own.lose(worker)
        if self._followers is not None:
            self._followers.send(LosePeer(worker))

    def poll(self) -> Events:
        """Moves blocks on. Returns the notices of the worker's transfers."""
        joined = Events()
        self._join(self.own.poll(), joined)
        for rank, answer in self._followers.take_answers() if self._followers is not None else ():
            self._take(rank, answer, joined)
        return joined

    def counts(self) -> LinkCounts:
        """Sums over all ranks."""
        counts = self.own.counts()
        for one in self._counts.values():
            counts.add_named(one.transfer_bytes, one.frames_dropped)
        return counts

    def close(self) -> Events:
        """Aborts all transfers on all ranks, and waits for that. Returns their ends."""
        joined = Events()
        if self._followers is not None:
            self._followers.send(CloseTransfers())
        self._join(self.own.close(), joined)
        if self._followers is not None:
            for rank in self._followers.followers:
                while isinstance(answer := self._followers.wait_answer(rank), TransferEvents):
                    self._take(rank, answer, joined)
            self._watch.unwatch(*self._followers.answers)
        return joined

    def _take(self, rank: int, answer: TransferAnswer, joined: Events) -> None:
        assert isinstance(answer, TransferEvents), f"rank {rank} answers {answer}"
        self._counts[rank] = answer
        self._join(Events(answer.received, answer.sent), joined)

    def _join(self, events: Events, joined: Events) -> None:
        for event in events.received:
            if (found := self._joined.on_incoming(event)) is not None:
                joined.received.append(found)
        for sent in events.sent:
            if (ended := self._joined.on_sent(sent)) is not None:
                joined.sent.append(ended)
