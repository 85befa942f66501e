"""All transfers of KV blocks to and from this worker."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from blockyard.services.gpu_worker.interfaces import KVMemory, StoredLayers, WorkerLinks
from blockyard.services.gpu_worker.transfers.link_counts import LinkCounts
from blockyard.services.gpu_worker.transfers.sender_links import SenderLinks
from blockyard.services.kv_transfer.connectors.selection import check_connector
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.layout import BlockLayout, as_text
from blockyard.services.kv_transfer.link_sockets import bind_address, transfer_sockets
from blockyard.services.kv_transfer.protocol.frames import Transfer
from blockyard.services.kv_transfer.protocol.incoming import BlocksLanded, Received, ReceiverEnded, SenderUnreachable
from blockyard.services.kv_transfer.protocol.outgoing import Sent
from blockyard.services.kv_transfer.receiver import TransferReceiver
from blockyard.services.kv_transfer.staging import StagingMemory
from blockyard.shared.bus.sockets import Sockets
from blockyard.shared.config.services.worker import DUMMY_FORMATS, KVTransferConfig, WorkerConfig
from blockyard.shared.messages import Geometry, KVAbort, KVLanded, KVReceive, KVSend, KVSendEnded, Stats, StepPlan

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096  # numbers of ended sends: plans that were queued before may still name them
CALM_POLL_S = 0.005


@dataclass(slots=True, eq=False)
class _Memory:
    """What belongs to one generation of the KV memory."""

    blocks: KVMemory
    layout: BlockLayout
    sockets: Sockets
    copies: CopyThread
    staging: StagingMemory
    receiver: TransferReceiver
    senders: SenderLinks
    receives: dict[int, KVReceive] = field(default_factory=dict)  # transfers that have not ended

    @property
    def generation(self) -> int:
        return self.blocks.arena.generation


class WorkerTransfers:
    """Owns links, sockets and the copy thread. A thread that calls it has to call `poll` when the ring's links wake up,
    within a millisecond while `busy`, and without waiting while `needs_polling`.

    Answers are for the scheduler that is attached when `poll` returns them. Numbers of transfers are never used again,
    so a transfer that is not open has ended, or has not begun and never will once it was aborted.
    """

    def __init__(self, config: WorkerConfig, links: WorkerLinks, memory: Callable[[], KVMemory]) -> None:
        """memory: returns the runner's blocks, which may be other ones after sleep.

        Raises ConfigError for settings with which no socket can be bound, or no link opened.
        """
        assert config.kv_transfer is not None
        self._config: KVTransferConfig = config.kv_transfer
        self._bus, self._scope = config.process.bus, scope_of(config)
        self._links, self._me, self._find_memory = links, links.me.incarnation, memory
        self._memory: _Memory | None = None
        self._generation = 0  # the last one that was open
        self._poll_s = 0.0  # time of the next poll if no transfer is open
        self._ended_sends: OrderedDict[int, bool] = OrderedDict()  # number -> whether it was complete
        self._launched: set[tuple[int, int]] = set()  # scheduler and number of plans that `on_launched` has sent
        self._answers: list[KVLanded | KVSendEnded] = []
        self._past = LinkCounts()  # of links to earlier memory
        self.open()

    @property
    def busy(self) -> bool:
        memory = self._memory
        return bool(self._answers) or (memory is not None and (memory.senders.busy or memory.receiver.busy))

    @property
    def needs_polling(self) -> bool:
        memory = self._memory
        return memory is not None and (memory.receiver.needs_polling or memory.senders.needs_polling)

    @property
    def num_open(self) -> int:
        return 0 if self._memory is None else self._memory.senders.num_open + len(self._memory.receives)

    def open(self) -> None:
        """While the scales of the KV cache are not known it stays closed: this worker exchanges blocks with none."""
        blocks = self._find_memory()
        layout = blocks.layout
        if layout is not None:
            layout = msgspec.structs.replace(layout, scope=self._scope, checksums=self._config.checksums)
        if self._memory is not None and self._memory.blocks.arena is blocks.arena and self._memory.layout == layout:
            return
        self.close()
        if layout is None:
            return
        check_connector(self._config.connector, blocks.arena)
        blocks.arena.renumber(self._generation + 1)
        self._generation = blocks.arena.generation
        encrypt = self._config.encrypt
        sockets, copies = transfer_sockets(self._bus, encrypt), CopyThread()
        address = bind_address(self._bus, self._config.port)
        staging = StagingMemory(blocks.arena.bytes.device)
        receiver = TransferReceiver(
            sockets, self._me, layout, blocks.arena, copies, not encrypt, address, self._config, staging
        )
        senders = SenderLinks(self._links, sockets, layout, blocks, copies, self._config, staging)
        self._memory = _Memory(blocks, layout, sockets, copies, staging, receiver, senders)
        self._links.watch(receiver.socket, receiver.monitor, copies.descriptor)

    def describe(self, geometry: Geometry) -> Geometry:
        memory, role = self._memory, self._config.role
        if memory is None:
            return msgspec.structs.replace(geometry, kv_role=role)
        return msgspec.structs.replace(
            geometry,
            kv_role=role,
            kv_layout=as_text(memory.layout),
            kv_generation=memory.generation,
            kv_endpoint=memory.receiver.endpoint.encode(),
        )

    def count(self, stats: Stats) -> Stats:
        """Returns this worker's counters and those of transfers, and the receivers of sends since the last call."""
        counts, memory = self._past, self._memory
        if memory is not None:
            counts = counts.copy()
            counts.add(memory.senders.counts())
            counts.add_drops(memory.receiver.drops)
        return msgspec.structs.replace(
            stats,
            transfer_bytes=counts.bytes_written,
            transfer_frames_dropped=counts.dropped,
            sends_to=memory.senders.take_sent_to() if memory is not None else [],
        )

    def open_transfers(self) -> dict[int, list[int]]:
        if self._memory is None:
            return {}
        received = {number: frame.blocks for number, frame in self._memory.receives.items()}
        return received | self._memory.senders.open_transfers()

    def receive(self, frame: KVReceive) -> None:
        """Reserves blocks for another worker. A frame that comes twice is ignored."""
        memory, number = self._memory, frame.transfer
        if memory is None:
            self._answers.append(KVLanded(self._me, number, [], [], True))
            return
        if number in memory.receives:
            return
        transfer = Transfer(
            number, frame.source, frame.source_generation, self._me, memory.generation, list(frame.blocks)
        )
        try:
            memory.receiver.expect(transfer)
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", number, e)
            self._answers.append(KVLanded(self._me, number, [], [], True))
            return
        memory.receives[number] = frame
        memory.blocks.begin_receive(number, frame.blocks)
        if frame.ticket:
            memory.receiver.admit(frame.ticket, frame.source)

    def abort(self, frame: KVAbort) -> None:
        """Answers at once for a transfer that is not open here, each time."""
        memory, number = self._memory, frame.transfer
        if memory is not None and number in memory.receives:
            memory.receiver.revoke(number, frame.sender_stopped)
        elif memory is not None and memory.senders.abort(number, "the scheduler has given it up"):
            return
        elif frame.is_source:
            self._remember_send(number, is_complete=self._ended_sends.get(number, False))
        else:
            self._answers.append(KVLanded(self._me, number, [], [], True))

    def on_launched(self, plan: StepPlan, stored: Sequence[StoredLayers]) -> None:
        # plans of an earlier scheduler are not answered
        self._launched = {entry for entry in self._launched if entry[0] == plan.scheduler}
        self._launched.add((plan.scheduler, plan.number))
        for send in plan.sends:
            for group in stored:
                self.send(send, group)

    def on_plan_done(self, plan: StepPlan) -> None:
        if (plan.scheduler, plan.number) in self._launched:
            self._launched.discard((plan.scheduler, plan.number))
            return
        for send in plan.sends:
            self.send(send)

    def send(self, send: KVSend, stored: StoredLayers | None = None) -> None:
        """Sends blocks in layers of a step that runs; None: in all layers, of a complete step.

        A part of a transfer that has ended or was aborted is ignored, and answered again. An unexpected error, for
        example of memory for the link, ends the transfer: the step goes on.
        """
        memory, number = self._memory, send.transfer
        if memory is None or number in self._ended_sends:
            self._remember_send(number, is_complete=self._ended_sends.get(number, False))
            return
        try:
            if stored is None:
                memory.senders.write(send, range(memory.layout.num_layers))
            else:
                memory.senders.write(send, stored.layers, stored.is_stored)
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", number, e)
            self._refuse_send(memory, number, e)
        except Exception as e:
            log.exception("KV transfer %d", number)
            self._refuse_send(memory, number, e)

    def on_gone(self, worker: int) -> None:
        if self._memory is not None:
            self._poll_s = 0.0
            self._memory.senders.lose(worker)
            self._memory.receiver.on_gone(worker)

    def poll(self) -> list[KVLanded | KVSendEnded]:
        """Without an open transfer it looks for new links only from time to time, to cost a step nothing."""
        memory = self._memory
        if memory is not None:
            now = time.monotonic()
            if now >= self._poll_s or memory.receives or memory.senders.num_open:
                self._poll_s = now + CALM_POLL_S
                self._poll(memory)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """The next `poll` returns the answers for the transfers that this has ended."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        memory.senders.close()
        self._links.unwatch(memory.receiver.socket, memory.receiver.monitor, memory.copies.descriptor)
        self._poll_senders(memory)
        memory.receiver.close()
        for number in list(memory.receives):
            self._end_receive(memory, number, [], [])
        memory.staging.close()
        memory.copies.close()
        memory.sockets.close()
        self._past.add(memory.senders.counts())
        self._past.add_drops(memory.receiver.drops)

    def _poll(self, memory: _Memory) -> None:
        landed: dict[int, list[int]] = {}  # blocks by transfer
        for event in memory.receiver.poll():
            frame = memory.receives[event.number]
            match event:
                case BlocksLanded(number, positions):
                    blocks = [frame.blocks[position] for position in positions]
                    memory.blocks.landed(blocks)
                    landed.setdefault(number, []).extend(blocks)
                case SenderUnreachable(number):
                    self._answers.append(KVLanded(self._me, number, [], unreachable_sender=frame.source))
                case ReceiverEnded(number, outcome, _, corrupt, detail):
                    if outcome is not Received.LANDED:
                        log.info("KV transfer %d from %x: %s %s", number, frame.source, outcome, detail)
                    self._end_receive(
                        memory, number, landed.pop(number, []), [frame.blocks[position] for position in corrupt]
                    )
        self._answers += [KVLanded(self._me, number, blocks) for number, blocks in landed.items()]
        self._poll_senders(memory)

    def _poll_senders(self, memory: _Memory) -> None:
        for sent in memory.senders.poll():
            is_complete = sent.outcome is Sent.WRITTEN
            if not is_complete:
                log.info("KV transfer %d is not complete: %s %s", sent.number, sent.outcome, sent.detail)
            self._remember_send(sent.number, is_complete)

    def _refuse_send(self, memory: _Memory, number: int, error: Exception) -> None:
        if not memory.senders.abort(number, str(error)):
            self._remember_send(number, is_complete=False)

    def _end_receive(self, memory: _Memory, number: int, landed: list[int], failed: list[int]) -> None:
        frame = memory.receives.pop(number)
        memory.blocks.end(number)
        memory.receiver.withdraw(frame.ticket)
        self._answers.append(KVLanded(self._me, number, landed, failed, True))

    def _remember_send(self, number: int, is_complete: bool) -> None:
        """Answers that a send has ended. It does not begin again."""
        self._ended_sends[number] = is_complete
        if len(self._ended_sends) > MAX_REMEMBERED:
            self._ended_sends.popitem(last=False)
        self._answers.append(KVSendEnded(self._me, number, is_complete))


def scope_of(config: WorkerConfig) -> str:
    """Returns what the KV of a block depends on besides its layout: workers with equal texts may exchange blocks."""
    model = config.served_model_names[0] if config.served_model_names else config.model_path
    seed = str(config.seed) if config.load_format in DUMMY_FORMATS else ""
    return "|".join([model, config.config_overrides, config.kv_cache_dtype, seed])
