"""Random histories of groups with roles: no block is used twice or lost, and every request ends with its tokens."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from blockyard.shared.messages import KVRole

from ..program import BYTES_PER_STEP, SHAPES, Program, pick
from ..world import Shape

EVENTS = 300  # of one history
HISTORIES = 2000 if settings.get_current_profile_name() == "long" else 40
MAX_WORKERS = 6
counted = {"landed": 0, "aborted": 0, "failed": 0, "dropped": 0}


class TransferProgram(Program):
    """A history with two to six groups. Blocks land in any order, and notices are lost or doubled."""

    def __init__(self, shape: Shape, num_workers: int) -> None:
        super().__init__(shape)
        self.max_workers = MAX_WORKERS
        for _ in range(num_workers - 1):
            self.world.add_worker()
        self._rules += [self.work, self.work, self.move, self.notify] * 20 + [
            self.expire,
            self.audit,
            self.lose_notice,
            self.break_link,
        ]

    def move(self, a: int, b: int) -> None:
        worker = pick([w for w, one in self.world.transfers.items() if one.outgoing], a)
        if worker is not None:
            self.world.move(worker, 1 + b % 8, fails=b % 16 < 3)

    def notify(self, a: int, b: int) -> None:
        worker = pick([w for w, one in self.world.transfers.items() if one.notices], a)
        if worker is not None:
            self.world.notify(worker, is_doubled=b % 8 == 7)

    def lose_notice(self, a: int, b: int) -> None:
        worker = pick([w for w, one in self.world.transfers.items() if one.notices], a)
        if worker is not None:
            self.world.transfers[worker].notices.popleft()

    def break_link(self, a: int, b: int) -> None:
        """The link between two workers breaks. The receiver ends a transfer at once, or has to hear that the sender
        has ended it."""
        sender = pick([one for one in self.world.transfers.values() if one.outgoing], a)
        if sender is not None:
            number = list(sender.outgoing)[b % len(sender.outgoing)]
            target = self.world.transfers.get(sender.outgoing[number].target)
            sender.end_send(number, False)
            if target is not None and number in target.incoming:
                target.end_receive(number) if a % 2 else target.cut(number)

    def audit(self, a: int, b: int) -> None:
        self.world.now += 61.0
        self.world.turn()

    def expire(self, a: int, b: int) -> None:
        self.world.now += self.world.shape.kv_lease_s * (1 + b % 2)
        self.world.turn()


ROLES = st.lists(st.sampled_from(list(KVRole)), max_size=4).map(lambda more: (KVRole.PREFILL, KVRole.DECODE, *more))
DECODE_PREFILLS = [0, 0, 3, 8]
shapes = st.builds(
    Shape,
    roles=ROLES,
    decode_prefill_tokens=st.sampled_from(DECODE_PREFILLS),
    kv_lease_s=st.sampled_from([5.0, 5.0, 500.0]),
    load_failure_policy=st.sampled_from(["recompute", "recompute", "recompute", "fail"]),
    **{name: st.sampled_from(values) for name, values in SHAPES.items()},
)


@pytest.mark.timeout(20 * HISTORIES)
@settings(
    max_examples=HISTORIES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(
    shapes, st.integers(2, MAX_WORKERS), st.binary(min_size=EVENTS * BYTES_PER_STEP, max_size=EVENTS * BYTES_PER_STEP)
)
def test_random_histories_with_roles_keep_the_invariants(shape: Shape, num_workers: int, data: bytes) -> None:
    program = TransferProgram(shape, num_workers)
    try:
        program.run(data)
    finally:
        stats = program.world.core.stats()
        counted["landed"] += stats.transfers_landed_total
        counted["aborted"] += stats.transfers_aborted_total
        counted["failed"] += stats.transfer_blocks_failed_total
        counted["dropped"] += stats.transfer_notices_dropped_total


def test_the_histories_had_transfers_of_all_kinds() -> None:
    """Runs after the one above, which may have been left out."""
    if not any(counted.values()):
        pytest.skip("the histories were not run")
    assert min(counted.values()) > 0, counted
    assert counted["landed"] > HISTORIES // 4, counted
