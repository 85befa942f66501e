"""The KV transfers of a fake worker: blocks move when the test says so, and each is watched while it may be touched."""

from collections import deque
from dataclasses import dataclass, field

from blockyard.services.gpu_worker.mock.kv import UNKNOWN, MockKV
from blockyard.shared.messages import Frame, KVAbort, KVLanded, KVReceive, KVSend, KVSendEnded


@dataclass
class Incoming:
    source: int
    blocks: list[int]
    landed: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    num_told: int = 0  # landed blocks that were told
    is_cut: bool = False  # no link to the source, which may still write


@dataclass
class Outgoing:
    target: int
    writes: deque[tuple[int, int]] = field(default_factory=deque)  # own block, block of the target
    has_all: bool = False


@dataclass
class FakeTransfers:
    """One worker's ends of transfers. A transfer is in `incoming` or `outgoing` until this worker says it has ended."""

    worker: int
    incoming: dict[int, Incoming] = field(default_factory=dict)
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    notices: deque[Frame] = field(default_factory=deque)  # on the link to the scheduler

    @property
    def blocks(self) -> set[int]:
        """Blocks that may be read or written by transfers."""
        incoming = {block for one in self.incoming.values() for block in one.blocks}
        return incoming | {own for one in self.outgoing.values() for own, _ in one.writes}

    def open_transfers(self) -> dict[int, list[int]]:
        """Blocks by transfer."""
        found = {number: list(one.blocks) for number, one in self.incoming.items()}
        return found | {number: sorted({own for own, _ in one.writes}) for number, one in self.outgoing.items()}

    def receive(self, frame: KVReceive, kv: MockKV) -> None:
        if frame.transfer in self.over:
            return
        self.incoming[frame.transfer] = Incoming(frame.source, list(frame.blocks))
        for block in frame.blocks:
            kv.hashes.pop(block, None)

    def send(self, frame: KVSend) -> None:
        if frame.transfer in self.over:
            return
        one = self.outgoing.setdefault(frame.transfer, Outgoing(frame.target))
        one.writes.extend(zip(frame.blocks, frame.target_blocks, strict=True))
        one.has_all = frame.is_last

    def cut(self, number: int) -> None:
        """The link to the source breaks, and both workers live."""
        self.incoming[number].is_cut = True
        source = self.incoming[number].source
        self.notices.append(KVLanded(number, [], unreachable_sender=source))

    def end_receive(self, number: int) -> None:
        one = self.incoming.pop(number, None)
        self.over.add(number)
        landed, failed = (one.landed[one.num_told :], one.failed) if one is not None else ([], [])
        self.notices.append(KVLanded(number, landed, failed, True))

    def end_send(self, number: int, is_complete: bool) -> None:
        self.outgoing.pop(number, None)
        self.over.add(number)
        self.notices.append(KVSendEnded(number, is_complete))


def abort(workers: dict[int, FakeTransfers], worker: int, frame: KVAbort) -> None:
    """Ends a transfer in the order of the real protocol: the receiver ends when the sender has stopped."""
    own, number = workers[worker], frame.transfer
    if number in own.outgoing or (number not in own.incoming and frame.is_source):
        sent = own.outgoing.get(number)
        own.end_send(number, False)
        target = workers.get(sent.target) if sent is not None else None
        if target is not None and number in target.incoming and not target.incoming[number].is_cut:
            target.end_receive(number)
        return
    received = own.incoming.get(number)
    if received is not None and received.is_cut and not frame.sender_stopped:
        own.cut(number)
        return
    source = workers.get(received.source) if received is not None else None
    own.end_receive(number)
    if source is not None and number in source.outgoing:
        source.end_send(number, False)
    elif source is not None:
        source.over.add(number)


def move(workers: dict[int, FakeTransfers], kvs: dict[int, MockKV], worker: int, count: int, fails: bool) -> None:
    """Writes up to `count` blocks of a sender. With `fails` the last of them arrives with wrong bytes."""
    own = workers[worker]
    for number, one in list(own.outgoing.items()):
        target = workers.get(one.target)
        if target is None or number in target.over:
            own.end_send(number, False)
            continue
        there = target.incoming.get(number)
        if there is None:
            continue  # KVReceive is still on its way
        while one.writes and count:
            count -= 1
            block, to = one.writes.popleft()
            assert to in there.blocks
            is_bad = fails and not count
            contents = UNKNOWN if block in kvs[worker].bad else kvs[worker].contents_of(block)
            kvs[one.target].receive(to, UNKNOWN if is_bad else contents)
            (there.failed if is_bad else there.landed).append(to)
        if not one.writes and one.has_all:
            own.end_send(number, True)
            assert len(there.landed) + len(there.failed) == len(there.blocks)
            target.end_receive(number)
        elif len(there.landed) > there.num_told and number % 2:
            told, there.num_told = there.landed[there.num_told :], len(there.landed)
            target.notices.append(KVLanded(number, told))


def lose_worker(workers: dict[int, FakeTransfers], gone: int) -> None:
    """The others see that a worker's links are closed."""
    for other in workers.values():
        for number in [n for n, one in other.outgoing.items() if one.target == gone]:
            other.end_send(number, False)
        for number in [n for n, one in other.incoming.items() if one.source == gone]:
            other.end_receive(number)
