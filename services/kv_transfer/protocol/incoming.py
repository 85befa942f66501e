"""The receiver's side of transfers: which blocks may be written, have landed, or are free again."""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.services.kv_transfer.protocol.bit_masks import bits, ranges
from blockyard.services.kv_transfer.protocol.drops import DropReason, Drops
from blockyard.services.kv_transfer.protocol.events import (
    BlocksLanded,
    IncomingEvent,
    Received,
    ReceiverEnded,
    SenderUnreachable,
)
from blockyard.services.kv_transfer.protocol.frames import (
    BlockSums,
    BlocksWritten,
    LinkFrame,
    Stopped,
    StopWrites,
    Transfer,
    WritesAllowed,
)

MAX_REMEMBERED = 4096  # numbers of ended transfers


# blocks that the sender had completed before still land
_STILL_USEFUL = (Received.ABORTED, Received.SENDER_LOST)


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Work for a connector: store some blocks and layers, unless the sender has, and compute their checksums."""

    number: int
    first: int
    targets: list[int]  # blocks
    layers: range


@dataclass(slots=True, eq=False)
class _Incoming:
    transfer: Transfer
    layout: BlockLayout  # of what the sender writes
    claimed: dict[int, int]  # by layer: bit mask of positions that a BlocksWritten has named
    arrived: dict[int, int]  # by layer: bit mask of positions with a complete landing
    sums: npt.NDArray[np.uint64]  # by position: checksum over the layers that have arrived
    expected: npt.NDArray[np.uint64]  # by position: checksum of the sender
    summed: int = 0  # bit mask of positions with a checksum of the sender
    landed: int = 0  # bit masks of positions
    corrupt: int = 0
    is_allowed: bool = False  # the sender may write
    has_stopped: bool = False  # the sender writes nothing more
    is_unreachable: bool = False  # the sender has no link, and may still write
    in_flight: int = 0  # landings
    ending: tuple[Received, str] | None = None  # waits for the sender and for landings in flight
    positions: int = field(init=False)  # bit mask of all positions

    def __post_init__(self) -> None:
        self.positions = bits(0, len(self.transfer.blocks))


class IncomingTransfers:
    """All transfers to this worker. Knows which blocks a sender may still write to.

    Hand it the frames of senders by the `on_` methods, run each `Landing` and report it by `on_landed` or
    `on_landing_failed`, and send the frames of `take_frames`.
    """

    def __init__(self, layout: BlockLayout, receiver: int, generation: int) -> None:
        """receiver: its incarnation. generation: of its arena; make a new object when it changes."""
        self.drops = Drops()
        self._layout, self._receiver, self._generation = layout, receiver, generation
        self._open: dict[int, _Incoming] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._linked: set[int] = set()  # senders
        self._frames: list[tuple[int, LinkFrame]] = []
        self._events: list[IncomingEvent] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_output(self) -> bool:
        """Whether there are frames or events to take. A poll of a sender's link may make some."""
        return bool(self._frames or self._events)

    def open_transfers(self) -> list[Transfer]:
        """Transfers that have not ended: their blocks must stay reserved."""
        return [it.transfer for it in self._open.values()]

    def expect(self, transfer: Transfer) -> None:
        """Allows the sender to write to the transfer's blocks as soon as it has a link.

        Raises ValueError for a transfer to another worker or generation, with a block twice, with a used number, or of
        a part that this rank does not have.
        """
        if transfer.receiver != self._receiver or transfer.receiver_generation != self._generation:
            raise ValueError(
                f"transfer {transfer.number} is to {transfer.receiver:x} generation {transfer.receiver_generation},"
                f" this is {self._receiver:x} generation {self._generation}"
            )
        if len(set(transfer.blocks)) != len(transfer.blocks):
            raise ValueError(f"transfer {transfer.number} names a block twice")
        if transfer.number in self._open or transfer.number in self._ended:
            raise ValueError(f"transfer {transfer.number} was expected before")
        layout = self._layout.of(transfer.part)
        self._layout.cut(transfer.part or layout.whole)
        none, zeros = dict.fromkeys(layout.layers, 0), np.zeros(len(transfer.blocks), np.uint64)
        it = _Incoming(transfer, layout, none, none.copy(), zeros, zeros.copy())
        self._open[transfer.number] = it
        if not transfer.blocks:
            self._begin_end(it, Received.LANDED, "", has_stopped=True)
        elif transfer.sender in self._linked:
            self._allow(it)

    def revoke(self, number: int, sender_stopped: bool = False) -> None:
        """Aborts a transfer. It ends when the sender has stopped. Ignored if it has ended.

        Of a transfer that is `SenderUnreachable` this is said again. sender_stopped: the sender has told the scheduler
        that it writes nothing more; that ends such a transfer.
        """
        it = self._open.get(number)
        if it is not None and it.is_unreachable:
            if sender_stopped:
                self._begin_end(it, Received.REVOKED, "", has_stopped=True)
            else:
                self._events.append(SenderUnreachable(number))
            return
        if it is None or it.ending is not None:
            return
        if it.is_allowed and not it.has_stopped:
            self._frames.append((it.transfer.sender, StopWrites(number)))
        self._begin_end(it, Received.REVOKED, "")

    def on_link(self, sender: int) -> None:
        """A sender has opened a link. Its hello says that it has stopped writing for earlier links."""
        self.on_sender_stopped(sender)
        self._linked.add(sender)
        for it in self._of(sender):
            if it.ending is None:
                self._allow(it)

    def on_link_lost(self, sender: int) -> None:
        """The link has broken. The sender may still write until `on_sender_stopped`."""
        self._linked.discard(sender)
        self._frames = [entry for entry in self._frames if entry[0] != sender]
        for it in self._of(sender):
            if it.is_allowed:
                self._begin_end(it, Received.SENDER_LOST, "")

    def on_sender_unreachable(self, sender: int) -> None:
        """After `on_link_lost`: nothing but the end of the sender's process tells when it stops writing."""
        for it in self._of(sender):
            if it.is_allowed and not it.has_stopped and not it.is_unreachable:
                it.is_unreachable = True
                self._events.append(SenderUnreachable(it.transfer.number))

    def on_link_closed(self, sender: int) -> None:
        """The sender has closed the link on purpose, and writes nothing more for transfers that it had begun.

        A transfer that it had not begun waits for the next link.
        """
        self._linked.discard(sender)
        self._frames = [entry for entry in self._frames if entry[0] != sender]
        for it in self._of(sender):
            if it.ending is None and not any(it.claimed.values()):
                it.is_allowed = False
            elif it.is_allowed:
                self._begin_end(it, Received.SENDER_LOST, "", has_stopped=True)

    def on_sender_stopped(self, sender: int) -> None:
        """This sender certainly writes nothing more for transfers that were allowed before."""
        for it in self._of(sender):
            if it.is_allowed:
                self._begin_end(it, Received.SENDER_LOST, "", has_stopped=True)

    def on_gone(self, sender: int) -> None:
        """The sender has left the ring. Ends its transfers that it was not allowed to write to.

        The others end when its link breaks, or by `on_sender_stopped`.
        """
        for it in self._of(sender):
            if not it.is_allowed:
                self._begin_end(it, Received.SENDER_LOST, "")

    def on_written(self, sender: int, frame: BlocksWritten, payload_bytes: int | None) -> Landing | None:
        """payload_bytes: size of the frame's second part; None if the sender wrote into this worker's arena itself.

        Returns the work to do, or None for a rejected frame.
        """
        it = self._find(sender, frame.number, frame.generation, "blocks")
        if it is None:
            return None
        layers = range(frame.first_layer, frame.first_layer + frame.num_layers)
        section = it.layout.find_section(layers)
        if section is None or not self._has(it, frame.first, frame.count):
            self.drops.count(DropReason.WRONG_SIZE, f"blocks of transfer {frame.number} that it does not have")
            return None
        expected = frame.count * frame.num_layers * section.piece_bytes
        if payload_bytes is not None and payload_bytes != expected:
            self.drops.count(DropReason.WRONG_SIZE, f"{payload_bytes} bytes of transfer {frame.number}, not {expected}")
            return None
        mask = bits(frame.first, frame.count)
        if any(it.claimed[layer] & mask for layer in layers):
            self.drops.count(DropReason.DOUBLED, f"blocks of transfer {frame.number}")
            return None
        for layer in layers:
            it.claimed[layer] |= mask
        it.in_flight += 1
        return Landing(frame.number, frame.first, it.transfer.blocks[frame.first : frame.first + frame.count], layers)

    def on_landed(self, landing: Landing, sums: npt.NDArray[np.uint64] | None) -> None:
        """sums [blocks]: checksums over its layers, computed from this worker's arena; None if checksums are off."""
        it = self._open[landing.number]
        it.in_flight -= 1
        if it.ending is None or it.ending[0] in _STILL_USEFUL:
            mask = bits(landing.first, len(landing.targets))
            for layer in landing.layers:
                it.arrived[layer] |= mask
            if sums is not None:
                it.sums[landing.first : landing.first + len(landing.targets)] += sums
            self._compare(it)
        self._settle(it)

    def on_landing_failed(self, landing: Landing, reason: str) -> None:
        it = self._open[landing.number]
        it.in_flight -= 1
        if it.ending is None:
            self._frames.append((it.transfer.sender, StopWrites(landing.number)))
        self._begin_end(it, Received.REVOKED, reason)

    def on_sums(self, sender: int, frame: BlockSums) -> None:
        it = self._find(sender, frame.number, frame.generation, "checksums", even_ending=True)
        if it is None:
            return
        size = 8 * frame.count if self._layout.checksums else 0
        if not self._has(it, frame.first, frame.count) or len(frame.sums) != size:
            self.drops.count(DropReason.WRONG_SIZE, f"checksums of transfer {frame.number}")
            return
        mask = bits(frame.first, frame.count)
        if it.summed & mask:
            self.drops.count(DropReason.DOUBLED, f"checksums of transfer {frame.number}")
            return
        if it.ending is None and any(mask & ~claimed for claimed in it.claimed.values()):
            self.drops.count(DropReason.NOT_ALLOWED, f"checksums of transfer {frame.number} before its blocks")
            return
        it.summed |= mask
        if size:
            it.expected[frame.first : frame.first + frame.count] = np.frombuffer(frame.sums, "<u8")
        # a sender that has sent everything does not answer StopWrites
        it.has_stopped = it.has_stopped or it.summed == it.positions
        if it.ending is None:
            self._compare(it)
        self._settle(it)

    def on_stopped(self, sender: int, frame: Stopped) -> None:
        it = self._open.get(frame.number)
        if it is None or it.transfer.sender != sender:
            self._drop_unknown(it, frame.number, "stop")
        else:  # also before WritesAllowed: a sender that gives up sends it right behind its hello
            self._begin_end(it, Received.ABORTED, frame.reason, has_stopped=True)

    def take_frames(self) -> list[tuple[int, LinkFrame]]:
        """(sender, frame) to send, in order."""
        frames, self._frames = self._frames, []
        return frames

    def take_events(self) -> list[IncomingEvent]:
        events, self._events = self._events, []
        return events

    def _find(
        self, sender: int, number: int, generation: int, what: str, even_ending: bool = False
    ) -> _Incoming | None:
        """Finds the open transfer of a frame. Returns None for a rejected frame, and counts it."""
        it = self._open.get(number)
        if it is None or it.transfer.sender != sender:
            self._drop_unknown(it, number, what)
            return None
        if generation != self._generation:
            self.drops.count(DropReason.OLD_GENERATION, f"{what} of transfer {number}, generation {generation}")
        elif it.ending is not None and not even_ending:
            self.drops.count(DropReason.ENDED, f"{what} of transfer {number}")
        elif not it.is_allowed:
            self.drops.count(DropReason.NOT_ALLOWED, f"{what} of transfer {number}")
        else:
            return it
        return None

    def _drop_unknown(self, it: _Incoming | None, number: int, what: str) -> None:
        reason = DropReason.UNKNOWN_TRANSFER
        if it is not None:
            reason = DropReason.OTHER_SENDER
        elif number in self._ended:
            reason = DropReason.ENDED
        self.drops.count(reason, f"{what} of transfer {number}")

    def _of(self, sender: int) -> list[_Incoming]:
        return [it for it in self._open.values() if it.transfer.sender == sender]

    def _has(self, it: _Incoming, first: int, count: int) -> bool:
        return first >= 0 and count > 0 and first + count <= len(it.transfer.blocks)

    def _allow(self, it: _Incoming) -> None:
        it.is_allowed = True
        self._frames.append((it.transfer.sender, WritesAllowed(it.transfer)))

    def _compare(self, it: _Incoming) -> None:
        """Compares the checksums of blocks that are newly complete, and reports the right ones as landed."""
        whole = it.summed & ~it.landed & ~it.corrupt
        for arrived in it.arrived.values():
            whole &= arrived
        if not whole:
            return
        good: list[int] = []
        for first, count in ranges(whole):
            equal = it.sums[first : first + count] == it.expected[first : first + count]
            good.extend((np.flatnonzero(equal) + first).tolist())
        landed = sum(1 << position for position in good)
        it.landed |= landed
        it.corrupt |= whole & ~landed
        if good:
            self._events.append(BlocksLanded(it.transfer.number, good))
        if it.landed | it.corrupt == it.positions:
            it.ending = (Received.CORRUPT if it.corrupt else Received.LANDED, "")

    def _begin_end(self, it: _Incoming, outcome: Received, detail: str, has_stopped: bool = False) -> None:
        it.ending = it.ending or (outcome, detail)
        it.has_stopped = it.has_stopped or has_stopped
        self._settle(it)

    def _settle(self, it: _Incoming) -> None:
        """Ends a transfer that is ending, once the sender has stopped and no landing is in flight."""
        if it.ending is None or it.in_flight or (it.is_allowed and not it.has_stopped):
            return
        number = it.transfer.number
        if self._open.pop(number, None) is None:
            return
        self._ended[number] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        outcome, detail = it.ending
        self._events.append(ReceiverEnded(number, outcome, _positions(it.landed), _positions(it.corrupt), detail))


def _positions(mask: int) -> list[int]:
    return [position for first, count in ranges(mask) for position in range(first, first + count)]
