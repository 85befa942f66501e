"""The transfers of a follower: it obeys the leader, and answers with the ends of transfers."""

import time
from collections.abc import Callable, Sequence

from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.parallel.commands import (
    AbortBlocks,
    CloseTransfers,
    Command,
    LosePeer,
    OpenTransfers,
    ReceiveBlocks,
    SendBlocks,
    SharePlaces,
    TransferCommand,
    TransferEvents,
    TransfersClosed,
    TransfersOpened,
)
from blockyard.services.gpu_worker.transfers.rank_transfers import Events, RankTransfers, transfer_layout
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.bus.frame_links import FrameEnd
from blockyard.shared.bus.poller import Poller, Readable
from blockyard.shared.config.services.worker import WorkerConfig

BUSY_S, CALM_S = 0.001, 0.5  # between two polls while no command comes
OPEN_S, CLOSED_S = 0.0005, 0.05  # between two polls among commands, with open transfers and without


class FollowerTransfers:
    """Moves blocks while no command comes, and from time to time between commands."""

    def __init__(self, config: WorkerConfig, rank: int, pipe: FrameEnd[Command]) -> None:
        """pipe: to the leader. Answers go back on it."""
        self._config, self._rank, self._pipe = config, rank, pipe
        self._transfers: RankTransfers | None = None
        self._poller, self._poll_s = Poller(), 0.0
        self._poller.add(*pipe.sources)

    def watch(self, *sources: Readable) -> None:
        """Implements `SocketWatch`."""
        self._poller.add(*sources)

    def unwatch(self, *sources: Readable) -> None:
        """Implements `SocketWatch`."""
        self._poller.remove(*sources)

    def wait_for_command(self, work: Callable[[], bool]) -> None:
        """Returns when a command has come. Without transfers and work it does not wait: reading the command does.

        work: does a piece of other work, and returns whether more is left.
        """
        transfers, has_work = self._transfers, work()
        if transfers is None:
            while has_work and not self._pipe.is_readable:
                self._poller.wait(BUSY_S)
                has_work = work()
            return
        if time.monotonic() >= self._poll_s:
            self._poll(transfers)
        while not self._pipe.is_readable:
            self._poller.wait(0 if transfers.needs_polling else BUSY_S if transfers.busy or has_work else CALM_S)
            self._poll(transfers)
            has_work = has_work and work()

    def do(self, command: TransferCommand, blocks: TransferBlocks, stored: Sequence[StoredLayers] = ()) -> None:
        """blocks: of this rank, now. stored: layers of the last step that records them.

        Raises ConfigError if no socket can be bound.
        """
        self._poll_s = 0.0  # what it begins starts before the next wait
        if isinstance(command, OpenTransfers):
            self._open(command, blocks)
            return
        transfers = self._transfers
        assert transfers is not None, f"{command} without transfers"
        match command:
            case SharePlaces(places):
                transfers.share(places)
            case ReceiveBlocks(frame):
                try:
                    transfers.receive(frame)
                except ValueError as e:
                    transfers.refuse(frame, e)
            case SendBlocks(send, is_running):
                assert stored or not is_running, "a step of this rank has not recorded its layers"
                transfers.send(send, stored if is_running else ())
            case AbortBlocks(frame):
                transfers.abort(frame)
            case LosePeer(worker):
                transfers.lose(worker)
            case CloseTransfers():
                self._transfers = None
                self._answer(transfers, transfers.close())
                self._pipe.send(TransfersClosed())

    def _open(self, command: OpenTransfers, blocks: TransferBlocks) -> None:
        layout = transfer_layout(self._config, blocks)
        assert layout is not None, "the leader knows the scales of the KV cache"
        blocks.arena.renumber(command.generation)
        self._transfers = RankTransfers(self, command.worker, self._rank, self._config, blocks, layout)
        self._pipe.send(TransfersOpened(self._transfers.place))

    def _poll(self, transfers: RankTransfers) -> None:
        events = transfers.poll()
        self._poll_s = time.monotonic() + (OPEN_S if transfers.num_open else CLOSED_S)
        if events.received or events.sent:
            self._answer(transfers, events)

    def _answer(self, transfers: RankTransfers, events: Events) -> None:
        counts = transfers.counts()
        self._pipe.send(TransferEvents(events.received, events.sent, counts.bytes_written, counts.dropped))
