"""Everything that sends and receives KV blocks for one generation of a worker's KV memory."""

from blockyard.services.kv_transfer.connectors.selection import check_connector
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.services.kv_transfer.link_counts import LinkCounts
from blockyard.services.kv_transfer.link_sockets import bind_address, transfer_sockets
from blockyard.services.kv_transfer.receiver import TransferReceiver
from blockyard.services.kv_transfer.sender_links import SenderLinks
from blockyard.services.kv_transfer.staging import StagingMemory
from blockyard.services.kv_transfer.transfer_blocks import SocketWatch, TransferBlocks
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig


class TransferEndpoint:
    """The receiver and the links to receivers, with the sockets, the copy thread and the buffers that they share.

    Poll both when a watched socket is readable, within a millisecond while `busy`, and without waiting while
    `needs_polling`. After `close`, `senders.poll` still returns the transfers that this has ended.
    """

    def __init__(
        self,
        watch: SocketWatch,
        worker: int,
        bus: BusConfig,
        config: KVTransferConfig,
        blocks: TransferBlocks,
        layout: BlockLayout,
    ) -> None:
        """worker: its incarnation. layout: of `blocks`, with `scope`.

        Raises ConfigError for settings with which no socket can be bound, or no link opened.
        """
        check_connector(config.connector, blocks.arena)
        self.blocks, self.layout = blocks, layout
        self._watch, self._sockets = watch, transfer_sockets(bus, config.encrypt)
        self._copies = CopyThread()
        self._staging = StagingMemory(blocks.arena)
        self.receiver = TransferReceiver(
            self._sockets,
            worker,
            layout,
            blocks.arena,
            self._copies,
            not config.encrypt,
            bind_address(bus, config.port),
            config,
            self._staging,
        )
        self.senders = SenderLinks(watch, worker, self._sockets, layout, blocks, self._copies, config, self._staging)
        watch.watch(self.receiver.socket, self.receiver.monitor, self._copies.descriptor)

    @property
    def generation(self) -> int:
        return self.blocks.arena.generation

    @property
    def busy(self) -> bool:
        return self.senders.busy or self.receiver.busy

    @property
    def needs_polling(self) -> bool:
        return self.senders.needs_polling or self.receiver.needs_polling

    def counts(self) -> LinkCounts:
        """Sums over all links, closed ones too."""
        counts = self.senders.counts()
        counts.add_drops(self.receiver.drops)
        return counts

    def close(self) -> None:
        """Aborts all transfers. Waits some milliseconds for copies in flight."""
        self.senders.close()
        self._watch.unwatch(self.receiver.socket, self.receiver.monitor, self._copies.descriptor)
        self.receiver.close()
        self._staging.close()
        self._copies.close()
        self._sockets.close()
