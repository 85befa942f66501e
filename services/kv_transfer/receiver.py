"""The links over which other workers write KV blocks into this worker's arena."""

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from blockyard.services.kv_transfer.arena import Arena
from blockyard.services.kv_transfer.block_copier import BlockCopier
from blockyard.services.kv_transfer.connectors.faults import FaultyReader
from blockyard.services.kv_transfer.connectors.interface import BlockReader
from blockyard.services.kv_transfer.connectors.nixl_access import NixlAccesses, NixlReader
from blockyard.services.kv_transfer.connectors.selection import make_copier, make_reader
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart, differences
from blockyard.services.kv_transfer.link_sockets import MAX_MESSAGES_A_TURN, decode_frame, drain_monitor
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import IncomingEvent
from blockyard.services.kv_transfer.protocol.frames import (
    LINK_VERSION,
    BlockSums,
    BlocksWritten,
    BufferFree,
    LinkClosed,
    LinkFrame,
    LinkHello,
    LinkReady,
    LinkRefused,
    LinkWelcome,
    Probe,
    Stopped,
    ToReceiver,
    Transfer,
)
from blockyard.services.kv_transfer.protocol.incoming import IncomingTransfers
from blockyard.services.kv_transfer.sender_processes import SenderProcesses
from blockyard.services.kv_transfer.staging import StagingMemory
from blockyard.shared.bus.frames import LogLimit, in_log
from blockyard.shared.bus.sockets import Sockets, readable
from blockyard.shared.config.services.worker import KVTransferConfig, KVTransferFaults
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

PROBE_S = 1.0  # interval of probes
PROBE_AFTER_CLOSE_S = 0.2  # libzmq reports a closed connection a little before sends to it fail


@dataclass(slots=True, eq=False)
class _Link:
    """A link with an accepted hello."""

    sender: int
    route: bytes
    is_nixl: bool  # the sender asks for nixl
    layout: BlockLayout  # of what it writes
    own: BlockCopier  # for that
    reader: BlockReader | None = None  # None until the sender has chosen a connector
    buffers: NixlReader | None = None  # its reader if it is nixl's: payloads name buffers
    outbox: deque[bytes] = field(default_factory=deque)


class TransferReceiver:
    """Accepts links and blocks of all senders, for one generation of this worker's arena. Only `close` waits.

    All work happens in `poll`. Call it when `socket`, `monitor` or `CopyThread.descriptor` is readable, within a
    millisecond while `busy`, without waiting while `needs_polling`, and at least once a second. Make a new receiver
    after `Arena.drop`.
    """

    def __init__(
        self,
        sockets: Sockets,
        receiver: int,
        layout: BlockLayout,
        arena: Arena,
        copies: CopyThread,
        needs_ticket: bool = False,
        bind: str | None = None,
        config: KVTransferConfig | None = None,
        staging: StagingMemory | None = None,
    ) -> None:
        """receiver: incarnation of this worker. needs_ticket: the links are not encrypted. staging: of all links of
        this worker.

        bind: address of the socket; None: a new one. Raises ConfigError if it is in use, and if the config's connector
        is nixl and its package is not installed.
        """
        self._me, self._layout, self._arena, self._copies = receiver, layout, arena, copies
        self._config = config or KVTransferConfig()
        self._generation = arena.generation
        self._own, self._staging = make_copier(arena, layout, copies), staging or StagingMemory(arena)
        self._copiers: dict[LayoutPart | None, BlockCopier] = {None: self._own}  # by part
        self._transfers = IncomingTransfers(layout, receiver, arena.generation)
        self.drops = self._transfers.drops
        self._needs_ticket = needs_ticket
        self._tickets: dict[bytes, int] = {}
        self._links: dict[int, _Link] = {}  # by sender
        self._routes: dict[bytes, _Link] = {}
        self._processes = SenderProcesses()
        self._log_limit = LogLimit()
        self._nixl = self._make_accesses() if self._config.connector == "nixl" else None
        self._closing: Counter[int] = Counter()  # by sender: agents of nixl that still let it write
        self._decoder = msgspec.msgpack.Decoder(ToReceiver)
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            bound = sockets.bind_router(bind)
        except zmq.ZMQError as e:
            raise ConfigError(f"KV links cannot bind {bind or 'a new address'}: {e}") from e
        self.socket, self.endpoint = bound.socket, bound.endpoint
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._next_probe, self._probe_until = 0.0, 0.0
        self._probe = self._encode(Probe())

    def open_transfers(self) -> list[Transfer]:
        """Transfers that have not ended: their blocks must stay reserved."""
        return self._transfers.open_transfers()

    @property
    def busy(self) -> bool:
        """Whether to poll within a millisecond: frames wait for a full link, of which no descriptor tells when it has
        room, or the `poll` of a sender's link has made events."""
        return self._transfers.has_output or any(link.outbox for link in self._links.values())

    @property
    def needs_polling(self) -> bool:
        """Whether a GPU copies."""
        return any(own.needs_polling for own in self._copiers.values())

    def admit(self, ticket: bytes, sender: int) -> None:
        """Lets this sender open one link with a ticket that it received over an encrypted link."""
        self._tickets[ticket] = sender

    def withdraw(self, ticket: bytes) -> None:
        """Makes a ticket invalid, unless it was used."""
        self._tickets.pop(ticket, None)

    def on_gone(self, sender: int) -> None:
        """The sender has left the ring. `poll` reports transfers for which it has opened no link."""
        self._transfers.on_gone(sender)

    def expect(self, transfer: Transfer) -> None:
        """Allows the sender to write to the transfer's blocks. Raises ValueError, see `IncomingTransfers.expect`."""
        if any(not 0 <= block < self._own.num_blocks for block in transfer.blocks):
            raise ValueError(f"transfer {transfer.number}: some of {transfer.blocks} are not blocks of this worker")
        self._transfers.expect(transfer)

    def revoke(self, number: int, sender_stopped: bool = False) -> None:
        """Aborts a transfer. `poll` reports its end once the sender cannot write to its blocks any more.

        sender_stopped: see `IncomingTransfers.revoke`.
        """
        self._transfers.revoke(number, sender_stopped)

    def poll(self) -> list[IncomingEvent]:
        """Receives frames, starts landings, sends frames. Returns landed blocks and ended transfers, in order.

        A frame with which this worker fails unexpectedly closes its link, and steps go on. A transfer whose landing
        cannot be reported stays open, and its blocks reserved.
        """
        for own in self._copiers.values():
            try:
                own.poll()
            except Exception:
                log.exception("KV blocks have landed")
        for _ in range(MAX_MESSAGES_A_TURN):
            if not readable(self.socket):
                break
            self._receive()
        now = time.monotonic()
        if drain_monitor(self.monitor):
            self._probe_until = now + PROBE_AFTER_CLOSE_S
        if now < self._probe_until or now > self._next_probe:
            self._next_probe = now + PROBE_S
            self._probe_links()
        if self._nixl is not None:
            self._nixl.set_active(self._transfers.num_open > 0)
        self._reap_processes()
        self._send()
        return self._transfers.take_events()

    def close(self) -> None:
        """Closes all links, and waits some milliseconds for landings in flight.

        Call it before `Arena.drop`. A sender on this host may go on writing, but only to the dropped memory.
        """
        self._drain()
        if self._nixl is not None:
            self._nixl.stop()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        self._drain()
        self._processes.close()
        self._links.clear()
        self._routes.clear()

    def _drain(self) -> None:
        for own in self._copiers.values():
            own.drain()

    def _receive(self) -> None:
        route, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        link = self._routes.get(route.bytes)
        frame = decode_frame(self._decoder, parts[0].bytes, self.drops) if parts else None
        if frame is None:
            return
        payload = parts[1].buffer if len(parts) == 2 else None
        if link is None and not isinstance(frame, LinkHello):
            self.drops.count(DropReason.STRANGER, f"{type(frame).__name__} without a link")
        elif len(parts) > 2 or (payload is not None and not isinstance(frame, BlocksWritten)):
            self.drops.count(DropReason.WRONG_SIZE, f"{type(frame).__name__} in {len(parts)} parts")
        else:
            try:
                if link is not None:
                    self._handle(link, frame, payload)
                elif isinstance(frame, LinkHello):
                    self._greet(route.bytes, frame)
            except Exception as e:
                link = self._routes.get(route.bytes)
                log.exception("KV link of %s", "a new sender" if link is None else f"{link.sender:x}")
                if link is not None:
                    self._refuse(link.sender, link.route, f"an error of the receiver: {type(e).__name__}: {e}")
                    self._lose(link)

    def _handle(self, link: _Link, frame: LinkFrame, payload: memoryview | None) -> None:
        match frame:
            case LinkHello():  # each link of a sender has its own route
                self.drops.count(DropReason.DOUBLED, f"hello of {frame.sender:x} on the link of {link.sender:x}")
                self._refuse(link.sender, link.route, "a second hello on the link")
                self._lose(link)
            case LinkReady():
                self._open(link, frame)
            case BlocksWritten():
                self._written(link, frame, payload)
            case BlockSums():
                self._transfers.on_sums(link.sender, frame)
            case Stopped():
                self._transfers.on_stopped(link.sender, frame)
            case LinkClosed():
                self._remove(link)
                self._processes.drop(link.sender)
                if link.is_nixl:
                    self._close_agent(link.sender, self._transfers.on_link_closed)
                else:
                    self._transfers.on_link_closed(link.sender)

    def _greet(self, route: bytes, hello: LinkHello) -> None:
        reason = ""
        if hello.version != LINK_VERSION:
            reason = f"it speaks version {hello.version} of KV transfer, this worker {LINK_VERSION}"
        elif hello.receiver != self._me:
            reason = f"it wants {hello.receiver:x}, this is {self._me:x}"
        elif self._arena.generation != self._generation:
            reason = "this worker's KV memory is another one now"
        elif self._needs_ticket and self._tickets.pop(hello.ticket, None) != hello.sender:
            self.drops.count(DropReason.STRANGER, f"hello of {hello.sender:x} without a valid ticket")
            reason = "no valid ticket"
        elif differ := differences(self._layout, hello.layout):
            reason = f"the workers cannot exchange KV blocks: {differ}"
        if reason:
            self._refuse(hello.sender, route, reason)
            return
        part = hello.layout.part
        try:
            own = self._copier_of(part)
        except ValueError as e:
            self._refuse(hello.sender, route, f"the workers cannot exchange KV blocks: {e}")
            return
        self._forget(hello.sender)
        link = _Link(hello.sender, route, hello.connector == "nixl", self._layout.of(part), own)
        self._links[hello.sender] = self._routes[route] = link
        if link.is_nixl:
            self._open_nixl(link)
        else:
            self._welcome(link)

    def _copier_of(self, part: LayoutPart | None) -> BlockCopier:
        """Raises ValueError for a part that this rank does not have."""
        if part is None and self._layout.part is not None:
            part = self._layout.whole
        if part not in self._copiers:
            self._copiers[part] = make_copier(self._arena, self._layout, self._copies, part)
        return self._copiers[part]

    def _open_nixl(self, link: _Link) -> None:
        def failed(reason: str) -> None:
            if self._links.get(link.sender) is link:
                self._forget(link.sender)
                self._refuse(link.sender, link.route, reason)

        try:
            self._nixl = self._nixl or self._make_accesses()
        except ConfigError as e:
            failed(str(e))
            return
        self._nixl.open(link.sender, lambda remote: self._welcome(link, remote), failed)

    def _make_accesses(self) -> NixlAccesses:
        return NixlAccesses(self._layout, self._staging, self._copies, self._config.backends)

    def _welcome(self, link: _Link, remote: bytes = b"") -> None:
        if self._links.get(link.sender) is link:
            handle = self._arena.export(self._me)
            link.outbox.append(self._encode(LinkWelcome(self._me, self._generation, handle, remote)))

    def _refuse(self, sender: int, route: bytes, reason: str) -> None:
        self._warn(sender, f"refused: {in_log(reason)}")
        self._try_send(route, self._encode(LinkRefused(reason)))

    def _warn(self, sender: int, words: str) -> None:
        """Logs within the limit: a stranger may cause any number of lines."""
        if self._log_limit.allows((sender, words)):
            log.warning("KV link of %x: %s", sender, words)

    def _open(self, link: _Link, frame: LinkReady) -> None:
        if frame.connector == "nixl" and self._nixl is not None:
            link.buffers = self._nixl.reader(link.sender, link.own, link.layout, lambda place: self._free(link, place))
        reader = link.buffers or make_reader(frame.connector, link.own)
        is_other = link.is_nixl != (frame.connector == "nixl") or self._closing[link.sender] > 0
        if reader is None or link.reader is not None or is_other:
            self.drops.count(DropReason.DOUBLED, f"connector {in_log(frame.connector)} of {link.sender:x}")
            return
        if self._config.faults != KVTransferFaults():
            reader = FaultyReader(
                reader, self._config.faults, random.Random(), self._arena, self._layout, link.layout.part
            )
        self._processes.drop(link.sender)
        if frame.pid:
            try:
                self._processes.add(link.sender, frame.pid)
            except (OSError, ValueError, OverflowError) as e:
                self._warn(link.sender, f"process {frame.pid}: {e}")
                return
        link.reader = reader
        self._transfers.on_link(link.sender)

    def _written(self, link: _Link, frame: BlocksWritten, payload: memoryview | None) -> None:
        if link.reader is None or link.reader.has_payloads != (payload is not None):
            self.drops.count(DropReason.WRONG_SIZE, f"blocks of transfer {frame.number} with or without their bytes")
            return
        num_bytes = None if payload is None or link.buffers is not None else payload.nbytes
        landing = self._transfers.on_written(link.sender, frame, num_bytes)
        if landing is not None:
            link.reader.start(landing, payload, self._transfers.on_landed, self._transfers.on_landing_failed)
        elif link.buffers is not None:
            link.buffers.discard(payload)

    def _free(self, link: _Link, place: bytes) -> None:
        link.outbox.append(self._encode(BufferFree(place)))

    def _probe_links(self) -> None:
        for link in list(self._links.values()):
            if not link.outbox:
                link.outbox.append(self._probe)

    def _reap_processes(self) -> None:
        """Finds senders with a mapping whose process has ended: they cannot write, though the link may look open."""
        for sender in self._processes.take_ended():
            self._forget(sender)
            self._end_if_stopped(sender)

    def _send(self) -> None:
        for sender, frame in self._transfers.take_frames():
            if (link := self._links.get(sender)) is not None:
                link.outbox.append(self._encode(frame))
        for link in list(self._links.values()):
            while link.outbox:
                sent = self._try_send(link.route, link.outbox[0])
                if sent is None:
                    self._lose(link)
                if not sent:
                    break
                link.outbox.popleft()

    def _try_send(self, route: bytes, data: bytes) -> bool | None:
        """Returns False if the link is full, None if it is closed."""
        try:
            self.socket.send_multipart((route, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            return None
        return True

    def _lose(self, link: _Link) -> None:
        """Handles a closed link. A sender that has mapped the arena may write until its process ends."""
        self._forget(link.sender)
        self._end_if_stopped(link.sender)

    def _end_if_stopped(self, sender: int) -> None:
        """Ends the transfers of a lost link, if its sender certainly cannot write any more."""
        if sender in self._links or self._closing[sender]:
            return  # a new link says that the sender has stopped, or the agent's end comes here again
        if sender in self._processes:
            self._transfers.on_sender_unreachable(sender)
        else:
            self._transfers.on_sender_stopped(sender)

    def _forget(self, sender: int) -> None:
        link = self._links.get(sender)
        if link is None:
            return
        self._remove(link)
        self._transfers.on_link_lost(sender)
        if link.is_nixl:
            self._close_agent(sender, self._end_if_stopped)

    def _close_agent(self, sender: int, then: Callable[[int], None]) -> None:
        """Calls `then` once the sender's agent cannot write to this worker's memory any more."""
        if self._nixl is None:  # it could not be loaded
            return

        def closed() -> None:
            self._closing[sender] -= 1
            self._closing += Counter()  # drops zeros
            then(sender)

        self._closing[sender] += 1
        self._nixl.close(sender, closed)

    def _remove(self, link: _Link) -> None:
        del self._links[link.sender], self._routes[link.route]
