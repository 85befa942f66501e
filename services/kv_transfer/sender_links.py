"""The links over which this worker sends KV blocks: one for each receiving worker."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.layout import BlockLayout, LinkLayouts
from blockyard.services.kv_transfer.link_counts import LinkCounts
from blockyard.services.kv_transfer.protocol.events import SenderEnded
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.services.kv_transfer.staging import StagingMemory
from blockyard.services.kv_transfer.transfer_blocks import SocketWatch, TransferBlocks
from blockyard.shared.bus.sockets import Sockets
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.messages import KVSend

log = logging.getLogger(__name__)

IDLE_S = 60.0  # a link without transfers is closed after this time, and with it the mapping of the receiver's memory


@dataclass(slots=True, eq=False)
class _Target:
    """A link, and the memory of the receiver that it is for."""

    link: SenderLink
    generation: int
    used_s: float
    transfers: set[int] = field(default_factory=set)  # open ones
    is_watched: bool = True


class SenderLinks:
    """Opens a link at the first send to a worker. All work happens in `poll`. `write`, `lose` and `close` may wait some
    milliseconds for copies in flight, if a link must be closed."""

    def __init__(
        self,
        watch: SocketWatch,
        sender: int,
        sockets: Sockets,
        layout: BlockLayout,
        blocks: TransferBlocks,
        copies: CopyThread,
        config: KVTransferConfig,
        staging: StagingMemory,
    ) -> None:
        """sender: this worker's incarnation."""
        self._watch, self._me, self._sockets, self._layout = watch, sender, sockets, layout
        self._blocks, self._copies, self._config, self._staging = blocks, copies, config, staging
        self._targets: dict[int, _Target] = {}  # by incarnation
        self._by_transfer: dict[int, _Target] = {}
        self._ended: list[SenderEnded] = []  # of links that were closed
        self._counts = LinkCounts()  # of the same links

    @property
    def busy(self) -> bool:
        return any(target.link.busy for target in self._targets.values())

    @property
    def needs_polling(self) -> bool:
        return any(target.link.needs_polling for target in self._targets.values())

    def counts(self) -> LinkCounts:
        """Sums over all links, closed ones too."""
        counts = self._counts.copy()
        for target in self._targets.values():
            counts.add_sender(target.link)
        return counts

    def write(
        self,
        send: KVSend,
        layers: range,
        is_stored: Callable[[], bool] | None = None,
        layouts: LinkLayouts | None = None,
    ) -> None:
        """Sends blocks in some layers, in which they must be full once `is_stored` is true; None: they are.

        Opens link and transfer if they are not open. layouts: the same in all calls for a receiver; None: it has
        what this worker has.

        Raises ValueError for an endpoint that is not valid, and for blocks that this worker does not have.
        """
        number = send.transfer
        target = self._by_transfer.get(number)
        if target is None:
            target = self._target_of(send, layouts or LinkLayouts(self._layout))
            target.link.begin(number, send.target_generation)
            target.transfers.add(number)
            self._by_transfer[number] = target
        self._blocks.begin_send(number, send.blocks)
        target.link.write(number, send.blocks, send.target_blocks, layers, is_stored)

    def abort(self, number: int, reason: str) -> bool:
        """Aborts a transfer. Returns False if it is not open. `poll` reports its end."""
        target = self._by_transfer.get(number)
        if target is None:
            return False
        target.link.abort(number, reason)
        return True

    def lose(self, receiver: int) -> None:
        """The receiver has left the ring."""
        if receiver in self._targets:
            self._close_link(receiver)

    def poll(self) -> list[SenderEnded]:
        """Moves blocks on, and closes links that have been idle for long. Returns the transfers that have ended."""
        now = time.monotonic()
        for receiver, target in list(self._targets.items()):
            self._take(target, target.link.poll())
            if target.link.closed:
                self._unwatch(target)
            if target.link.closed and not target.transfers:
                del self._targets[receiver]
                self._counts.add_sender(target.link)
            elif target.transfers:
                target.used_s = now
            elif now - target.used_s > IDLE_S:
                self._close_link(receiver)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Aborts all transfers and closes the links. `poll` reports the ends."""
        for receiver in list(self._targets):
            self._close_link(receiver)

    def _target_of(self, send: KVSend, layouts: LinkLayouts) -> _Target:
        known = self._targets.get(send.target)
        if known is not None and not known.link.closed and known.generation == send.target_generation:
            return known
        if known is not None:
            self._close_link(send.target)
        link = SenderLink(
            self._sockets,
            send.target_endpoint.decode(),
            send.target,
            self._me,
            layouts,
            self._blocks.arena,
            self._copies,
            self._config,
            send.ticket,
            self._staging,
        )
        self._watch.watch(link.socket, link.monitor)
        made = self._targets[send.target] = _Target(link, send.target_generation, time.monotonic())
        return made

    def _close_link(self, receiver: int) -> None:
        target = self._targets.pop(receiver)
        target.link.close()
        self._take(target, target.link.poll())
        self._unwatch(target)
        self._counts.add_sender(target.link)

    def _unwatch(self, target: _Target) -> None:
        if target.is_watched:
            target.is_watched = False
            self._watch.unwatch(target.link.socket, target.link.monitor)

    def _take(self, target: _Target, ended: list[SenderEnded]) -> None:
        for event in ended:
            target.transfers.discard(event.number)
            self._by_transfer.pop(event.number, None)
            self._blocks.end(event.number)
        self._ended += ended
