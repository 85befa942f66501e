"""The sender's side of its transfers to one receiver: which blocks to copy now, and which sources are free again."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.services.kv_transfer.protocol.bit_masks import bits, ranges
from blockyard.services.kv_transfer.protocol.drops import DropReason, Drops
from blockyard.services.kv_transfer.protocol.events import SenderEnded, Sent
from blockyard.services.kv_transfer.protocol.frames import (
    BlockSums,
    BlocksWritten,
    LinkFrame,
    Stopped,
    StopWrites,
    Transfer,
    WritesAllowed,
)

GAVE_UP = "the receiver gave up"
MAX_EARLY = 4096  # WritesAllowed of transfers that have not begun here
MAX_REMEMBERED = 4096  # numbers of ended transfers


@dataclass(frozen=True, slots=True, eq=False)
class BlockWrite:
    """One copy for a connector: `sources` to positions [first, first + len(sources)), which are blocks `targets`."""

    number: int
    first: int
    sources: list[int]
    targets: list[int]
    layers: range
    is_stored: Callable[[], bool] | None = None  # the copy starts once this is true


@dataclass(frozen=True, slots=True)
class _Part:
    """Arguments of a `write` before the positions are known."""

    sources: list[int]
    targets: list[int]
    layers: range
    is_stored: Callable[[], bool] | None


@dataclass(slots=True, eq=False)
class _Outgoing:
    number: int
    receiver_generation: int
    requested: dict[int, int]  # by layer of the link: bit mask of positions that `write` has named
    written: dict[int, int]  # by layer of the link: bit mask of positions with a complete copy
    sources: dict[int, None] = field(default_factory=dict)  # blocks that `write` has named
    parts: list[_Part] = field(default_factory=list)  # of `write` before WritesAllowed
    blocks: list[int] | None = None  # of the receiver, by position; None before WritesAllowed
    positions: dict[int, int] = field(default_factory=dict)  # by block of the receiver
    sums: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))  # by position
    summed: int = 0  # bit mask of positions in a BlockSums
    waiting: deque[BlockWrite] = field(default_factory=deque)  # copies to start
    in_flight: int = 0  # copies
    ending: SenderEnded | None = None  # waits for copies in flight

    def allow(self, blocks: list[int]) -> None:
        self.blocks, self.sums = blocks, np.zeros(len(blocks), np.uint64)
        self.positions = {block: position for position, block in enumerate(blocks)}


class OutgoingTransfers:
    """Decides which copies start, and keeps the state of each transfer. It copies nothing itself.

    The scheduler names the blocks of a transfer part by part, and the receiver all of them at once in `WritesAllowed`.
    Only then the positions of the blocks are known. A part that contradicts `WritesAllowed` ends its transfer.

    Take the copies to start from `next_write`, report each by `on_written` or `on_failed`, and send the frames of
    `take_frames` in their order.
    """

    def __init__(self, layout: BlockLayout, generation: int, chunk_bytes: int = 1) -> None:
        """layout: of what goes over the link. generation: of the sender's arena. chunk_bytes: upper bound of a copy of
        more than one block or layer."""
        self.drops = Drops()
        self._layout, self._generation, self._chunk_bytes = layout, generation, chunk_bytes
        self._open: dict[int, _Outgoing] = {}
        self._early: OrderedDict[int, Transfer] = OrderedDict()
        self._ended: OrderedDict[int, bool] = OrderedDict()  # number -> False if StopWrites came before `begin`
        self._frames: list[tuple[LinkFrame, BlockWrite | None]] = []
        self._events: list[SenderEnded] = []

    @property
    def has_output(self) -> bool:
        """Whether there are frames or events to take. The `poll` of another link may make some."""
        return bool(self._frames or self._events)

    @property
    def num_copies(self) -> int:
        return sum(it.in_flight for it in self._open.values())

    def set_chunk_bytes(self, chunk_bytes: int) -> None:
        """Sets the connector's bound, which is known when the link is open. No copy starts before that."""
        self._chunk_bytes = chunk_bytes

    def begin(self, number: int, receiver_generation: int) -> None:
        """Opens a transfer. Raises ValueError for a used number."""
        if number in self._open or self._ended.get(number):
            raise ValueError(f"transfer {number} has begun before")
        if number in self._ended:
            self._remember(number)
            self._events.append(SenderEnded(number, Sent.STOPPED, GAVE_UP))
            return
        none = dict.fromkeys(self._layout.layers, 0)
        it = self._open[number] = _Outgoing(number, receiver_generation, none, none.copy())
        early = self._early.pop(number, None)
        if early is not None:
            self._allow(it, early)

    def write(
        self,
        number: int,
        sources: list[int],
        targets: list[int],
        layers: range,
        is_stored: Callable[[], bool] | None = None,
    ) -> None:
        """Queues copies of blocks `sources` in `layers` to the receiver's blocks `targets`, whose positions follow one
        another. Layers that are not of the link are left out. The copies start once `is_stored` is true, after earlier
        ones of the transfer.

        Ignored if the transfer has ended. Ends it if the receiver has not reserved `targets` for it in this order, or
        if some of them were queued before. Raises ValueError for layers outside of the model.
        """
        it = self._open.get(number)
        if it is None or it.ending is not None:
            return
        if not (0 <= layers.start <= layers.stop <= self._layout.num_layers and layers.step == 1):
            raise ValueError(f"the model has {self._layout.num_layers} layers, not {layers}")
        it.sources.update(dict.fromkeys(sources))
        part = _Part(sources, targets, layers, is_stored)
        if it.blocks is None:
            it.parts.append(part)
        else:
            self._place(it, it.blocks, part)

    def abort(self, number: int, reason: str) -> None:
        """Ends a transfer as soon as none of its copies is in flight. Ignored if it has ended."""
        it = self._open.get(number)
        if it is not None:
            self._begin_end(it, SenderEnded(number, Sent.ABORTED, reason))

    def open_transfers(self) -> dict[int, list[int]]:
        """Numbers of transfers that have not ended, with the source blocks named so far, which must not change."""
        return {number: list(it.sources) for number, it in self._open.items()}

    def on_allowed(self, frame: WritesAllowed) -> None:
        transfer = frame.transfer
        it = self._open.get(transfer.number)
        if it is not None:
            self._allow(it, transfer)
        elif transfer.number in self._ended:
            self.drops.count(DropReason.ENDED, f"permission for transfer {transfer.number}")
        else:
            self._early[transfer.number] = transfer
            if len(self._early) > MAX_EARLY:
                number, _ = self._early.popitem(last=False)
                self.drops.count(DropReason.UNKNOWN_TRANSFER, f"permission for transfer {number}")

    def on_stop(self, frame: StopWrites) -> None:
        """Answers for an unknown transfer, too: its later `begin` ends it at once."""
        it = self._open.get(frame.number)
        if it is not None:
            self._begin_end(it, SenderEnded(frame.number, Sent.STOPPED, GAVE_UP))
            return
        if frame.number in self._ended:
            self.drops.count(DropReason.ENDED, f"stop of transfer {frame.number}")
            return
        self._early.pop(frame.number, None)
        self._remember(frame.number, begun=False)
        self._frames.append((Stopped(frame.number, "unknown"), None))

    def on_link_lost(self) -> None:
        """Ends all transfers. The link must still report its copies in flight."""
        self._frames.clear()
        self._early.clear()
        for it in list(self._open.values()):
            self._begin_end(it, SenderEnded(it.number, Sent.LINK_LOST))

    def next_write(self) -> BlockWrite | None:
        """Returns the next copy to start, and counts it as in flight. None if there is none."""
        for it in self._open.values():
            if it.waiting and ((is_stored := it.waiting[0].is_stored) is None or is_stored()):
                it.in_flight += 1
                chunk, *rest = self._chunks(it.waiting.popleft())
                it.waiting.extendleft(reversed(rest))
                return chunk
        return None

    def has_waiting(self) -> bool:
        """Whether copies wait to be started, with or without stored K and V."""
        return any(it.waiting for it in self._open.values())

    @property
    def awaits_layers(self) -> bool:
        """Whether the next copy of a transfer waits for layers that a step is to store. No event tells that it has."""
        return any(it.waiting and it.waiting[0].is_stored is not None for it in self._open.values())

    def not_started(self, write: BlockWrite) -> None:
        """Puts a copy of `next_write` back in front, because the connector had no room for it."""
        it = self._open[write.number]
        it.in_flight -= 1
        if it.ending is None:
            it.waiting.appendleft(write)
        self._settle(it)

    def on_written(self, write: BlockWrite, sums: npt.NDArray[np.uint64] | None) -> bool:
        """A copy is complete. sums [blocks]: checksums over its layers. Returns False if the transfer is ending."""
        it = self._open[write.number]
        it.in_flight -= 1
        if it.ending is not None:
            self._settle(it)
            return False
        count = len(write.sources)
        mask = bits(write.first, count)
        for layer in write.layers:
            it.written[layer] |= mask
        if sums is not None:
            it.sums[write.first : write.first + count] += sums
        layers = write.layers
        frame = BlocksWritten(write.number, it.receiver_generation, write.first, count, layers.start, len(layers))
        self._frames.append((frame, write))
        self._send_sums(it)
        return True

    def on_failed(self, write: BlockWrite, reason: str) -> None:
        """A copy has failed: its transfer is aborted."""
        it = self._open[write.number]
        it.in_flight -= 1
        self._begin_end(it, SenderEnded(write.number, Sent.ABORTED, reason))

    def take_frames(self) -> list[tuple[LinkFrame, BlockWrite | None]]:
        """Returns frames to send, in order, each with its copy if it is a `BlocksWritten`."""
        frames, self._frames = self._frames, []
        return frames

    def take_events(self) -> list[SenderEnded]:
        events, self._events = self._events, []
        return events

    def _allow(self, it: _Outgoing, allowed: Transfer) -> None:
        if it.ending is not None:
            self.drops.count(DropReason.ENDED, f"permission for transfer {it.number}")
        elif it.blocks is not None:
            self.drops.count(DropReason.DOUBLED, f"permission for transfer {it.number}")
        elif (allowed.sender_generation, allowed.receiver_generation) != (self._generation, it.receiver_generation):
            detail = (
                f"generations {allowed.sender_generation} and {allowed.receiver_generation} of transfer {it.number}"
            )
            self._reject(it, DropReason.OLD_GENERATION, f"the receiver has {detail}")
        elif allowed.part != self._layout.part:
            self._reject(it, DropReason.CONTRADICTION, f"the receiver wants {allowed.part}, not {self._layout.part}")
        else:
            it.allow(allowed.blocks)
            parts, it.parts = it.parts, []
            for part in parts:
                self._place(it, allowed.blocks, part)
            if not allowed.blocks:
                self._end(it, SenderEnded(it.number, Sent.WRITTEN))

    def _place(self, it: _Outgoing, blocks: list[int], part: _Part) -> None:
        """Queues the copy of a part, now that the receiver's blocks are known."""
        layers = [layer for layer in part.layers if layer in it.requested]
        if it.ending is not None or not part.targets or not layers:
            return
        count = len(part.targets)
        first = it.positions.get(part.targets[0], -1)
        mask = bits(first, count)
        if first < 0 or len(part.sources) != count or blocks[first : first + count] != part.targets:
            self._reject(it, DropReason.CONTRADICTION, f"the receiver has not reserved {part.targets} in this order")
        elif any(it.requested[layer] & mask for layer in layers):
            self._reject(it, DropReason.CONTRADICTION, f"blocks {part.targets} were sent before")
        else:
            for layer in layers:
                it.requested[layer] |= mask
            it.waiting.append(BlockWrite(it.number, first, part.sources, part.targets, part.layers, part.is_stored))

    def _reject(self, it: _Outgoing, reason: DropReason, detail: str) -> None:
        self.drops.count(reason, f"transfer {it.number}: {detail}")
        self._begin_end(it, SenderEnded(it.number, Sent.ABORTED, detail))

    def _chunks(self, write: BlockWrite) -> list[BlockWrite]:
        """Splits a copy into copies of at most `chunk_bytes`, each in one section of the layout."""
        chunks: list[BlockWrite] = []
        for section in self._layout.sections:
            layers = range(max(section.layers.start, write.layers.start), min(section.layers.stop, write.layers.stop))
            if layers:
                chunks.extend(self._chunks_of_layers(write, layers, section.piece_bytes))
        return chunks

    def _chunks_of_layers(self, write: BlockWrite, layers: range, piece: int) -> list[BlockWrite]:
        num_layers = max(1, min(len(layers), self._chunk_bytes // piece))
        count = max(1, self._chunk_bytes // (piece * num_layers))
        if num_layers == len(write.layers) and count >= len(write.sources):
            return [write]
        return [
            BlockWrite(
                write.number,
                write.first + at,
                write.sources[at : at + count],
                write.targets[at : at + count],
                layers[start : start + num_layers],
            )
            for at in range(0, len(write.sources), count)
            for start in range(0, len(layers), num_layers)
        ]

    def _send_sums(self, it: _Outgoing) -> None:
        """Sends checksums of blocks that are newly written in all layers. The last of them ends the transfer."""
        complete = bits(0, len(it.sums))
        for written in it.written.values():
            complete &= written
        for first, count in ranges(complete & ~it.summed):
            sums = it.sums[first : first + count].tobytes() if self._layout.checksums else b""
            self._frames.append((BlockSums(it.number, it.receiver_generation, first, count, sums), None))
        it.summed = complete
        if complete == bits(0, len(it.sums)):
            self._end(it, SenderEnded(it.number, Sent.WRITTEN))

    def _begin_end(self, it: _Outgoing, event: SenderEnded) -> None:
        it.ending = it.ending or event
        it.parts.clear()
        it.waiting.clear()
        self._settle(it)

    def _settle(self, it: _Outgoing) -> None:
        if it.ending is not None and not it.in_flight:
            if it.ending.outcome is not Sent.LINK_LOST:
                self._frames.append((Stopped(it.number, it.ending.detail), None))
            self._end(it, it.ending)

    def _end(self, it: _Outgoing, event: SenderEnded) -> None:
        del self._open[it.number]
        self._remember(it.number)
        self._events.append(event)

    def _remember(self, number: int, begun: bool = True) -> None:
        self._ended[number] = begun
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
