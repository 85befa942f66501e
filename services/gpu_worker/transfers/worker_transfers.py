"""Translates between the scheduler's frames and this worker's transfers of KV blocks."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from blockyard.services.gpu_worker.interfaces import StoredLayers, WorkerLinks
from blockyard.services.gpu_worker.transfers.group_transfers import GroupTransfers, TransferFollowers
from blockyard.services.gpu_worker.transfers.rank_transfers import Events, RankTransfers, transfer_layout
from blockyard.services.kv_transfer.layout import as_text
from blockyard.services.kv_transfer.link_counts import LinkCounts
from blockyard.services.kv_transfer.protocol.events import (
    BlocksLanded,
    Received,
    ReceiverEnded,
    SenderUnreachable,
    Sent,
)
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Geometry, KVAbort, KVLanded, KVReceive, KVSend, KVSendEnded, Stats, StepPlan

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096  # numbers of ended sends: plans that were queued before may still name them
CALM_POLL_S = 0.005


class WorkerTransfers:
    """Turns `KVReceive`, `KVAbort` and plans with `KVSend` into calls of a `GroupTransfers`, and its events into
    answers.

    A thread that calls it has to call `poll` when the ring's links wake up, within a millisecond while `busy`, and
    without waiting while `needs_polling`.

    Answers are for the scheduler that is attached when `poll` returns them. Numbers of transfers are never used again,
    so a transfer that is not open has ended, or has not begun and never will once it was aborted.
    """

    def __init__(
        self,
        config: WorkerConfig,
        links: WorkerLinks,
        blocks: Callable[[], TransferBlocks],
        followers: TransferFollowers | None = None,
    ) -> None:
        """blocks: returns the runner's blocks, which may be other ones after sleep. followers: None: there is one rank.

        Raises ConfigError for settings with which no socket can be bound, or no link opened.
        """
        assert config.kv_transfer is not None
        settings = config.kv_transfer
        self._config, self._role, self._followers = config, settings.role, followers
        self._links, self._me, self._find_blocks = links, links.me.incarnation, blocks
        self._group: GroupTransfers | None = None
        self._receives: dict[int, KVReceive] = {}  # transfers that have not ended
        self._generation = 0  # the last one that was open
        self._poll_s = 0.0  # time of the next poll if no transfer is open
        self._ended_sends: OrderedDict[int, bool] = OrderedDict()  # number -> whether it was complete
        self._launched: set[tuple[int, int]] = set()  # scheduler and number of plans that `on_launched` has sent
        self._answers: list[KVLanded | KVSendEnded] = []
        self._past = LinkCounts()  # of links to earlier memory
        self._sent_to: set[int] = set()  # receivers of sends to count, of earlier memory
        self.open()

    @property
    def busy(self) -> bool:
        return bool(self._answers) or (self._group is not None and self._group.own.busy)

    @property
    def needs_polling(self) -> bool:
        return self._group is not None and self._group.own.needs_polling

    @property
    def num_open(self) -> int:
        return 0 if self._group is None else self._group.num_sends + len(self._receives)

    def open(self) -> None:
        """While the scales of the KV cache are not known it stays closed: this worker exchanges blocks with none."""
        blocks, before = self._find_blocks(), self._group
        layout = transfer_layout(self._config, blocks)
        if before is not None and before.own.blocks.arena is blocks.arena and before.own.layout == layout:
            return
        self.close()
        if layout is None:
            return
        blocks.arena.renumber(self._generation + 1)
        self._generation = blocks.arena.generation
        own = RankTransfers(self._links, self._me, 0, self._config, blocks, layout)
        self._group = GroupTransfers(self._links, self._me, own, self._followers)

    def describe(self, geometry: Geometry) -> Geometry:
        group = self._group
        if group is None:
            return msgspec.structs.replace(geometry, kv_role=self._role)
        return msgspec.structs.replace(
            geometry,
            kv_role=self._role,
            kv_layout=as_text(group.own.layout),
            kv_generation=group.own.place.generation,
            kv_endpoint=group.endpoint,
        )

    def count(self, stats: Stats) -> Stats:
        """Returns this worker's counters with its transfers', and the receivers of sends since the last call."""
        counts, group = self._past, self._group
        if group is not None:
            counts = counts.copy()
            counts.add(group.counts())
            self._sent_to |= group.sent_to
            group.sent_to.clear()
        sent_to, self._sent_to = sorted(self._sent_to), set()
        return msgspec.structs.replace(
            stats,
            transfer_bytes=counts.bytes_written,
            transfer_frames_dropped=counts.dropped,
            sends_to=sent_to,
        )

    def open_transfers(self) -> dict[int, list[int]]:
        if self._group is None:
            return {}
        return {number: frame.blocks for number, frame in self._receives.items()} | self._group.open_sends

    def receive(self, frame: KVReceive) -> None:
        """Reserves blocks for another worker. A frame that comes twice is ignored."""
        group, number = self._group, frame.transfer
        if group is None:
            self._answers.append(KVLanded(number, [], [], True))
            return
        if number in self._receives:
            return
        try:
            group.receive(frame)
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", number, e)
            self._answers.append(KVLanded(number, [], [], True))
            return
        self._receives[number] = frame
        group.own.blocks.begin_receive(number, frame.blocks)

    def abort(self, frame: KVAbort) -> None:
        """Answers at once for a transfer that is not open here, each time."""
        group, number = self._group, frame.transfer
        if group is not None and (number in self._receives or group.is_sending(number)):
            group.abort(frame)
        elif frame.is_source:
            self._remember_send(number, is_complete=self._ended_sends.get(number, False))
        else:
            self._answers.append(KVLanded(number, [], [], True))

    def on_launched(self, plan: StepPlan, stored: Sequence[StoredLayers]) -> None:
        if self._config.pipeline_parallel_size > 1:
            return  # the leader's layers are not those of other stages: `on_plan_done` sends
        # plans of an earlier scheduler are not answered
        self._launched = {entry for entry in self._launched if entry[0] == plan.scheduler}
        self._launched.add((plan.scheduler, plan.number))
        for send in plan.sends:
            self.send(send, stored)

    def on_plan_done(self, plan: StepPlan) -> None:
        if (plan.scheduler, plan.number) in self._launched:
            self._launched.discard((plan.scheduler, plan.number))
            return
        for send in plan.sends:
            self.send(send)

    def send(self, send: KVSend, stored: Sequence[StoredLayers] = ()) -> None:
        """Sends blocks, see `RankTransfers.send`.

        A part of a transfer that has ended or was aborted is ignored, and answered again. What cannot be sent ends its
        transfer: the step goes on.
        """
        group, number = self._group, send.transfer
        if group is None or number in self._ended_sends:
            self._remember_send(number, is_complete=self._ended_sends.get(number, False))
            return
        try:
            group.send(send, stored)
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", number, e)
            if group.is_sending(number):
                group.abort(KVAbort(number, is_source=True))
            else:
                self._remember_send(number, is_complete=False)

    def on_gone(self, worker: int) -> None:
        if self._group is not None:
            self._poll_s = 0.0
            self._group.lose(worker)

    def poll(self) -> list[KVLanded | KVSendEnded]:
        """Without an open transfer it looks for new links only from time to time, to cost a step nothing."""
        group = self._group
        if group is not None:
            now = time.monotonic()
            if now >= self._poll_s or self._receives or group.num_sends:
                self._poll_s = now + CALM_POLL_S
                self._take(group, group.poll())
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """The next `poll` returns the answers for the transfers that this has ended."""
        group, self._group = self._group, None
        if group is None:
            return
        self._take(group, group.close())
        for number in list(self._receives):
            self._end_receive(group, number, [], [])
        self._past.add(group.counts())
        self._sent_to |= group.sent_to

    def _take(self, group: GroupTransfers, events: Events) -> None:
        landed: dict[int, list[int]] = {}  # blocks by transfer
        for event in events.received:
            frame = self._receives[event.number]
            match event:
                case BlocksLanded(number, positions):
                    blocks = [frame.blocks[position] for position in positions]
                    group.own.blocks.landed(blocks)
                    landed.setdefault(number, []).extend(blocks)
                case SenderUnreachable(number):
                    self._answers.append(KVLanded(number, [], unreachable_sender=frame.source))
                case ReceiverEnded(number, outcome, _, corrupt, detail):
                    if outcome is not Received.LANDED:
                        log.info("KV transfer %d from %x: %s %s", number, frame.source, outcome, detail)
                    self._end_receive(
                        group, number, landed.pop(number, []), [frame.blocks[position] for position in corrupt]
                    )
        self._answers += [KVLanded(number, blocks) for number, blocks in landed.items()]
        for sent in events.sent:
            is_complete = sent.outcome is Sent.WRITTEN
            if not is_complete:
                log.info("KV transfer %d is not complete: %s %s", sent.number, sent.outcome, sent.detail)
            self._remember_send(sent.number, is_complete)

    def _end_receive(self, group: GroupTransfers, number: int, landed: list[int], failed: list[int]) -> None:
        del self._receives[number]
        group.own.blocks.end(number)
        self._answers.append(KVLanded(number, landed, failed, True))

    def _remember_send(self, number: int, is_complete: bool) -> None:
        """Answers that a send has ended. It does not begin again."""
        self._ended_sends[number] = is_complete
        if len(self._ended_sends) > MAX_REMEMBERED:
            self._ended_sends.popitem(last=False)
        self._answers.append(KVSendEnded(number, is_complete))
