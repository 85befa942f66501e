"""Turns bytes into a history of groups with roles. Blocks land in any order, and notices are lost or doubled."""

from collections import Counter
from collections.abc import Mapping
from itertools import product

from blockyard.shared.messages import KVAudit, KVLanded, KVRole

from ..harness.fake_transfers import FakeTransfers
from ..harness.program import SHAPES, Program, pick
from ..harness.world import Shape

ROLES: list[object] = [
    (KVRole.PREFILL, KVRole.DECODE, *more) for num in range(5) for more in product(KVRole, repeat=num)
]
TRANSFER_SHAPES: dict[str, list[object]] = SHAPES | {
    "pooling": [""],  # models that pool have no roles
    "roles": ROLES,
    "decode_prefill_tokens": [0, 0, 3, 8],
    "kv_lease_s": [5.0, 5.0, 500.0],
    "load_failure_policy": ["recompute", "recompute", "recompute", "fail"],
}
WORKERS = list(range(2, 7))  # of a history at its start, and at most
COUNTED = (
    "transfers landed",
    "transfers aborted",
    "transfers of several sequences",
    "transfers of beam searches",
    "transfers of a window's blocks",
    "transfers beside host memory",
    "blocks failed",
    "notices lost",
    "notices doubled",
    "notices dropped",
    "links broken",
    "senders died",
    "receivers died",
    "leases expired",
    "workers audited",
    "differences found by audits",
    "arrivals with a pair in back-off",
)


class TransferProgram(Program):
    """A history with two to six groups, which counts what happens to their transfers."""

    def __init__(self, shape: Shape, num_workers: int) -> None:
        super().__init__(shape)
        self.max_workers = max(WORKERS)
        self.handovers = self.world.core.handovers
        self.counted: Counter[str] = Counter()
        for _ in range(num_workers - 1):
            self.world.add_worker()
        self._rules += [self.work, self.work, self.move, self.notify] * 20 + [
            self.expire,
            self.audit,
            self.lose_notice,
            self.break_link,
            self.kill_sender,
        ]

    def count(self) -> Counter[str]:
        """What happened until now, by the names in `COUNTED`."""
        stats, shape = self.world.core.stats(), self.world.shape
        landed = stats.transfers_landed_total
        audits = [outgoing for outgoing in self.world.sent if isinstance(outgoing.frame, KVAudit)]
        return self.counted + Counter(
            {
                "transfers landed": landed,
                "transfers aborted": stats.transfers_aborted_total,
                "transfers of a window's blocks": landed if shape.window is not None else 0,
                "transfers beside host memory": landed if shape.num_host_blocks else 0,
                "blocks failed": stats.transfer_blocks_failed_total,
                "notices dropped": stats.transfer_notices_dropped_total,
                "workers audited": len(audits),
                "differences found by audits": self.world.core.audit.num_differences,
            }
        )

    def submit(self, a: int, b: int) -> None:
        self.counted["arrivals with a pair in back-off"] += bool(self.world.core.link_backoff.avoided)
        super().submit(a, b)

    def move(self, a: int, b: int) -> None:
        worker = pick([w for w, one in self.world.transfers.items() if one.outgoing], a)
        if worker is not None:
            self.world.move(worker, 1 + b % 8, fails=b % 16 < 3)

    def notify(self, a: int, b: int) -> None:
        worker = pick([w for w, one in self.world.transfers.items() if one.notices], a)
        if worker is None:
            return
        notice, is_doubled = self.world.transfers[worker].notices[0], b % 8 == 7
        self.counted["notices doubled"] += is_doubled
        if isinstance(notice, KVLanded) and notice.is_ended and notice.blocks:
            sequences = [c for r in self.world.core.lifecycle.requests.values() for c in r.active_sequences]
            for sequence in (c for c in sequences if c.handover and c.handover.transfer == notice.transfer):
                self.counted["transfers of several sequences"] += len(sequence.request.sequences) > 1
                self.counted["transfers of beam searches"] += sequence.request.search is not None
        self.world.notify(worker, is_doubled)

    def lose_notice(self, a: int, b: int) -> None:
        worker = pick([w for w, one in self.world.transfers.items() if one.notices], a)
        if worker is not None:
            self.counted["notices lost"] += 1
            self.world.transfers[worker].notices.popleft()
            if b % 2:  # it is found before the lease is over, if that is long
                self.audit(a, b)

    def break_link(self, a: int, b: int) -> None:
        """The link between two workers breaks. The receiver ends a transfer at once, or has to hear that the sender
        has ended it."""
        sender = pick([one for one in self.world.transfers.values() if one.outgoing], a)
        if sender is not None:
            self.counted["links broken"] += 1
            number = list(sender.outgoing)[b % len(sender.outgoing)]
            target = self.world.transfers.get(sender.outgoing[number].target)
            sender.end_send(number, False)
            if target is not None and number in target.incoming:
                target.end_receive(number) if a % 2 else target.cut(number)

    def kill_worker(self, a: int, b: int) -> None:
        before = dict(self.world.transfers)
        super().kill_worker(a, b)
        self._count_dead(before)

    def kill_sender(self, a: int, b: int) -> None:
        before = dict(self.world.transfers)
        worker = pick([one for one, transfers in before.items() if transfers.outgoing], a)
        if worker is not None:
            self.world.kill(worker)
            self._count_dead(before)

    def _count_dead(self, before: Mapping[int, FakeTransfers]) -> None:
        for worker in before.keys() - self.world.transfers.keys():
            self.counted["senders died"] += bool(before[worker].outgoing)
            self.counted["receivers died"] += bool(before[worker].incoming)

    def audit(self, a: int, b: int) -> None:
        self._pass(61.0)

    def expire(self, a: int, b: int) -> None:
        self._pass(self.world.shape.kv_lease_s * (1 + b % 2))

    def _pass(self, seconds: float) -> None:
        self.world.now += seconds
        leases = [one.ask_at for one in self.world.core.ledger.transfers.values() if not one.is_aborted]
        self.counted["leases expired"] += sum(at is not None and at <= self.world.now for at in leases)
        self.world.turn()
