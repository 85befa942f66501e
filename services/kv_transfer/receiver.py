"""The links over which other workers write KV blocks into this worker's arena."""

import logging
import os
import random
import select
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from blockyard.services.kv_transfer.arena import Arena
from blockyard.services.kv_transfer.connectors.faults import FaultyReader
from blockyard.services.kv_transfer.connectors.interface import BlockReader
from blockyard.services.kv_transfer.connectors.selection import make_reader, open_blocks
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.layout import BlockLayout, differences
from blockyard.services.kv_transfer.link_sockets import MAX_MESSAGES_A_TURN, decode_frame, drain_monitor
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.frames import (
    LINK_VERSION,
    BlockSums,
    BlocksWritten,
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
from blockyard.services.kv_transfer.protocol.incoming import BlocksLanded, IncomingTransfers, ReceiverEnded
from blockyard.shared.bus.frames import in_log
from blockyard.shared.bus.sockets import Sockets, readable
from blockyard.shared.config.services.worker import KVTransferFaults
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

PROBE_S = 1.0  # interval of probes
PROBE_AFTER_CLOSE_S = 0.2  # libzmq reports a closed connection a little before sends to it fail


@dataclass(slots=True, eq=False)
class _Link:
    """A link with an accepted hello."""

    sender: int
    route: bytes
    reader: BlockReader | None = None  # None until the sender has chosen a connector
    has_payloads: bool = False  # the bytes of blocks come with BlocksWritten
    outbox: deque[bytes] = field(default_factory=deque)


class TransferReceiver:
    """Accepts links and blocks of all senders, for one generation of this worker's arena. Only `close` waits.

    All work happens in `poll`. Call it when `socket`, `monitor` or `CopyThread.descriptor` is readable, within a
    millisecond while `busy`, and at least once a second. Make a new receiver after `Arena.drop`.
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
        faults: KVTransferFaults | None = None,
    ) -> None:
        """receiver: incarnation of this worker. needs_ticket: the links are not encrypted.

        bind: address of the socket; None: a new one. Raises ConfigError if it is in use.
        """
        self._me, self._layout, self._arena = receiver, layout, arena
        self._generation = arena.generation
        self._own = open_blocks(arena, layout, copies)
        self._transfers = IncomingTransfers(layout, receiver, arena.generation)
        self.drops = self._transfers.drops
        self._needs_ticket, self._faults = needs_ticket, faults
        self._tickets: dict[bytes, int] = {}
        self._links: dict[int, _Link] = {}  # by sender
        self._routes: dict[bytes, _Link] = {}
        self._processes: dict[int, int] = {}  # by sender: pidfd, if the sender has mapped the arena
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

    def revoke(self, number: int) -> None:
        """Aborts a transfer. `poll` reports its end once the sender cannot write to its blocks any more."""
        self._transfers.revoke(number)

    def poll(self) -> list[BlocksLanded | ReceiverEnded]:
        """Receives frames, starts landings, sends frames. Returns landed blocks and ended transfers, in order."""
        self._own.poll()
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
        self._reap_processes()
        self._send()
        return self._transfers.take_events()

    def close(self) -> None:
        """Closes all links, and waits some milliseconds for landings in flight.

        Call it before `Arena.drop`. A sender on this host may go on writing, but only to the dropped memory.
        """
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        self._own.drain()
        for process in self._processes.values():
            os.close(process)
        self._processes.clear()
        self._links.clear()
        self._routes.clear()

    def _receive(self) -> None:
        route, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        link = self._routes.get(route.bytes)
        frame = decode_frame(self._decoder, parts[0].bytes, self.drops) if parts else None
        if frame is None:
            return
        payload = parts[1].buffer if len(parts) == 2 else None
        if isinstance(frame, LinkHello):
            self._greet(route.bytes, frame)
        elif link is None:
            self.drops.count(DropReason.STRANGER, f"{type(frame).__name__} without a link")
        elif len(parts) > 2 or (payload is not None and not isinstance(frame, BlocksWritten)):
            self.drops.count(DropReason.WRONG_SIZE, f"{type(frame).__name__} in {len(parts)} parts")
        else:
            self._handle(link, frame, payload)

    def _handle(self, link: _Link, frame: LinkFrame, payload: memoryview | None) -> None:
        match frame:
            case LinkReady():
                self._open(link, frame)
            case BlocksWritten():
                self._written(link, frame, payload)
            case BlockSums():
                self._transfers.on_sums(link.sender, frame)
            case Stopped():
                self._transfers.on_stopped(link.sender, frame)

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
            log.warning("KV link of %x refused: %s", hello.sender, in_log(reason))
            self._try_send(route, self._encode(LinkRefused(reason)))
            return
        self._forget(hello.sender)
        link = _Link(hello.sender, route)
        self._links[hello.sender] = self._routes[route] = link
        handle = self._arena.export(self._me)
        link.outbox.append(self._encode(LinkWelcome(self._me, self._generation, handle)))

    def _open(self, link: _Link, frame: LinkReady) -> None:
        reader = make_reader(frame.connector, self._own)
        if reader is None or link.reader is not None:
            self.drops.count(DropReason.DOUBLED, f"connector {in_log(frame.connector)} of {link.sender:x}")
            return
        if self._faults is not None:
            reader = FaultyReader(reader, self._faults, random.Random(), self._arena, self._layout)
        self._drop_process(link.sender)
        if frame.pid:
            try:
                self._processes[link.sender] = os.pidfd_open(frame.pid)
            except (OSError, ValueError, OverflowError) as e:
                log.warning("KV link of %x: process %d: %s", link.sender, frame.pid, e)
                return
        link.reader, link.has_payloads = reader, not frame.pid
        self._transfers.on_link(link.sender)

    def _written(self, link: _Link, frame: BlocksWritten, payload: memoryview | None) -> None:
        if link.reader is None or link.has_payloads != (payload is not None):
            self.drops.count(DropReason.WRONG_SIZE, f"blocks of transfer {frame.number} with or without their bytes")
            return
        landing = self._transfers.on_written(link.sender, frame, None if payload is None else payload.nbytes)
        if landing is not None:
            link.reader.start(landing, payload, self._transfers.on_landed, self._transfers.on_landing_failed)

    def _probe_links(self) -> None:
        for link in list(self._links.values()):
            if not link.outbox:
                link.outbox.append(self._probe)

    def _reap_processes(self) -> None:
        """Finds senders with a mapping whose process has ended: they cannot write, though the link may look open."""
        if not self._processes:
            return
        waiting = select.poll()
        senders = {process: sender for sender, process in self._processes.items()}
        for process in senders:
            waiting.register(process, select.POLLIN)
        for process, _ in waiting.poll(0):
            self._forget(senders[process])
            self._drop_process(senders[process])
            self._transfers.on_sender_stopped(senders[process])

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
        if link.sender not in self._processes:
            self._transfers.on_sender_stopped(link.sender)

    def _forget(self, sender: int) -> None:
        link = self._links.pop(sender, None)
        if link is not None:
            del self._routes[link.route]
            self._transfers.on_link_lost(sender)

    def _drop_process(self, sender: int) -> None:
        process = self._processes.pop(sender, None)
        if process is not None:
            os.close(process)
