"""The ledger of KV transfers: which worker may still read or write the blocks of a transfer.

It holds no blocks itself. Its caller holds the blocks of each end, and gives them back when `take_released` says so.
"""

import enum
from dataclasses import dataclass, field

from blockyard.shared.messages import KVAbort


class EndState(enum.Enum):
    OFFERED = enum.auto()  # the worker uses the blocks, or may do so
    LANDED = enum.auto()  # the worker is done, and all blocks have arrived
    ABORTED = enum.auto()  # the transfer was given up
    RELEASED = enum.auto()  # no worker uses the blocks: they were given back


@dataclass(slots=True, eq=False)
class TransferEnd:
    """One worker's part of a transfer. Written by the ledger."""

    worker: int  # incarnation
    blocks: list[int] = field(default_factory=list)
    state: EndState = EndState.OFFERED
    has_answered: bool = False  # the worker has said that it does not touch the blocks any more
    is_gone: bool = False  # the worker is lost
    is_held: bool = True  # the blocks are held in the worker's group
    last_plan: int = 0  # of the source: the last plan that sends blocks
    has_lost_link: bool = False  # its worker cannot hear from the other one that it has stopped

    def reopen(self, worker: int, blocks: list[int]) -> None:
        """The worker begins anew, and may still use these blocks."""
        self.worker, self.blocks, self.state = worker, blocks, EndState.ABORTED
        self.has_answered, self.is_gone, self.is_held, self.last_plan = False, False, True, 0

    def detach(self, is_lost: bool) -> None:
        """The group of the worker is dropped."""
        self.is_held, self.is_gone = False, self.is_gone or is_lost

    @property
    def is_open(self) -> bool:
        """Whether its worker is attached and has not answered."""
        return self.is_held and not self.is_closed

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks if self.is_held else []

    @property
    def is_closed(self) -> bool:
        """Whether this worker does nothing to the other one's blocks."""
        return self.has_answered or self.is_gone


@dataclass(slots=True, eq=False)
class Transfer:
    number: int
    source: TransferEnd
    target: TransferEnd
    ask_at: float | None = None  # when the workers are asked; None: the scheduler still sends blocks
    is_unknown: bool = False  # of an earlier scheduler, or forgotten: which end sends is not known
    is_aborted: bool = False
    landed: set[int] = field(default_factory=set)  # target blocks
    num_failed: int = 0

    @property
    def ends(self) -> tuple[TransferEnd, TransferEnd]:
        return self.source, self.target

    @property
    def has_landed(self) -> bool:
        """Whether all blocks have arrived; not to be asked after they were given back."""
        return len(self.landed) == len(self.target.blocks)

    def end_of(self, worker: int) -> TransferEnd | None:
        return next((end for end in self.ends if end.worker == worker), None)


class TransferLedger:
    """All transfers that have not ended on both workers.

    The blocks of an end are released when its worker has answered, and either everything arrived, or the other worker
    has answered too or is lost. Time releases nothing: when a lease is over, the workers are asked.
    """

    def __init__(self, scheduler: int, lease_s: float) -> None:
        """`scheduler`: its incarnation, so that no other scheduler uses the same numbers."""
        self.num_landed = self.num_aborted = self.num_failed_blocks = self.num_dropped = 0
        self.transfers: dict[int, Transfer] = {}
        self._lease_s = lease_s
        self.last_opened = (scheduler & 0xFFFF_FFFF) << 31  # number
        self._asks: dict[tuple[int, int, bool], bool] = {}  # in order
        self._released: list[tuple[Transfer, TransferEnd]] = []

    @property
    def num_quarantined(self) -> int:
        """Blocks of aborted transfers that a worker may still use."""
        ends = [end for transfer in self.transfers.values() if transfer.is_aborted for end in transfer.ends]
        return sum(len(end.held_blocks) for end in ends)

    # what the scheduler does

    def open(self, source: int, target: int, target_blocks: list[int]) -> Transfer:
        """The target is told. The source is told with the first call of `send`."""
        self.last_opened += 1
        sender = TransferEnd(source, state=EndState.RELEASED, has_answered=True)
        transfer = Transfer(self.last_opened, sender, TransferEnd(target, target_blocks))
        self.transfers[transfer.number] = transfer
        return transfer

    def send(self, transfer: Transfer, blocks: list[int], is_last: bool, plan: int, now: float) -> None:
        """A plan of the source sends these blocks. The lease begins when all of them are sent."""
        source = transfer.source
        source.has_answered, source.state, source.last_plan = False, EndState.OFFERED, plan
        source.blocks += blocks
        if is_last:
            transfer.ask_at = now + self._lease_s

    def abort(self, transfer: Transfer, now: float) -> None:
        """Gives a transfer up and asks both workers to stop."""
        if not transfer.is_aborted:
            transfer.is_aborted = True
            self.num_aborted += 1
            for end in transfer.ends:
                if end.state is EndState.OFFERED:
                    end.state = EndState.ABORTED
        self._ask(transfer)
        transfer.ask_at = now + self._lease_s
        self._settle(transfer)

    def ask_overdue(self, now: float) -> list[Transfer]:
        """Aborts the transfers with an expired lease, again in each call until the workers answer. Returns them."""
        due = [one for one in self.transfers.values() if one.ask_at is not None and one.ask_at <= now]
        for transfer in due:
            self.abort(transfer, now)
        return due

    def take_asks(self) -> list[tuple[int, KVAbort]]:
        """Frames to send, with their workers."""
        asks, self._asks = self._asks, {}
        return [
            (worker, KVAbort(number, is_source, sender_stopped))
            for (worker, number, is_source), sender_stopped in asks.items()
        ]

    def take_released(self) -> list[tuple[Transfer, TransferEnd, list[int]]]:
        """Ends that no worker uses any more, with their blocks, which the caller gives back."""
        released = [(transfer, end, end.held_blocks) for transfer, end in self._released]
        for _, end in self._released:
            end.blocks = []
        self._released = []
        return released

    # what workers say

    def on_landed(
        self, worker: int, number: int, blocks: list[int], failed: list[int], is_ended: bool, now: float
    ) -> Transfer | None:
        """None if the notice is dropped: it is late, doubled, or from a stranger."""
        transfer = self.transfers.get(number)
        if transfer is not None and transfer.is_unknown:
            return self._on_unknown_ended(worker, transfer) if is_ended else None
        if transfer is None or transfer.target.worker != worker or transfer.target.has_answered:
            self.num_dropped += 1
            return None
        target = transfer.target
        transfer.landed.update({*blocks}.intersection(target.blocks))
        num_failed = len({*failed}.intersection(target.blocks))
        transfer.num_failed += num_failed
        self.num_failed_blocks += num_failed
        if not is_ended:
            if transfer.ask_at is not None and not transfer.is_aborted:
                transfer.ask_at = now + self._lease_s
            return transfer
        target.has_answered = True
        if transfer.has_landed:
            target.state = EndState.LANDED
            self.num_landed += not transfer.is_aborted
        elif len(transfer.landed) + transfer.num_failed < len(target.blocks) and not transfer.is_aborted:
            self.abort(transfer, now)
        elif target.state is EndState.OFFERED:
            target.state = EndState.ABORTED
        self._settle(transfer)
        return transfer

    def on_send_ended(self, worker: int, number: int, is_complete: bool, now: float) -> Transfer | None:
        """None if the notice is dropped."""
        transfer = self.transfers.get(number)
        if transfer is not None and transfer.is_unknown:
            return self._on_unknown_ended(worker, transfer)
        if transfer is None or transfer.source.worker != worker or transfer.source.has_answered:
            self.num_dropped += 1
            return None
        transfer.source.has_answered = True
        if is_complete:
            transfer.source.state = EndState.LANDED
        elif not transfer.is_aborted:
            self.abort(transfer, now)
        self._settle(transfer)
        return transfer

    def on_sender_unreachable(
        self, worker: int, number: int, sender: int, is_attached: bool, now: float
    ) -> Transfer | None:
        """The link between two workers has broken: the target has to hear from here when the source has stopped.

        None if the notice is dropped. is_attached: whether the scheduler can ask the sender.
        """
        transfer = self.transfers.get(number)
        end = transfer.end_of(worker) if transfer is not None else None
        if transfer is None or end is None or end.has_answered:
            self.num_dropped += 1
            return None
        end.has_lost_link = True
        if self._name_sender(transfer, end, sender, is_attached) or not transfer.is_aborted:
            self.abort(transfer, now)
        else:
            self._settle(transfer)
        return transfer

    def _name_sender(self, transfer: Transfer, target: TransferEnd, sender: int, is_attached: bool) -> bool:
        """Returns whether the sender of an unknown transfer, which has not reported it, is to be asked from now on.

        It has ended its part before this scheduler came, or begun it after its report. One that is not attached is
        asked once it is.
        """
        if target is transfer.source:
            transfer.source, transfer.target = transfer.target, transfer.source
        if transfer.source.worker:
            return False
        transfer.source.worker = sender
        if is_attached:
            transfer.source.reopen(sender, [])
        return is_attached

    def _on_unknown_ended(self, worker: int, transfer: Transfer) -> Transfer | None:
        end = transfer.end_of(worker)
        if end is None or end.has_answered:
            self.num_dropped += 1
            return None
        end.has_answered = True
        self._settle(transfer)
        return transfer

    def on_detached(self, worker: int, is_lost: bool, now: float) -> list[Transfer]:
        """A worker's group is dropped, and with it what it held. Its transfers are aborted; returns them.

        A worker that is lost is not asked. It may be alive behind a broken link: the other worker's answer says that
        it can do nothing any more.
        """
        found = [one for one in self.transfers.values() if any(end.worker == worker for end in one.ends)]
        for transfer in found:
            for end in transfer.ends:
                if end.worker == worker:
                    end.detach(is_lost)
            self.abort(transfer, now)
        return found

    def on_attached(self, worker: int, still_open: dict[int, list[int]], now: float) -> list[list[int]]:
        """A worker begins anew and reports its open transfers with their blocks. Returns the blocks to hold.

        A transfer that it does not report may have begun after the report: it has not ended before the worker answers.
        """
        for number in still_open.keys() - self.transfers.keys():  # of an earlier scheduler, or forgotten
            self.transfers[number] = Transfer(number, _unknown_end(), _unknown_end(), is_unknown=True)
        held = []
        for transfer in list(self.transfers.values()):
            end = transfer.end_of(worker)
            reported = still_open.get(transfer.number)
            if end is None and reported is not None:
                end = transfer.end_of(0)  # None if three workers name the same number
            if end is None or (reported is None and end.has_answered):
                continue
            end.reopen(worker, sorted({*end.blocks, *(reported or [])}))
            held.append(end.blocks)
            self.abort(transfer, now)
        return held

    def _ask(self, transfer: Transfer) -> None:
        for end in transfer.ends:
            if not end.is_closed:
                self._asks[end.worker, transfer.number, end is transfer.source] = False

    def _settle(self, transfer: Transfer) -> None:
        for end, other in (transfer.ends, transfer.ends[::-1]):
            is_whole = end.state is EndState.LANDED
            if end.state is not EndState.RELEASED and end.has_answered and (is_whole or other.is_closed):
                end.state = EndState.RELEASED
                self._released.append((transfer, end))
            if end.has_lost_link and other.has_answered and not end.is_closed:
                self._asks[end.worker, transfer.number, end is transfer.source] = True
        if all(end.state is EndState.RELEASED or end.is_gone for end in transfer.ends):
            self.transfers.pop(transfer.number, None)


def _unknown_end() -> TransferEnd:
    """An end with a worker that is unknown or not attached."""
    return TransferEnd(0, state=EndState.RELEASED, is_gone=True)
