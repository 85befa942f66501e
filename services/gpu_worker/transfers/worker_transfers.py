"""Translates between the scheduler's frames and this worker's transfers of KV blocks."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from blockyard.services.gpu_worker.interfaces import StoredLayers, WorkerLinks
from blockyard.services.kv_transfer.endpoint import TransferEndpoint
from blockyard.services.kv_transfer.layout import as_text
from blockyard.services.kv_transfer.link_counts import LinkCounts
from blockyard.services.kv_transfer.protocol.frames import Transfer
from blockyard.services.kv_transfer.protocol.incoming import BlocksLanded, Received, ReceiverEnded, SenderUnreachable
from blockyard.services.kv_transfer.protocol.outgoing import Sent
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.config.services.worker import DUMMY_FORMATS, KVTransferConfig, WorkerConfig
from blockyard.shared.messages import Geometry, KVAbort, KVLanded, KVReceive, KVSend, KVSendEnded, Stats, StepPlan

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096  # numbers of ended sends: plans that were queued before may still name them
CALM_POLL_S = 0.005


class WorkerTransfers:
    """Turns `KVReceive`, `KVAbort` and plans with `KVSend` into calls of a `TransferEndpoint`, and its events into
    answers.

    A thread that calls it has to call `poll` when the ring's links wake up, within a millisecond while `busy`, and
    without waiting while `needs_polling`.

    Answers are for the scheduler that is attached when `poll` returns them. Numbers of transfers are never used again,
    so a transfer that is not open has ended, or has not begun and never will once it was aborted.
    """

    def __init__(self, config: WorkerConfig, links: WorkerLinks, blocks: Callable[[], TransferBlocks]) -> None:
        """blocks: returns the runner's blocks, which may be other ones after sleep.

        Raises ConfigError for settings with which no socket can be bound, or no link opened.
        """
        assert config.kv_transfer is not None
        self._config: KVTransferConfig = config.kv_transfer
        self._bus, self._scope = config.process.bus, scope_of(config)
        self._links, self._me, self._find_blocks = links, links.me.incarnation, blocks
        self._endpoint: TransferEndpoint | None = None
        self._receives: dict[int, KVReceive] = {}  # transfers that have not ended
        self._generation = 0  # the last one that was open
        self._poll_s = 0.0  # time of the next poll if no transfer is open
        self._ended_sends: OrderedDict[int, bool] = OrderedDict()  # number -> whether it was complete
        self._launched: set[tuple[int, int]] = set()  # scheduler and number of plans that `on_launched` has sent
        self._answers: list[KVLanded | KVSendEnded] = []
        self._past = LinkCounts()  # of links to earlier memory
        self.open()

    @property
    def busy(self) -> bool:
        return bool(self._answers) or (self._endpoint is not None and self._endpoint.busy)

    @property
    def needs_polling(self) -> bool:
        return self._endpoint is not None and self._endpoint.needs_polling

    @property
    def num_open(self) -> int:
        return 0 if self._endpoint is None else self._endpoint.senders.num_open + len(self._receives)

    def open(self) -> None:
        """While the scales of the KV cache are not known it stays closed: this worker exchanges blocks with none."""
        blocks, before = self._find_blocks(), self._endpoint
        layout = blocks.layout
        if layout is not None:
            layout = msgspec.structs.replace(layout, scope=self._scope, checksums=self._config.checksums)
        if before is not None and before.blocks.arena is blocks.arena and before.layout == layout:
            return
        self.close()
        if layout is None:
            return
        blocks.arena.renumber(self._generation + 1)
        self._generation = blocks.arena.generation
        self._endpoint = TransferEndpoint(self._links, self._me, self._bus, self._config, blocks, layout)

    def describe(self, geometry: Geometry) -> Geometry:
        endpoint, role = self._endpoint, self._config.role
        if endpoint is None:
            return msgspec.structs.replace(geometry, kv_role=role)
        return msgspec.structs.replace(
            geometry,
            kv_role=role,
            kv_layout=as_text(endpoint.layout),
            kv_generation=endpoint.generation,
            kv_endpoint=endpoint.receiver.endpoint.encode(),
        )

    def count(self, stats: Stats) -> Stats:
        """Returns this worker's counters and those of transfers, and the receivers of sends since the last call."""
        counts, endpoint = self._past, self._endpoint
        if endpoint is not None:
            counts = counts.copy()
            counts.add(endpoint.counts())
        return msgspec.structs.replace(
            stats,
            transfer_bytes=counts.bytes_written,
            transfer_frames_dropped=counts.dropped,
            sends_to=endpoint.senders.take_sent_to() if endpoint is not None else [],
        )

    def open_transfers(self) -> dict[int, list[int]]:
        if self._endpoint is None:
            return {}
        received = {number: frame.blocks for number, frame in self._receives.items()}
        return received | self._endpoint.senders.open_transfers()

    def receive(self, frame: KVReceive) -> None:
        """Reserves blocks for another worker. A frame that comes twice is ignored."""
        endpoint, number = self._endpoint, frame.transfer
        if endpoint is None:
            self._answers.append(KVLanded(self._me, number, [], [], True))
            return
        if number in self._receives:
            return
        transfer = Transfer(
            number, frame.source, frame.source_generation, self._me, endpoint.generation, list(frame.blocks)
        )
        try:
            endpoint.receiver.expect(transfer)
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", number, e)
            self._answers.append(KVLanded(self._me, number, [], [], True))
            return
        self._receives[number] = frame
        endpoint.blocks.begin_receive(number, frame.blocks)
        if frame.ticket:
            endpoint.receiver.admit(frame.ticket, frame.source)

    def abort(self, frame: KVAbort) -> None:
        """Answers at once for a transfer that is not open here, each time."""
        endpoint, number = self._endpoint, frame.transfer
        if endpoint is not None and number in self._receives:
            endpoint.receiver.revoke(number, frame.sender_stopped)
        elif endpoint is not None and endpoint.senders.abort(number, "the scheduler has given it up"):
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
        endpoint, number = self._endpoint, send.transfer
        if endpoint is None or number in self._ended_sends:
            self._remember_send(number, is_complete=self._ended_sends.get(number, False))
            return
        try:
            if stored is None:
                endpoint.senders.write(send, range(endpoint.layout.num_layers))
            else:
                endpoint.senders.write(send, stored.layers, stored.is_stored)
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", number, e)
            self._refuse_send(endpoint, number, e)
        except Exception as e:
            log.exception("KV transfer %d", number)
            self._refuse_send(endpoint, number, e)

    def on_gone(self, worker: int) -> None:
        if self._endpoint is not None:
            self._poll_s = 0.0
            self._endpoint.senders.lose(worker)
            self._endpoint.receiver.on_gone(worker)

    def poll(self) -> list[KVLanded | KVSendEnded]:
        """Without an open transfer it looks for new links only from time to time, to cost a step nothing."""
        endpoint = self._endpoint
        if endpoint is not None:
            now = time.monotonic()
            if now >= self._poll_s or self._receives or endpoint.senders.num_open:
                self._poll_s = now + CALM_POLL_S
                self._poll(endpoint)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """The next `poll` returns the answers for the transfers that this has ended."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        endpoint.close()
        self._poll_senders(endpoint)
        for number in list(self._receives):
            self._end_receive(endpoint, number, [], [])
        self._past.add(endpoint.counts())

    def _poll(self, endpoint: TransferEndpoint) -> None:
        landed: dict[int, list[int]] = {}  # blocks by transfer
        for event in endpoint.receiver.poll():
            frame = self._receives[event.number]
            match event:
                case BlocksLanded(number, positions):
                    blocks = [frame.blocks[position] for position in positions]
                    endpoint.blocks.landed(blocks)
                    landed.setdefault(number, []).extend(blocks)
                case SenderUnreachable(number):
                    self._answers.append(KVLanded(self._me, number, [], unreachable_sender=frame.source))
                case ReceiverEnded(number, outcome, _, corrupt, detail):
                    if outcome is not Received.LANDED:
                        log.info("KV transfer %d from %x: %s %s", number, frame.source, outcome, detail)
                    self._end_receive(
                        endpoint, number, landed.pop(number, []), [frame.blocks[position] for position in corrupt]
                    )
        self._answers += [KVLanded(self._me, number, blocks) for number, blocks in landed.items()]
        self._poll_senders(endpoint)

    def _poll_senders(self, endpoint: TransferEndpoint) -> None:
        for sent in endpoint.senders.poll():
            is_complete = sent.outcome is Sent.WRITTEN
            if not is_complete:
                log.info("KV transfer %d is not complete: %s %s", sent.number, sent.outcome, sent.detail)
            self._remember_send(sent.number, is_complete)

    def _refuse_send(self, endpoint: TransferEndpoint, number: int, error: Exception) -> None:
        if not endpoint.senders.abort(number, str(error)):
            self._remember_send(number, is_complete=False)

    def _end_receive(self, endpoint: TransferEndpoint, number: int, landed: list[int], failed: list[int]) -> None:
        frame = self._receives.pop(number)
        endpoint.blocks.end(number)
        endpoint.receiver.withdraw(frame.ticket)
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
