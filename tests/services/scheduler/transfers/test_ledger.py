"""When the blocks of a transfer may be given out again."""

import pytest

from blockyard.services.scheduler.transfers.ledger import EndState, Transfer, TransferLedger
from blockyard.shared.messages import KVAbort

P, D, OTHER = 11, 12, 13
LEASE = 10.0


class Books:
    """A ledger with one transfer of two blocks, which is sent."""

    def __init__(self, is_sent: bool = True) -> None:
        self.ledger = TransferLedger(7, LEASE)
        self.transfer = self.ledger.open(P, D, [5, 6])
        self.number = self.transfer.number
        if is_sent:
            self.ledger.send(self.transfer, [1], False, 1, 0.0)
            self.ledger.send(self.transfer, [2], True, 2, 0.0)

    def landed(self, *blocks: int, failed: tuple[int, ...] = (), is_ended: bool = True) -> Transfer | None:
        return self.ledger.on_landed(D, self.number, list(blocks), list(failed), is_ended, 1.0)

    def sender_unreachable(self) -> Transfer | None:
        return self.ledger.on_sender_unreachable(D, self.number, P, True, 1.0)

    def send_ended(self, is_complete: bool) -> Transfer | None:
        return self.ledger.on_send_ended(P, self.number, is_complete, 1.0)

    def released(self) -> dict[int, list[int]]:
        """Blocks that are given back now, by worker."""
        return {end.worker: blocks for _, end, blocks in self.ledger.take_released()}

    def asked(self) -> list[int]:
        return [worker for worker, ask in self.ledger.take_asks() if ask.transfer == self.number]


def test_each_end_of_a_whole_transfer_is_released_by_its_own_answer() -> None:
    it = Books()
    assert [end.held_blocks for one in it.ledger.transfers.values() for end in one.ends if end.worker == P] == [[1, 2]]
    it.landed(5, is_ended=False)
    assert it.released() == {}
    it.landed(6)
    assert it.released() == {D: [5, 6]}
    it.send_ended(True)
    assert it.released() == {P: [1, 2]}
    assert not it.ledger.transfers
    assert (it.ledger.num_landed, it.ledger.num_aborted, it.ledger.num_quarantined) == (1, 0, 0)


@pytest.mark.parametrize("first", [P, D])
def test_an_aborted_transfer_ends_when_both_have_answered(first: int) -> None:
    it = Books()
    it.ledger.abort(it.transfer, 0.0)
    assert sorted(it.asked()) == [P, D]
    assert {end.state for end in it.transfer.ends} == {EndState.ABORTED}
    assert it.ledger.num_quarantined == 4
    for answer in [lambda: it.send_ended(False), it.landed][:: 1 if first == P else -1]:
        assert it.released() == {}
        answer()
    assert it.released() == {P: [1, 2], D: [5, 6]}


def test_a_sender_that_has_heard_nothing_need_not_answer() -> None:
    it = Books(is_sent=False)
    it.ledger.abort(it.transfer, 0.0)
    assert it.asked() == [D]
    it.landed()
    assert it.released() == {D: [5, 6]}


@pytest.mark.parametrize("lost", [P, D])
def test_when_one_worker_is_lost_the_other_still_has_to_answer(lost: int) -> None:
    it = Books()
    it.ledger.on_detached(lost, True, 0.0)
    assert it.asked() == [D if lost == P else P], "the lost one is not asked"
    assert it.released() == {}
    if lost == P:
        it.landed()
        assert it.released() == {D: [5, 6]}
    else:
        it.send_ended(False)
        assert it.released() == {P: [1, 2]}
    assert not it.ledger.transfers


@pytest.mark.parametrize("is_complete", [False, True])
def test_one_end_that_gives_up_makes_the_other_be_asked(is_complete: bool) -> None:
    it = Books()
    it.send_ended(is_complete)
    assert it.asked() == ([] if is_complete else [D])
    it.landed(5)
    assert it.released() == {P: [1, 2], D: [5, 6]}
    assert (it.transfer.landed, it.ledger.num_landed) == ({5}, 0)


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("source_first", [False, True])
def test_a_target_without_a_link_is_told_once_the_source_has_stopped(source_first: bool, is_complete: bool) -> None:
    it = Books()
    it.landed(5, is_ended=False)
    if source_first:
        it.send_ended(is_complete)
        it.ledger.take_asks()
        it.sender_unreachable()
    else:
        it.sender_unreachable()
        assert it.ledger.take_asks() == [(P, KVAbort(it.number, is_source=True)), (D, KVAbort(it.number))]
        it.send_ended(is_complete)
    stopped = (D, KVAbort(it.number, sender_stopped=True))
    assert it.ledger.take_asks() == [stopped] and it.ledger.num_aborted == 1
    assert D not in it.released()
    assert it.ledger.ask_overdue(1.0 + LEASE) == [it.transfer] and it.ledger.take_asks() == [stopped]
    it.landed()
    assert it.released()[D] == [5, 6] and not it.ledger.transfers


def test_a_target_that_has_answered_is_told_nothing_more() -> None:
    it = Books()
    it.sender_unreachable()
    it.landed()
    it.ledger.take_asks()
    it.send_ended(False)
    assert it.ledger.take_asks() == [], "the link that it had lost is of no interest"
    assert it.released() == {P: [1, 2], D: [5, 6]}


def test_a_source_that_is_lost_and_has_not_answered_may_still_write() -> None:
    it = Books()
    it.sender_unreachable()
    it.ledger.take_asks()
    it.ledger.on_detached(P, True, 1.0)
    assert it.ledger.take_asks() == [(D, KVAbort(it.number))]
    assert it.ledger.on_sender_unreachable(OTHER, it.number, P, True, 1.0) is None and it.ledger.num_dropped == 1


def test_failed_blocks_are_counted_and_end_the_transfer_without_a_question() -> None:
    it = Books()
    it.landed(5, failed=(6,))
    assert (it.asked(), it.released(), it.ledger.num_failed_blocks) == ([], {}, 1)
    it.send_ended(True)
    assert it.released() == {P: [1, 2], D: [5, 6]}


def test_a_lease_asks_again_and_again_and_frees_nothing() -> None:
    it = Books()
    assert it.ledger.ask_overdue(LEASE - 1) == []
    for i in range(1, 4):
        assert it.ledger.ask_overdue(i * LEASE) == [it.transfer]
        assert sorted(it.asked()) == [P, D]
        assert it.released() == {}
    assert it.ledger.num_aborted == 1


def test_the_workers_are_not_asked_again_before_another_lease() -> None:
    it = Books()
    assert it.ledger.ask_overdue(LEASE) == [it.transfer]
    assert it.ledger.ask_overdue(2 * LEASE - 1) == []
    unsent = Books(is_sent=False)
    unsent.ledger.abort(unsent.transfer, 5.0)
    assert unsent.ledger.ask_overdue(LEASE + 5.0) == [unsent.transfer]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_landed_blocks_renew_the_lease_of_a_transfer_that_goes_on(is_aborted: bool) -> None:
    it = Books()
    if is_aborted:
        it.ledger.abort(it.transfer, 0.0)
    it.landed(5, is_ended=False)  # at 1.0
    assert bool(it.ledger.ask_overdue(LEASE)) == is_aborted
    assert bool(it.ledger.ask_overdue(LEASE + 1.0)) != is_aborted


def test_an_aborted_transfer_whose_blocks_have_all_landed_counts_as_aborted_only() -> None:
    it = Books()
    it.ledger.abort(it.transfer, 0.0)
    it.landed(5, 6)
    assert (it.ledger.num_landed, it.ledger.num_aborted) == (0, 1)


def test_the_second_end_of_a_target_is_dropped_while_the_source_is_to_answer() -> None:
    it = Books()
    it.landed(5, failed=(6,))
    assert it.transfer.target.state is EndState.ABORTED
    assert it.landed(6) is None
    assert (it.ledger.num_dropped, it.transfer.landed) == (1, {5})


def test_a_failed_block_that_is_not_of_the_transfer_does_not_count() -> None:
    it = Books()
    it.landed(5, failed=(77,))
    assert it.ledger.num_failed_blocks == 0
    assert it.asked() == [P], "a block is missing"


def test_a_transfer_whose_prompt_is_still_computed_has_no_lease() -> None:
    it = Books(is_sent=False)
    it.ledger.send(it.transfer, [1], False, 1, 0.0)
    assert it.ledger.ask_overdue(100 * LEASE) == []


def test_notices_that_are_doubled_late_or_of_strangers_are_dropped() -> None:
    it = Books()
    assert it.ledger.on_landed(OTHER, it.number, [5, 6], [], True, 1.0) is None
    assert it.ledger.on_send_ended(D, it.number, True, 1.0) is None
    it.landed(5, 6)
    it.send_ended(True)
    it.released()
    assert it.landed(5, 6) is None
    assert it.send_ended(True) is None
    assert it.ledger.num_dropped == 4
    assert it.released() == {}


def test_a_block_that_is_not_of_the_transfer_does_not_count() -> None:
    it = Books()
    it.landed(5, 77)
    assert it.ledger.num_landed == 0
    assert it.transfer.landed == {5}


def test_a_worker_that_returns_says_what_is_open() -> None:
    it = Books()
    it.ledger.on_detached(P, True, 0.0)
    assert it.ledger.on_attached(P, {it.number: [1]}, 0.0) == [[1, 2]]
    it.landed()
    assert it.released() == {}, "the sender is alive, and may still write"
    it.send_ended(False)
    assert it.released() == {P: [1, 2], D: [5, 6]}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_that_returns_without_a_transfer_is_asked_about_it(is_lost: bool) -> None:
    """Its report may be older than the transfer."""
    it = Books()
    it.ledger.on_detached(P, is_lost, 0.0)
    it.asked()
    assert it.ledger.on_attached(P, {}, 0.0) == [[1, 2]]
    assert it.asked() == [P, D]
    it.landed()
    assert it.released() == {}
    it.send_ended(False)
    assert it.released() == {P: [1, 2], D: [5, 6]}
    assert it.ledger.num_aborted == 1


def test_a_worker_that_has_answered_and_returns_is_not_asked() -> None:
    it = Books()
    it.ledger.on_detached(P, False, 0.0)
    it.send_ended(False)
    it.asked()
    assert it.ledger.on_attached(P, {}, 0.0) == []
    assert it.asked() == []
    it.landed()
    assert it.released() == {P: [], D: [5, 6]}


def test_transfers_of_an_earlier_scheduler_are_held_until_their_workers_answer() -> None:
    ledger = TransferLedger(8, LEASE)
    assert ledger.on_attached(P, {99: [1, 2]}, 0.0) == [[1, 2]]
    assert ledger.on_attached(D, {99: [5]}, 0.0) == [[5]]
    assert {worker for worker, _ in ledger.take_asks()} == {P, D}
    assert ledger.num_quarantined == 3
    ledger.on_landed(D, 99, [5], [], True, 0.0)
    assert ledger.take_released() == []
    ledger.on_send_ended(P, 99, False, 0.0)
    assert {end.worker: blocks for _, end, blocks in ledger.take_released()} == {P: [1, 2], D: [5]}
    assert not ledger.transfers


def test_of_an_earlier_scheduler_too_a_target_without_a_link_is_told() -> None:
    ledger = TransferLedger(8, LEASE)
    ledger.on_attached(P, {99: [1, 2]}, 0.0)
    ledger.on_attached(D, {99: [5]}, 0.0)
    ledger.on_sender_unreachable(D, 99, P, True, 0.0)
    ledger.take_asks()
    ledger.on_send_ended(P, 99, False, 0.0)
    assert [(worker, ask.sender_stopped) for worker, ask in ledger.take_asks()] == [(D, True)]


@pytest.mark.parametrize("attaches_later", [False, True])
def test_a_sender_that_reports_no_transfer_is_asked_if_its_target_has_lost_the_link(attaches_later: bool) -> None:
    """It may have ended its part before the scheduler came. Without its answer the target would wait for ever."""
    ledger = TransferLedger(8, LEASE)
    ledger.on_attached(D, {99: [5]}, 0.0)
    ledger.take_asks()
    ledger.on_sender_unreachable(D, 99, P, not attaches_later, 0.0)
    if attaches_later:
        assert not [worker for worker, _ in ledger.take_asks() if worker == P]
        ledger.on_attached(P, {}, 0.0)
    assert (P, KVAbort(99, is_source=True)) in ledger.take_asks()
    ledger.on_sender_unreachable(D, 99, P, True, 0.0)
    assert ledger.take_asks() == [], "the question is not repeated before the lease is over"
    ledger.on_send_ended(P, 99, False, 0.0)
    assert ledger.take_asks() == [(D, KVAbort(99, sender_stopped=True))]
    ledger.on_landed(D, 99, [], [], True, 0.0)
    assert [5] in [blocks for _, _, blocks in ledger.take_released()] and not ledger.transfers


def test_no_two_schedulers_use_the_same_numbers() -> None:
    one, other = TransferLedger(1, LEASE), TransferLedger(2, LEASE)
    assert one.open(P, D, []).number != other.open(P, D, []).number
