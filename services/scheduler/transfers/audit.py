"""Compares the ledger of KV transfers with what the workers know of them, once a minute.

A worker answers in the order of its frames: what it has said of a transfer arrives before its list of open transfers.
So an end that was open when the worker was asked, still is, and is not in the list, has ended without a notice.
"""

import logging
from dataclasses import dataclass

from blockyard.services.scheduler.transfers.ledger import Transfer, TransferEnd, TransferLedger
from blockyard.shared.messages import KVAudit, KVOpenTransfers

log = logging.getLogger(__name__)

EVERY_S = 60.0
MAX_LOGGED = 8  # differences in one line


@dataclass(slots=True)
class Question:
    number: int
    ends: dict[int, TransferEnd]  # that the worker should know, by transfer


class TransferAudit:
    """Asks each worker that has had transfers since it was asked before."""

    def __init__(self, ledger: TransferLedger) -> None:
        self.num_differences = 0
        self.workers: set[int] = set()  # to be asked
        self._ledger = ledger
        self._asked: dict[int, Question] = {}  # by worker
        self._num_questions = 0
        self._next_s = 0.0

    def on_opened(self, source: int, target: int, now: float) -> None:
        if not self.workers:
            self._next_s = now + EVERY_S
        self.workers.update((source, target))

    def on_detached(self, worker: int) -> None:
        self.workers.discard(worker)
        self._asked.pop(worker, None)

    def is_due(self, now: float) -> bool:
        return bool(self.workers) and now >= self._next_s

    def ask(self, last_completed: dict[int, int], now: float) -> list[tuple[int, KVAudit]]:
        """Returns the frames to send. `last_completed`: the last plan with a result, by worker; others are left out."""
        self._next_s = now + EVERY_S
        questions: list[tuple[int, KVAudit]] = []
        busy = set[int]()
        for worker in sorted(self.workers & last_completed.keys()):
            self._num_questions += 1
            found = [(transfer, transfer.end_of(worker)) for transfer in self._ledger.transfers.values()]
            ends = {transfer.number: end for transfer, end in found if end is not None and end.is_open}
            if ends:
                busy.add(worker)
            # a sender hears of a transfer when the plan with its blocks is complete
            known = {number: end for number, end in ends.items() if end.last_plan <= last_completed[worker]}
            self._asked[worker] = Question(self._num_questions, known)
            questions.append((worker, KVAudit(self._num_questions)))
        self.workers = busy
        return questions

    def on_answer(self, worker: int, frame: KVOpenTransfers, now: float) -> list[int]:
        """Returns transfers that the worker is to abort, because the ledger has given their blocks back."""
        question = self._asked.get(worker)
        if question is None or question.number != frame.number:
            return []
        del self._asked[worker]
        there = dict(zip(frame.transfers, frame.blocks, strict=False))
        differences: list[str] = []
        for number, end in question.ends.items():
            transfer = self._ledger.transfers.get(number)
            if transfer is not None and end.is_open and number not in there:
                differences.append(f"{number} has ended there without a notice")
                self._end(worker, transfer, now)
        strangers: list[int] = []
        for number, blocks in there.items():
            transfer = self._ledger.transfers.get(number)
            known = transfer.end_of(worker) if transfer is not None else None
            if known is None or not known.is_open:
                differences.append(f"{number} is open there with {len(blocks)} blocks and not here, and is aborted")
                strangers.append(number)
            elif not {*blocks} <= {*known.blocks}:
                differences.append(f"{number} has other blocks there")
        if differences:
            self.num_differences += len(differences)
            listed = "; ".join(differences[:MAX_LOGGED])
            log.warning("audit of KV transfers: worker %x differs in %d: %s", worker, len(differences), listed)
        return strangers

    def _end(self, worker: int, transfer: Transfer, now: float) -> None:
        """Ends a transfer as if the worker had answered. Blocks that did not land are computed again."""
        if transfer.source.worker == worker and not transfer.is_unknown:
            self._ledger.on_send_ended(worker, transfer.number, False, now)
        else:
            self._ledger.on_landed(worker, transfer.number, [], [], True, now)
