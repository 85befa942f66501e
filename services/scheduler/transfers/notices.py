"""Handles workers' notices of KV transfers, and asks workers: failures, expired leases and audits."""

import logging

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.transfers.audit import TransferAudit
from blockyard.services.scheduler.transfers.failures import FailedBlocks, LinkBackoff
from blockyard.services.scheduler.transfers.handovers import Handovers
from blockyard.services.scheduler.transfers.ledger import Transfer, TransferLedger
from blockyard.shared.messages import Attached, KVAbort, KVLanded, KVOpenTransfers, KVSendEnded

log = logging.getLogger(__name__)

CHECK_S = 0.25  # between checks of leases


class TransferNotices:
    """Enters in the ledger what workers say. `Handovers` draws the consequences for sequences."""

    def __init__(
        self,
        handovers: Handovers,
        ledger: TransferLedger,
        audit: TransferAudit,
        links: LinkBackoff,
        groups: WorkerGroups,
        outbox: Outbox,
    ) -> None:
        self._handovers, self._groups, self._outbox = handovers, groups, outbox
        self._ledger, self._audit, self._links = ledger, audit, links
        self._failed_blocks = FailedBlocks()
        self.check_at = 0.0  # when `update` is due

    def on_message(self, worker: int, frame: KVLanded | KVSendEnded, now: float) -> None:
        self._handovers.now = now
        known = self._ledger.transfers.get(frame.transfer)
        was_aborted = known is None or known.is_aborted
        match frame:
            case KVLanded(number, unreachable_sender=sender) if sender:
                is_attached = sender in self._groups.attached
                transfer = self._ledger.on_sender_unreachable(worker, number, sender, is_attached, now)
            case KVLanded(number, blocks, failed, is_ended):
                transfer = self._ledger.on_landed(worker, number, blocks, failed, is_ended, now)
                if transfer is not None and failed:
                    self._count_failed(transfer, failed)
            case KVSendEnded(number, is_complete):
                transfer = self._ledger.on_send_ended(worker, number, is_complete, now)
        if transfer is not None and not was_aborted:
            self._count_outcome(transfer, now)
        self._handovers.apply()

    def on_audited(self, worker: int, frame: KVOpenTransfers, now: float) -> None:
        """A worker says which transfers are open there."""
        for number in self._audit.on_answer(worker, frame, now):
            self._outbox.send(worker, KVAbort(number))
        self._handovers.apply()

    def on_detached(self, worker: int, is_lost: bool) -> None:
        """A group was dropped. A worker that is lost answers no question."""
        now = self._handovers.now
        self._handovers.on_target_detached(worker)
        self._ledger.on_detached(worker, is_lost, now)
        self._links.on_detached(worker, now)
        self._audit.on_detached(worker)
        self._handovers.apply()

    def on_attached(self, group: WorkerGroup, frame: Attached) -> None:
        """Blocks of transfers that are still open on the worker are held until it says that they have ended."""
        pairs = zip(frame.open_transfers, frame.open_transfer_blocks, strict=False)
        for blocks in self._ledger.on_attached(group.worker, dict(pairs), self._handovers.now):
            group.kv_cache.blocks.hold_open(blocks)
        self._handovers.apply()

    def update(self, now: float) -> None:
        """Asks workers about transfers with an expired lease, and for the audit."""
        self.check_at = now + CHECK_S
        if not (self._ledger.transfers or self._links.failing or self._audit.workers):
            return
        self._handovers.now = now
        self._links.update(now)
        if self._audit.is_due(now):
            completed = {group.worker: group.plan_clock.last_completed for group in self._groups.attached.values()}
            for worker, question in self._audit.ask(completed, now):
                self._outbox.send(worker, question)
        for transfer in self._ledger.ask_overdue(now):
            log.warning("KV transfer %d has not ended within its lease: asking its workers", transfer.number)
            self._count_outcome(transfer, now)
            self._handovers.on_overdue(transfer)
        self._handovers.apply()

    def _count_failed(self, transfer: Transfer, failed: list[int]) -> None:
        """A source block that failed twice is cached there no longer, because later requests would send it again."""
        source = self._groups.attached.get(transfer.source.worker)
        if source is None:
            return
        hashes = self._handovers.hashes_of(transfer)
        for block in failed:
            block_hash = hashes.get(block)
            if block_hash is not None and self._failed_blocks.on_failed(source.worker, block_hash):
                log.warning("worker %x: a KV block failed its checksum twice and is dropped", source.worker)
                source.kv_cache.drop_cached(block_hash)

    def _count_outcome(self, transfer: Transfer, now: float) -> None:
        """Counts the outcome of a transfer that the scheduler has not given up."""
        pair = transfer.source.worker, transfer.target.worker
        if transfer.is_unknown:
            return
        if transfer.is_aborted or transfer.num_failed:
            self._links.on_failed(pair, transfer.number, self._ledger.last_opened, now)
        elif self._links.failing and transfer.has_landed:
            self._links.on_landed(pair, now)
