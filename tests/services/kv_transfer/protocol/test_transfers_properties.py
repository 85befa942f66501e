"""Two senders and a receiver under random orders, repeated and late frames, broken links and deaths.

The memory of the receiver is a dict that says which source block each target block holds in each layer.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import BlocksLanded, Received, ReceiverEnded, SenderEnded, Sent
from blockyard.services.kv_transfer.protocol.frames import (
    BlockSums,
    BlocksWritten,
    LinkFrame,
    Stopped,
    StopWrites,
    Transfer,
    WritesAllowed,
)
from blockyard.services.kv_transfer.protocol.incoming import IncomingTransfers, Landing
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite, OutgoingTransfers

LAYERS, BLOCKS, RECEIVER = 3, 12, 99
SOURCE = 100  # the sender's block for position 0
PIECE = 2 * 4  # bytes
RUNS = [(LayerRun(LAYERS, 1, 1),), (LayerRun(1, 1, 1), LayerRun(2, 1, 3, planes=1))]
DAMAGED = -1
OLD_GENERATION = 7  # of the receiver, in the sender's plan

Content = tuple[int, int]  # transfer, position


@dataclass
class Sender:
    incarnation: int
    machine: OutgoingTransfers
    linked: bool = True
    alive: bool = True
    to_receiver: deque[LinkFrame] = field(default_factory=deque)
    to_sender: deque[LinkFrame] = field(default_factory=deque)
    copies: list[BlockWrite] = field(default_factory=list)
    unwritten: dict[int, list[tuple[range, range]]] = field(default_factory=dict)  # positions and layers by transfer
    ended: dict[int, SenderEnded] = field(default_factory=dict)


class World:
    def __init__(self, checksums: bool, runs: tuple[LayerRun, ...]) -> None:
        self.layout = BlockLayout(runs=runs, block_size=1, dtype="x", dtype_bytes=4, checksums=checksums)
        self.receiver = IncomingTransfers(self.layout, RECEIVER, 1)
        self.senders: list[Sender] = []
        self.memory: dict[tuple[int, int], Content] = {}
        self.free = list(range(BLOCKS))
        self.transfers: dict[int, Transfer] = {}
        self.landings: list[Landing] = []
        self.landed: dict[int, set[int]] = {}
        self.unreachable: set[int] = set()
        self.ended: dict[int, ReceiverEnded] = {}
        self.history: list[tuple[int, LinkFrame]] = []
        self.allowed: set[int] = set()
        self.damaged: set[tuple[int, int]] = set()
        for incarnation in (1, 2):
            self.start(incarnation)

    def start(self, incarnation: int) -> None:
        self.senders.append(Sender(incarnation, OutgoingTransfers(self.layout, 1, 2 * PIECE)))
        self.receiver.on_link(incarnation)

    def sums_of(self, contents: list[list[Content]]) -> "np.ndarray":
        """contents [layers][blocks] -> [blocks] uint64, as a checksum that layers add to."""
        total = [sum(hash((layer, content)) for layer, content in column) % 2**64 for column in contents]  # type: ignore[misc]
        return np.array(total, np.uint64)

    def sums_of_layers(self, layers: range, columns: list[list[Content]]) -> "np.ndarray | None":
        if not self.layout.checksums:
            return None
        return self.sums_of([list(zip(layers, column, strict=True)) for column in columns])  # type: ignore[arg-type]

    # -- actions

    def begin(self, which: int, size: int) -> None:
        sender = self.senders[which % 2]
        count = 1 + size % 4
        if count > len(self.free) or not sender.alive:
            return
        number = len(self.transfers) + 1
        blocks = [self.free.pop(0) for _ in range(count)]
        for block in blocks:
            for layer in range(LAYERS):
                self.memory.pop((layer, block), None)
        transfer = Transfer(number, sender.incarnation, 1, RECEIVER, 1, blocks)
        self.transfers[number] = transfer
        self.landed[number] = set()
        each = [range(position, position + 1) for position in range(count)]
        parts = [(positions, range(layer, layer + 1)) for positions in each for layer in range(LAYERS)]
        if size % 3 == 0:
            parts = [(positions, range(LAYERS)) for positions in each]
        if size % 5 == 0:
            parts = [(range(count - 1), range(LAYERS)), (range(count - 1, count), range(LAYERS))]
        sender.unwritten[number] = parts
        if size % 2:
            self.receiver.expect(transfer)
        sender.machine.begin(number, OLD_GENERATION if size % 61 == 0 else 1)
        if not size % 2:
            self.receiver.expect(transfer)
        if not sender.linked:
            sender.machine.on_link_lost()

    def write(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        numbers = [number for number, parts in sender.unwritten.items() if parts]
        if numbers and sender.alive:
            number = numbers[pick % len(numbers)]
            parts = sender.unwritten[number]
            positions, layers = parts.pop(pick % len(parts))
            sources = [SOURCE + position for position in positions]
            targets = [self.transfers[number].blocks[position] for position in positions]
            if pick % 89 == 0:
                targets = targets[::-1] if len(targets) > 1 else [BLOCKS]
            sender.machine.write(number, sources, targets, layers)
            if pick % 97 == 0:
                sender.machine.write(number, sources, targets, layers)

    def start_copy(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        if sender.alive and (write := sender.machine.next_write()) is not None:
            if pick % 5 == 0:
                sender.machine.not_started(write)
            else:
                sender.copies.append(write)

    def complete_copy(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        if not sender.copies or not sender.alive:
            return
        write = sender.copies.pop(pick % len(sender.copies))
        if pick % 11 == 0:
            sender.machine.on_failed(write, "cannot")
            return
        self.check_may_write(write)
        contents = [(write.number, source - SOURCE) for source in write.sources]
        for target, content in zip(write.targets, contents, strict=True):
            for layer in write.layers:
                self.memory[layer, target] = content
        columns = [[content for _ in write.layers] for content in contents]
        sender.machine.on_written(write, self.sums_of_layers(write.layers, columns))

    def check_may_write(self, write: BlockWrite) -> None:
        assert write.number in self.allowed, "the owner of the memory has not allowed it"
        assert write.number not in self.ended, "the receiver has given these blocks to others"
        blocks = self.transfers[write.number].blocks
        assert write.targets == blocks[write.first : write.first + len(write.sources)]

    def deliver_to_receiver(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        if sender.to_receiver and sender.linked:
            frame = sender.to_receiver.popleft()
            self.history.append((sender.incarnation, frame))
            self.hand_over(sender.incarnation, frame)

    def deliver_again(self, which: int, pick: int) -> None:
        """A frame is doubled, late, or comes over another sender's link."""
        if self.history:
            incarnation, frame = self.history[pick % len(self.history)]
            other = self.senders[which % 2]
            if pick % 3 == 0:
                incarnation = other.incarnation
            if isinstance(frame, Stopped | BlocksWritten | BlockSums) and incarnation in self.linked():
                sender_is_right = self.transfers[frame.number].sender == incarnation
                before = dict(self.receiver.drops.by_reason)
                self.hand_over(incarnation, frame)
                if not sender_is_right or frame.number in self.ended:
                    assert self.receiver.drops.by_reason != before, "it was counted"

    def linked(self) -> set[int]:
        return {sender.incarnation for sender in self.senders if sender.linked}

    def hand_over(self, incarnation: int, frame: LinkFrame) -> None:
        match frame:
            case BlocksWritten():
                landing = self.receiver.on_written(incarnation, frame, None)
                if landing is not None:
                    self.landings.append(landing)
            case BlockSums():
                self.receiver.on_sums(incarnation, frame)
            case Stopped():
                self.receiver.on_stopped(incarnation, frame)

    def deliver_to_sender(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        if sender.to_sender and sender.linked:
            frame = sender.to_sender[0] if pick % 7 == 0 else sender.to_sender.popleft()  # it may come twice
            if isinstance(frame, WritesAllowed):
                self.allowed.add(frame.transfer.number)
                sender.machine.on_allowed(frame)
            elif isinstance(frame, StopWrites):
                sender.machine.on_stop(frame)

    def land(self, which: int, pick: int) -> None:
        if not self.landings:
            return
        landing = self.landings.pop(pick % len(self.landings))
        if pick % 13 == 0:
            self.receiver.on_landing_failed(landing, "cannot")
            return
        columns = [[self.memory.get((layer, block), (0, 0)) for layer in landing.layers] for block in landing.targets]
        self.receiver.on_landed(landing, self.sums_of_layers(landing.layers, columns))

    def damage(self, which: int, pick: int) -> None:
        """Bytes of a block that was written change before they are summed; found by checksums alone."""
        if self.layout.checksums and self.landings:
            landing = self.landings[pick % len(self.landings)]
            at = pick % len(landing.targets)
            self.memory[landing.layers[0], landing.targets[at]] = (DAMAGED, pick)
            self.damaged.add((landing.number, landing.first + at))

    def give_up(self, which: int, pick: int) -> None:
        numbers = list(self.transfers)
        if numbers:
            number = numbers[pick % len(numbers)]
            if which:
                self.receiver.revoke(number)
            for sender in self.senders:
                if not which and sender.incarnation == self.transfers[number].sender:
                    sender.machine.abort(number, "test")

    def break_link(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        if sender.linked and pick % 4 == 0:
            sender.linked = False
            sender.to_receiver.clear()
            sender.to_sender.clear()
            sender.machine.on_link_lost()
            self.receiver.on_link_lost(sender.incarnation)
            self.receiver.on_sender_unreachable(sender.incarnation)

    def tell_stopped(self, which: int, pick: int) -> None:
        """The scheduler has heard from a sender that it has ended a transfer, and tells the receiver."""
        numbers = [n for sender in self.senders for n in self.unreachable if n in sender.ended]
        if numbers:
            number = numbers[pick % len(numbers)]
            self.receiver.revoke(number, sender_stopped=True)

    def close_link(self, which: int, pick: int) -> None:
        """The sender closes its link on purpose: all its frames arrive."""
        sender = self.senders[which % 2]
        if not sender.linked or pick % 4:
            return
        for number in sender.machine.open_transfers():
            sender.machine.abort(number, "closed")
        while sender.copies:
            self.complete_copy(which, 1)
        self.settle()
        assert not sender.machine.open_transfers()
        while sender.to_receiver:
            self.deliver_to_receiver(which, 1)
        sender.linked = False
        sender.to_sender.clear()
        self.receiver.on_link_closed(sender.incarnation)

    def kill(self, which: int, pick: int) -> None:
        sender = self.senders[which % 2]
        if sender.alive and pick % 6 == 0:
            self.end_of(sender)
            machine = OutgoingTransfers(self.layout, 1, 2 * PIECE)
            self.senders[which % 2] = Sender(sender.incarnation + 2, machine)
            self.receiver.on_link(sender.incarnation + 2)

    def end_of(self, sender: Sender) -> None:
        sender.alive = sender.linked = False
        self.receiver.on_link_lost(sender.incarnation)
        self.receiver.on_sender_stopped(sender.incarnation)
        for number in [n for n, t in self.transfers.items() if t.sender == sender.incarnation]:
            self.receiver.revoke(number)  # ends also transfers that were never allowed

    def link_again(self, which: int, pick: int) -> None:
        """A new link, which a sender opens when nothing of the old one is left."""
        sender = self.senders[which % 2]
        if sender.alive and not sender.linked and not sender.copies and not sender.machine.open_transfers():
            sender.linked = True
            sender.machine = OutgoingTransfers(self.layout, 1, 2 * PIECE)
            self.receiver.on_link(sender.incarnation)

    # -- after each action

    def settle(self) -> None:
        for sender in self.senders:
            frames = sender.machine.take_frames()
            if sender.linked:
                sender.to_receiver.extend(frame for frame, _ in frames)
            for event in sender.machine.take_events():
                assert event.number not in sender.ended
                sender.ended[event.number] = event
        for incarnation, frame in self.receiver.take_frames():
            for sender in self.senders:
                if sender.incarnation == incarnation and sender.linked:
                    sender.to_sender.append(frame)
        for event in self.receiver.take_events():
            if isinstance(event, BlocksLanded):
                self.on_landed(event)
            elif isinstance(event, ReceiverEnded):
                self.on_ended(event)
            else:
                assert event.number not in self.ended
                self.unreachable.add(event.number)

    def on_landed(self, event: BlocksLanded) -> None:
        transfer = self.transfers[event.number]
        for position in event.positions:
            assert position not in self.landed[event.number], "landed twice"
            self.landed[event.number].add(position)
            for layer in range(LAYERS):
                assert self.memory[layer, transfer.blocks[position]] == (event.number, position)

    def on_ended(self, event: ReceiverEnded) -> None:
        assert event.number not in self.ended, "ended twice"
        self.ended[event.number] = event
        transfer = self.transfers[event.number]
        assert set(event.landed) == self.landed[event.number]
        assert set(event.corrupt) <= {p for n, p in self.damaged if n == event.number}
        if event.outcome is Received.LANDED:
            assert len(event.landed) == len(transfer.blocks)
        for sender in self.senders:
            assert not [copy for copy in sender.copies if copy.number == event.number and sender.alive]
        assert not [landing for landing in self.landings if landing.number == event.number]
        self.free.extend(transfer.blocks)

    def finish(self) -> None:
        """Delivers all frames in flight and aborts open transfers: nothing is left."""
        for _ in range(200):
            for which in (0, 1):
                self.complete_copy(which, 1)
                self.deliver_to_sender(which, 1)
                self.settle()
                self.deliver_to_receiver(which, 1)
                self.land(0, 1)
                self.settle()
        for number in self.transfers:
            self.receiver.revoke(number)
        self.settle()
        for _ in range(200):
            for which in (0, 1):
                self.deliver_to_sender(which, 1)
                self.complete_copy(which, 1)
                self.settle()
                self.deliver_to_receiver(which, 1)
                self.land(0, 1)
                self.settle()
        for sender in self.senders:
            if not sender.linked:
                self.end_of(sender)
        while self.landings:
            self.land(0, 1)
        self.settle()
        assert self.receiver.open_transfers() == []
        assert set(self.ended) == set(self.transfers) and sorted(self.free) == list(range(BLOCKS))


ACTIONS = {
    World.begin: 6,
    World.write: 24,
    World.start_copy: 24,
    World.complete_copy: 24,
    World.deliver_to_receiver: 30,
    World.deliver_to_sender: 10,
    World.land: 20,
    World.deliver_again: 6,
    World.damage: 3,
    World.give_up: 1,
    World.break_link: 2,
    World.tell_stopped: 2,
    World.close_link: 2,
    World.kill: 1,
    World.link_again: 4,
}


@pytest.fixture(scope="module", autouse=True)
def no_log() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


outcomes: Counter[str] = Counter()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 600), st.booleans(), st.sampled_from(RUNS))
def test_no_block_is_lost_doubled_or_written_after_its_transfer(
    seed: int, num_steps: int, checksums: bool, runs: tuple[LayerRun, ...]
) -> None:
    world, rng = World(checksums, runs), random.Random(seed)
    for action in rng.choices(list(ACTIONS), list(ACTIONS.values()), k=num_steps):
        action(world, rng.randrange(2), rng.randrange(1, 10_000))
        world.settle()
    world.finish()
    outcomes.update(event.outcome for event in world.ended.values())
    outcomes.update(event.outcome for sender in world.senders for event in sender.ended.values())
    outcomes.update(reason for reason, count in world.receiver.drops.by_reason.items() if count)
    for sender in world.senders:
        outcomes.update(reason for reason, count in sender.machine.drops.by_reason.items() if count)


def test_all_outcomes_were_seen() -> None:
    """The histories of the test above reach every end of a transfer, and every reason to drop a frame that they can."""
    reasons = set(DropReason) - {DropReason.MALFORMED, DropReason.STRANGER, DropReason.WRONG_SIZE}
    reasons -= {DropReason.NOT_ALLOWED, DropReason.UNKNOWN_TRANSFER}
    assert {*Received, *Sent, *reasons} <= set(outcomes)
