"""The transfers of one rank: its part of blocks goes to, or comes from, the ranks of another worker that have it."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.kv_transfer.endpoint import TransferEndpoint
from blockyard.services.kv_transfer.layout import BlockLayout, LinkLayouts
from blockyard.services.kv_transfer.link_counts import LinkCounts
from blockyard.services.kv_transfer.protocol.events import IncomingEvent, Received, ReceiverEnded, SenderEnded, Sent
from blockyard.services.kv_transfer.protocol.frames import Transfer
from blockyard.services.kv_transfer.routes import (
    RankPlace,
    RankRoute,
    decode_places,
    find_routes,
    pair_number,
    rank_incarnation,
    rank_ticket,
)
from blockyard.services.kv_transfer.transfer_blocks import SocketWatch, TransferBlocks
from blockyard.shared.config.services.worker import DUMMY_FORMATS, KVTransferConfig, WorkerConfig
from blockyard.shared.messages import KVAbort, KVReceive, KVSend

log = logging.getLogger(__name__)

LayerGroups = Sequence[tuple[range, Callable[[], bool] | None]]  # None: they are stored
MAX_REMEMBERED = 4096  # sends: later parts of one that has ended with some rank are not sent to that


@dataclass(slots=True)
class Events:
    """Notices of transfers between pairs of ranks, or of whole transfers."""

    received: list[IncomingEvent] = field(default_factory=list)
    sent: list[SenderEnded] = field(default_factory=list)


class RankTransfers:
    """Has a transfer, with a number of its own, for each rank that it exchanges something with for a `KVReceive` or
    `KVSend`. `poll` returns what happens to these.

    Call `share` before the first transfer. None of the calls waits, except `close`.
    """

    def __init__(
        self,
        watch: SocketWatch,
        worker: int,
        rank: int,
        config: WorkerConfig,
        blocks: TransferBlocks,
        layout: BlockLayout,
    ) -> None:
        """worker: incarnation of the leader. layout: of `blocks`, see `transfer_layout`.

        Raises ConfigError for settings with which no socket can be bound, or no link opened.
        """
        assert config.kv_transfer is not None
        self.layout, self.blocks, self._rank = layout, blocks, rank
        self._me, settings = rank_incarnation(worker, rank), of_rank(config.kv_transfer, rank)
        self._endpoint = TransferEndpoint(watch, self._me, config.process.bus, settings, blocks, layout)
        generation = blocks.arena.generation
        self.place = RankPlace(self._endpoint.receiver.endpoint, generation, layout.part or layout.whole)
        self._places = [self.place]
        self._receives: dict[int, dict[int, bytes]] = {}  # by transfer: tickets of open pairs, by their number
        self._sends: OrderedDict[int, dict[int, RankRoute]] = OrderedDict()  # by transfer: open pairs, by their number
        self._transfers: dict[int, int] = {}  # by number of an open pair
        self._num_ranks: dict[int, int] = {}  # of other workers, by incarnation
        self._refused = Events()

    @property
    def busy(self) -> bool:
        return self._endpoint.busy or bool(self._refused.received or self._refused.sent)

    @property
    def needs_polling(self) -> bool:
        return self._endpoint.needs_polling

    @property
    def num_open(self) -> int:
        """Pairs with a transfer that has not ended."""
        return len(self._transfers)

    def share(self, places: Sequence[RankPlace]) -> None:
        """places: of all ranks of this worker, in order."""
        self._places = list(places)

    def counts(self) -> LinkCounts:
        return self._endpoint.counts()

    def receive(self, frame: KVReceive) -> list[int]:
        """Lets ranks of another worker write to the blocks. Returns the numbers of all pairs of ranks.

        Raises ValueError, see `IncomingTransfers.expect`.
        """
        theirs = self._senders_of(frame)
        routes = find_routes(self.layout, [one.part for one in theirs], [one.part for one in self._places])
        for route in routes:
            if route.receiver == self._rank:
                self._expect(frame, route, theirs[route.sender].generation)
        return [pair_number(frame.transfer, route) for route in routes]

    def refuse(self, frame: KVReceive, error: Exception) -> None:
        """This rank cannot receive what the leader has accepted: `poll` returns the ends."""
        theirs = self._senders_of(frame)
        routes = find_routes(self.layout, [one.part for one in theirs], [one.part for one in self._places])
        for number in [pair_number(frame.transfer, one) for one in routes if one.receiver == self._rank]:
            if number in self._transfers:
                self._endpoint.receiver.revoke(number)
            else:
                self._refused.received.append(ReceiverEnded(number, Received.REVOKED, [], [], str(error)))

    def send(self, send: KVSend, stored: Sequence[StoredLayers] = ()) -> list[int]:
        """Sends blocks in all layers. Returns the numbers of all pairs.

        stored: all layers, in groups that leave as a step that runs stores them. Empty: the blocks are complete.

        What cannot be sent to a rank ends, and `poll` returns that. Raises ValueError for an endpoint that is none.
        """
        theirs, number = decode_places(send.target_endpoint), send.transfer
        routes = find_routes(self.layout, [one.part for one in self._places], [one.part for one in theirs])
        self._num_ranks[send.target] = len(theirs)
        if number not in self._sends:
            own = {pair_number(number, route): route for route in routes if route.sender == self._rank}
            self._sends[number] = own
            self._transfers.update(dict.fromkeys(own, number))
            if len(self._sends) > MAX_REMEMBERED:
                self._sends.popitem(last=False)
        groups: LayerGroups = [(one.layers, one.is_stored) for one in stored] or [(range(self.layout.num_layers), None)]
        for pair, route in self._sends[number].items():
            self._send(send, pair, route, theirs[route.receiver], groups)
        return [pair_number(number, route) for route in routes]

    def abort(self, frame: KVAbort) -> None:
        """Gives a transfer up, in whichever direction it is."""
        for pair in self._receives.get(frame.transfer, ()):
            self._endpoint.receiver.revoke(pair, frame.sender_stopped)
        for pair in self._sends.get(frame.transfer, ()):
            self._endpoint.senders.abort(pair, "the scheduler has given it up")

    def lose(self, worker: int) -> None:
        """Another worker has left the ring."""
        for rank in range(self._num_ranks.pop(worker, 1)):
            peer = rank_incarnation(worker, rank)
            self._endpoint.senders.lose(peer)
            self._endpoint.receiver.on_gone(peer)

    def poll(self) -> Events:
        """Moves blocks on."""
        events, self._refused = self._refused, Events()
        events.received += self._endpoint.receiver.poll()
        events.sent += self._endpoint.senders.poll()
        self._forget_ended(events)
        return events

    def close(self) -> Events:
        """Aborts all transfers. Waits some milliseconds for copies in flight. No worker writes to the blocks after
        that: returns the ends of sends, and of receives."""
        self._endpoint.close()
        events = Events(sent=self._endpoint.senders.poll())
        pairs = [pair for tickets in self._receives.values() for pair in tickets]
        events.received += [ReceiverEnded(pair, Received.REVOKED, [], [], "closed") for pair in pairs]
        return events

    def _senders_of(self, frame: KVReceive) -> list[RankPlace]:
        if not frame.source_endpoint:
            return [RankPlace("", frame.source_generation, self.layout.whole)]
        places = decode_places(frame.source_endpoint)
        self._num_ranks[frame.source] = len(places)
        return places

    def _expect(self, frame: KVReceive, route: RankRoute, generation: int) -> None:
        """generation: of the sender."""
        pair, sender = pair_number(frame.transfer, route), rank_incarnation(frame.source, route.sender)
        blocks, ticket = list(frame.blocks), rank_ticket(frame.ticket, route.sender)
        transfer = Transfer(pair, sender, generation, self._me, self.place.generation, blocks, route.part)
        self._endpoint.receiver.expect(transfer)
        self._receives.setdefault(frame.transfer, {})[pair] = ticket
        self._transfers[pair] = frame.transfer
        if ticket:
            self._endpoint.receiver.admit(ticket, sender)

    def _send(
        self,
        send: KVSend,
        pair: int,
        route: RankRoute,
        to: RankPlace,
        groups: LayerGroups,
    ) -> None:
        one = msgspec.structs.replace(
            send,
            transfer=pair,
            target=rank_incarnation(send.target, route.receiver),
            target_generation=to.generation,
            target_endpoint=to.endpoint.encode(),
            ticket=rank_ticket(send.ticket, self._rank),
        )
        layouts = LinkLayouts(self.layout, route.part, None if route.part is None else to.part)
        try:
            for layers, is_stored in groups:
                self._endpoint.senders.write(one, layers, is_stored, layouts)
            return
        except ValueError as e:
            log.error("KV transfer %d is refused: %s", send.transfer, e)
            error = str(e)
        except Exception as e:  # for example no memory for the link: the step goes on
            log.exception("KV transfer %d", send.transfer)
            error = str(e)
        if not self._endpoint.senders.abort(pair, error):
            self._refused.sent.append(SenderEnded(pair, Sent.ABORTED, error))

    def _forget_ended(self, events: Events) -> None:
        for sent in events.sent:
            number = self._transfers.pop(sent.number, None)
            if number is not None and number in self._sends:
                self._sends[number].pop(sent.number, None)
        for event in events.received:
            if not isinstance(event, ReceiverEnded) or event.number not in self._transfers:
                continue
            number = self._transfers.pop(event.number)
            tickets = self._receives[number]
            self._endpoint.receiver.withdraw(tickets.pop(event.number))
            if not tickets:
                del self._receives[number]


def transfer_layout(config: WorkerConfig, blocks: TransferBlocks) -> BlockLayout | None:
    """Returns the layout of a rank's blocks as other workers compare it; None while its scales are not known."""
    layout, settings = blocks.layout, config.kv_transfer
    if layout is None or settings is None:
        return None
    return msgspec.structs.replace(layout, scope=scope_of(config), checksums=settings.checksums)


def scope_of(config: WorkerConfig) -> str:
    """Returns what the KV of a block depends on besides its layout: workers with equal texts may exchange blocks."""
    model = config.served_model_names[0] if config.served_model_names else config.model_path
    seed = str(config.seed) if config.load_format in DUMMY_FORMATS else ""
    return "|".join([model, config.config_overrides, config.kv_cache_dtype, seed])


def of_rank(config: KVTransferConfig, rank: int) -> KVTransferConfig:
    """Each rank has a port of its own, if the flag names one."""
    return msgspec.structs.replace(config, port=config.port + rank) if config.port else config
