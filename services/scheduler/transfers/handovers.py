"""Moves sequences from the group that computes their prompt to the group that decodes them.

A sequence runs in the source group through its prompt and the next token. Before that begins, blocks are reserved in
the target group, and each plan of the source sends the blocks that it fills. Then the sequence is *arriving*: it has no
slot and counts as waiting. When its blocks have landed they are cached in the target, and the sequence waits for the
target's next plan, which finds them there. If anything fails, the sequence waits again with the tokens it has.

Of a request with several sequences, and of a beam search, the first one is handed over. The others wait until it runs
in the target, and share its blocks there: see `ParallelSampling`. If it ends before, one of them continues with its
blocks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.handover import Handover
from blockyard.services.scheduler.sequences.requests import Phase, RunningSequence, Sequence
from blockyard.services.scheduler.transfers.audit import TransferAudit
from blockyard.services.scheduler.transfers.failures import LinkBackoff
from blockyard.services.scheduler.transfers.ledger import Transfer, TransferLedger
from blockyard.shared.messages import KVReceive, KVSend

TICKET_BYTES = 16
NOT_LANDED = "KV blocks of the prompt did not arrive, and kv_load_failure_policy is fail"


@dataclass(frozen=True, slots=True)
class TransferSettings:
    random_bytes: Callable[[int], bytes]  # for tickets
    fails: bool = False  # a sequence without its blocks ends with an error, and is not computed again


class Handovers:
    def __init__(
        self,
        groups: WorkerGroups,
        waiting: WaitingQueue,
        outbox: Outbox,
        ledger: TransferLedger,
        audit: TransferAudit,
        links: LinkBackoff,
        settings: TransferSettings,
        fail: Callable[[Sequence, str], None],
    ) -> None:
        """`fail` ends a sequence with an error."""
        self.num_arriving = 0  # sequences
        self.num_inbound: Counter[int] = Counter()  # sequences by target worker
        self._groups, self._waiting, self._outbox = groups, waiting, outbox
        self._ledger, self._audit, self._links = ledger, audit, links
        self._settings, self._fail = settings, fail
        self._live: dict[Handover, Sequence] = {}
        self._by_transfer: dict[int, Sequence] = {}
        self.arrived: list[tuple[Sequence, int]] = []  # sequences to be seated, and where
        self.now = 0.0  # of the event that is handled, or was last

    def take_arrived(self) -> list[tuple[Sequence, WorkerGroup]]:
        """Sequences that wait in the queue, with the group that has their blocks."""
        arrived, self.arrived = self.arrived, []
        attached = self._groups.attached
        return [
            (one, attached[worker])
            for one, worker in arrived
            if one.ticket and not one.is_set_aside and one.phase is Phase.WAITING and worker in attached
        ]

    def reserve(self, sequence: Sequence, source: WorkerGroup, target: WorkerGroup) -> bool:
        """Reserves blocks and an adapter's place in the target for a sequence that is about to be routed to the source.

        Returns False if the target has no room.
        """
        adapter = sequence.request.adapter
        if not target.holds(sequence.request):
            return False
        missing, cached = target.kv_cache.missing_blocks(sequence, sequence.num_tokens)
        pool = target.kv_cache.blocks
        pool.share(cached)
        blocks = pool.reserve(len(missing))
        if blocks is None:
            pool.release(cached, ())
            return False
        handover = Handover(
            source.worker,
            target.worker,
            sequence.num_tokens,
            sequence.num_to_place,
            list(missing),
            blocks,
            list(missing.values()),
            cached,
            None if adapter is None else target.adapters.start(adapter),
        )
        sequence.handover = handover
        self._live[handover] = sequence
        self.num_inbound[target.worker] += handover.num_sequences
        if self._links.failing:
            self._links.on_chosen((source.worker, target.worker), self.now)
        return True

    def begin(self, group: WorkerGroup, running: RunningSequence, now: float) -> None:
        """A sequence with a handover starts in a group. Both workers hear of the transfer."""
        self.now = now
        handover = running.sequence.handover
        assert handover is not None
        is_here = handover.source == group.worker and handover.num_tokens == running.prefill_end
        # behind a sibling's prompt it may start without the first block of the window that the target needs
        if not is_here or (handover.positions and handover.positions[0] < running.table.num_freed):
            self.drop(running.sequence)  # it goes on where it started
            return
        running.set_leaves_prefilled()
        if not handover.target_blocks:  # the target has all blocks
            handover.landed = set()
            return
        transfer = self._ledger.open(handover.source, handover.target, handover.target_blocks)
        handover.transfer, handover.ticket = transfer.number, self._settings.random_bytes(TICKET_BYTES)
        self._by_transfer[transfer.number] = running.sequence
        self._audit.on_opened(handover.source, handover.target, self.now)
        self._outbox.send_before_plans(
            handover.target,
            KVReceive(
                transfer.number,
                group.worker,
                group.geometry.kv_generation,
                handover.target_blocks,
                handover.ticket,
                group.geometry.kv_endpoint,
            ),
        )

    def send(self, group: WorkerGroup, running: RunningSequence, now: float) -> list[KVSend]:
        """Returns the sends of the plan that is being built, after it scheduled tokens of the sequence: one or none."""
        handover = running.sequence.handover
        assert handover is not None
        transfer = self._ledger.transfers.get(handover.transfer)
        if transfer is None or transfer.is_aborted or transfer.target.has_answered:
            return []
        end = min(running.num_scheduled_tokens, running.prefill_end) // group.kv_cache.block_size
        self.now = now
        first = handover.num_sent
        last = bisect_left(handover.positions, end, first)
        if first == last:
            return []
        assert handover.positions[first] >= running.table.num_freed, "a block outside the window is sent"
        blocks = [running.table.blocks[i] for i in handover.positions[first:last]]
        group.kv_cache.blocks.share(blocks)
        handover.num_sent, is_last = last, last == len(handover.positions)
        self._ledger.send(transfer, blocks, is_last, group.plan_clock.last_sent + 1, now)
        geometry = self._groups.attached[handover.target].geometry
        return [
            KVSend(
                transfer.number,
                handover.target,
                geometry.kv_generation,
                geometry.kv_endpoint,
                blocks,
                handover.target_blocks[first:last],
                is_last,
                handover.ticket,
            )
        ]

    def on_prefilled(self, sequence: Sequence, now: float | None) -> None:
        """A sequence has its first token, and has left the source's batch. `now`: None if no client gets it now."""
        sequence.on_prefilled(now)
        for other in sequence.request.awaiting_prompt:
            other.share_prefilled(sequence)
        handover = sequence.handover
        if handover is None:  # the target was lost meanwhile
            self._wait(sequence)
            return
        handover.is_prefilled = True
        self.num_arriving += 1
        self._waiting.park(sequence)
        self._seat_landed(sequence, handover)

    def pass_on(self, sequence: Sequence, heir: Sequence) -> None:
        """A sequence ends whose prompt is computed. Another one of its request, in no queue, goes on in its place."""
        handover = sequence.handover
        assert handover is not None
        if sequence.phase is Phase.ARRIVING:
            self._waiting.unpark(sequence)
        else:
            self.num_arriving += 1
        sequence.handover = None
        heir.handover = handover
        heir.on_prefilled(None)
        for other in heir.request.awaiting_prompt:
            other.share_prefilled(heir)
        self._waiting.park(heir)
        self._live[handover] = heir
        if handover.transfer in self._by_transfer:
            self._by_transfer[handover.transfer] = heir
        handover.is_prefilled = True
        self._seat_landed(heir, handover)

    def drop(self, sequence: Sequence) -> None:
        """Ends the handover of a sequence, in whatever state. The caller decides what becomes of the sequence."""
        handover = sequence.handover
        assert handover is not None
        self._forget(sequence, handover)
        target = self._groups.attached.get(handover.target)
        if target is not None:
            target.kv_cache.blocks.release(handover.held_blocks, ())
            self._groups.mark_dirty([target])
        transfer = self._ledger.transfers.get(handover.transfer)
        if transfer is not None and handover.landed is None:
            self._ledger.abort(transfer, self.now)
            self.apply()

    def on_overdue(self, transfer: Transfer) -> None:
        """The lease is over, and the workers are asked. When it is over again, the sequence waits no longer."""
        sequence = self._by_transfer.get(transfer.number)
        if sequence is None or sequence.handover is None:
            return
        handover = sequence.handover
        if handover.is_prefilled and handover.was_asked:
            self.drop(sequence)
            if self._settings.fails:
                self._end_unlanded(sequence)
            else:
                self._wait(sequence)
        handover.was_asked = True

    def on_target_detached(self, worker: int) -> None:
        """A group was dropped, and with it the blocks that were held there."""
        for handover, sequence in list(self._live.items()):
            if handover.target == worker:
                was_arriving = sequence.phase is Phase.ARRIVING
                self._forget(sequence, handover)
                if was_arriving:
                    self._wait(sequence)

    def hashes_of(self, transfer: Transfer) -> dict[int, bytes]:
        """Hashes of the target blocks; empty if no sequence waits for them any more."""
        sequence = self._by_transfer.get(transfer.number)
        if sequence is None or sequence.handover is None:
            return {}
        return dict(zip(sequence.handover.target_blocks, sequence.handover.hashes, strict=True))

    def apply(self) -> None:
        """Called when the ledger has changed: sends its questions, and gives back blocks that no worker uses."""
        for transfer, end, blocks in self._ledger.take_released():
            group = self._groups.attached.get(end.worker)
            sequence = self._by_transfer.get(transfer.number) if end is transfer.target else None
            if sequence is not None and sequence.handover is not None:
                sequence.handover.landed = transfer.landed
                self._seat_landed(sequence, sequence.handover)
            elif group is not None:
                group.kv_cache.blocks.release(blocks, ())
                self._groups.mark_dirty([group])
        for worker, frame in self._ledger.take_asks():
            self._outbox.send(worker, frame)

    def _seat_landed(self, sequence: Sequence, handover: Handover) -> None:
        """The sequence may go on in the target once its prompt is computed and the transfer has ended there."""
        if not handover.is_prefilled or handover.landed is None:
            return
        self._forget(sequence, handover)
        target = self._groups.attached[handover.target]
        pool, landed = target.kv_cache.blocks, handover.landed
        blocks, hashes = handover.target_blocks, handover.hashes
        is_whole = landed.issuperset(blocks)
        if not is_whole:
            hashes = [block_hash for block, block_hash in zip(blocks, hashes, strict=True) if block in landed]
            blocks = [block for block in blocks if block in landed]
        pool.land(blocks, hashes)
        pool.release(handover.held_blocks, ())
        self._groups.mark_dirty([target])
        if self._settings.fails and not is_whole:
            self._end_unlanded(sequence)
            return
        self._wait(sequence)
        self.arrived.append((sequence, handover.target))

    def _end_unlanded(self, sequence: Sequence) -> None:
        """Ends a sequence after its blocks did not land, and the ones that wait for its prompt."""
        for one in [*sequence.request.awaiting_prompt, sequence]:
            self._fail(one, NOT_LANDED)

    def _forget(self, sequence: Sequence, handover: Handover) -> None:
        sequence.handover = None
        del self._live[handover]
        self._by_transfer.pop(handover.transfer, None)
        self.num_inbound[handover.target] -= handover.num_sequences
        target = self._groups.attached.get(handover.target)
        if handover.adapter_place is not None and target is not None:
            target.adapters.end(handover.adapter_place)
        if sequence.phase is Phase.ARRIVING:
            self._waiting.unpark(sequence)
            self.num_arriving -= 1

    def _wait(self, sequence: Sequence) -> None:
        sequence.on_waiting()
        self._waiting.push(sequence)
