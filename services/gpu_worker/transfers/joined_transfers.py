"""Joins what happens between pairs of ranks to what happens to a transfer. It imports neither torch nor zmq."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockyard.services.kv_transfer.protocol.events import (
    BlocksLanded,
    IncomingEvent,
    Received,
    ReceiverEnded,
    SenderEnded,
    SenderUnreachable,
    Sent,
)


@dataclass(slots=True, eq=False)
class _Receive:
    number: int
    open: set[int]  # pairs that have not ended
    missing: list[int]  # by position: pairs from which its block has not landed
    landed: list[int] = field(default_factory=list)
    corrupt: set[int] = field(default_factory=set)
    outcome: Received = Received.LANDED
    detail: str = ""


@dataclass(slots=True, eq=False)
class _Send:
    number: int
    open: set[int]
    blocks: dict[int, None] = field(default_factory=dict)  # sources named so far
    outcome: Sent = Sent.WRITTEN
    detail: str = ""


class JoinedTransfers:
    """The transfers of a worker, each of which has a number for every pair of ranks that exchange something for it.

    A block has landed when it has from every pair, and a transfer has ended when it has between all pairs. Its outcome
    is the first one of a pair that is not a success.
    """

    def __init__(self) -> None:
        self._receives: dict[int, _Receive] = {}  # by number of a pair
        self._sends: dict[int, _Send] = {}  # by number of a pair that has not ended
        self._open_sends: dict[int, _Send] = {}  # by number of the transfer

    @property
    def open_sends(self) -> dict[int, list[int]]:
        """Source blocks named so far of the sends that have not ended, by transfer."""
        return {number: list(it.blocks) for number, it in self._open_sends.items()}

    @property
    def num_sends(self) -> int:
        return len(self._open_sends)

    def is_sending(self, number: int) -> bool:
        return number in self._open_sends

    def open_receive(self, number: int, pairs: Sequence[int], num_blocks: int) -> None:
        """pairs: numbers of the transfer's parts, unlike all other transfers'."""
        it = _Receive(number, set(pairs), [len(pairs)] * num_blocks)
        self._receives.update(dict.fromkeys(pairs, it))

    def send(self, number: int, pairs: Sequence[int], blocks: Sequence[int]) -> None:
        """These blocks are sent, for a new transfer or one that has been sending."""
        it = self._open_sends.get(number)
        if it is None:
            it = self._open_sends[number] = _Send(number, set(pairs))
            self._sends.update(dict.fromkeys(pairs, it))
        it.blocks.update(dict.fromkeys(blocks))

    def on_incoming(self, event: IncomingEvent) -> IncomingEvent | None:
        """Returns what a pair's event is for the transfer. None: nothing yet."""
        it = self._receives.get(event.number)
        if it is None:
            return None
        match event:
            case BlocksLanded(_, positions):
                for position in positions:
                    it.missing[position] -= 1
                whole = [position for position in positions if not it.missing[position]]
                it.landed += whole
                return BlocksLanded(it.number, whole) if whole else None
            case SenderUnreachable():
                return SenderUnreachable(it.number)
        it.open.discard(event.number)
        del self._receives[event.number]
        it.corrupt.update(event.corrupt)
        if it.outcome is Received.LANDED:
            it.outcome, it.detail = event.outcome, event.detail
        if it.open:
            return None
        return ReceiverEnded(it.number, it.outcome, sorted(it.landed), sorted(it.corrupt), it.detail)

    def on_sent(self, event: SenderEnded) -> SenderEnded | None:
        """The same of a send."""
        it = self._sends.pop(event.number, None)
        if it is None:
            return None
        it.open.discard(event.number)
        if it.outcome is Sent.WRITTEN:
            it.outcome, it.detail = event.outcome, event.detail
        if it.open:
            return None
        del self._open_sends[it.number]
        return SenderEnded(it.number, it.outcome, it.detail)
