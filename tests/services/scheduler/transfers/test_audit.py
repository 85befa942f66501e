"""The ledger is compared with the workers every minute, and differences are healed where that is safe."""

import pytest

from blockyard.services.scheduler.transfers.audit import EVERY_S, TransferAudit
from blockyard.services.scheduler.transfers.ledger import TransferLedger
from blockyard.shared.messages import KVOpenTransfers

P, D = 11, 12


class Audited:
    """A ledger with a transfer of two blocks, of which plan 3 of the source sends the last."""

    def __init__(self) -> None:
        self.ledger = TransferLedger(7, 1000.0)
        self.audit = TransferAudit(self.ledger)
        self.transfer = self.ledger.open(P, D, [5, 6])
        self.number = self.transfer.number
        self.audit.on_opened(P, D, 0.0)
        self.ledger.send(self.transfer, [1, 2], True, 3, 0.0)

    def ask(self, last_completed: int = 3) -> dict[int, int]:
        """Numbers of the questions by worker."""
        questions = self.audit.ask({P: last_completed, D: 0}, EVERY_S)
        return {worker: frame.number for worker, frame in questions}

    def answer(self, worker: int, question: int, still_open: dict[int, list[int]]) -> list[int]:
        frame = KVOpenTransfers(question, list(still_open), list(still_open.values()))
        return self.audit.on_answer(worker, frame, EVERY_S + 1)


def test_workers_are_asked_every_minute_and_once_after_their_last_transfer() -> None:
    it = Audited()
    assert not it.audit.is_due(EVERY_S - 1) and it.audit.is_due(EVERY_S)
    assert it.ask().keys() == {P, D}
    assert not it.audit.is_due(EVERY_S + 1) and it.audit.is_due(2 * EVERY_S)
    it.ledger.on_landed(D, it.number, [5, 6], [], True, 1.0)
    it.ledger.on_send_ended(P, it.number, True, 1.0)
    assert it.ask().keys() == {P, D}
    assert not it.audit.is_due(1000 * EVERY_S), "without transfers nobody is asked"


def test_equal_lists_are_no_difference() -> None:
    it = Audited()
    asked = it.ask()
    assert it.answer(P, asked[P], {it.number: [1]}) == []
    assert it.answer(D, asked[D], {it.number: [5, 6]}) == []
    assert it.audit.num_differences == 0


def test_a_transfer_that_a_worker_does_not_know_counts_as_answered(caplog: pytest.LogCaptureFixture) -> None:
    it = Audited()
    asked = it.ask()
    it.answer(D, asked[D], {})
    assert [worker for worker, _ in it.ledger.take_asks()] == [P]
    assert it.ledger.take_released() == [], "the sender may still write"
    it.answer(P, asked[P], {})
    assert {end.worker: blocks for _, end, blocks in it.ledger.take_released()} == {P: [1, 2], D: [5, 6]}
    assert it.audit.num_differences == 2
    assert len(caplog.records) == 2 and f"{it.number} has ended there" in caplog.text


def test_a_sender_need_not_know_a_transfer_before_its_plan_is_complete() -> None:
    it = Audited()
    it.answer(P, it.ask(last_completed=2)[P], {})
    assert it.audit.num_differences == 0


def test_what_happens_between_question_and_answer_is_no_difference() -> None:
    it = Audited()
    asked = it.ask()
    it.ledger.on_landed(D, it.number, [5, 6], [], True, 1.0)
    it.answer(D, asked[D], {})
    later = it.ledger.open(P, D, [7])
    it.answer(P, asked[P], {it.number: [1, 2]})
    assert (it.audit.num_differences, later.is_aborted) == (0, False)


def test_a_transfer_that_the_ledger_does_not_know_is_aborted() -> None:
    it = Audited()
    asked = it.ask()
    it.ledger.on_landed(D, it.number, [5, 6], [], True, 1.0)
    assert it.answer(D, asked[D], {it.number: [5, 6], 99: [1]}) == [it.number, 99]
    assert it.audit.num_differences == 2


def test_other_blocks_are_a_difference() -> None:
    it = Audited()
    it.answer(D, it.ask()[D], {it.number: [5, 9]})
    assert it.audit.num_differences == 1
    assert not it.transfer.is_aborted


def test_late_doubled_and_strange_answers_are_ignored() -> None:
    it = Audited()
    first, second = it.ask(), it.ask()
    it.answer(D, first[D], {})
    it.answer(13, second[D], {})
    it.answer(D, second[D], {it.number: [5, 6]})
    it.answer(D, second[D], {})
    it.audit.on_detached(P)
    it.answer(P, second[P], {})
    assert it.audit.num_differences == 0
