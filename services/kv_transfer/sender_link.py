"""The link over which this worker writes KV blocks into the arena of one other worker."""

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from blockyard.services.kv_transfer.arena import Arena
from blockyard.services.kv_transfer.connectors.faults import FaultyWriter
from blockyard.services.kv_transfer.connectors.interface import BlockWriter, Payload
from blockyard.services.kv_transfer.connectors.nixl import OPEN_S
from blockyard.services.kv_transfer.connectors.selection import make_copier, make_writer
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.layout import LinkLayouts
from blockyard.services.kv_transfer.link_sockets import HELLO_S, MAX_MESSAGES_A_TURN, decode_frame, drain_monitor
from blockyard.services.kv_transfer.protocol.events import SenderEnded
from blockyard.services.kv_transfer.protocol.frames import (
    LINK_VERSION,
    BufferFree,
    LinkClosed,
    LinkFrame,
    LinkHello,
    LinkReady,
    LinkRefused,
    LinkWelcome,
    Probe,
    StopWrites,
    ToSender,
    WritesAllowed,
)
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite, OutgoingTransfers
from blockyard.services.kv_transfer.staging import StagingMemory
from blockyard.shared.bus.sockets import Sockets, readable
from blockyard.shared.config.services.worker import KVTransferConfig, KVTransferFaults
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

CLOSE_S = 1.0  # that `close` waits for copies in flight

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class SenderLink:
    """Sends blocks to one receiver, for one generation of both arenas. Only `close` waits.

    All work happens in `poll`. Call it when `socket`, `monitor` or `CopyThread.descriptor` is readable, within a
    millisecond while `busy`, and without waiting while `needs_polling`. A closed link does not open again: make a new
    one, with a new ticket.
    """

    def __init__(
        self,
        sockets: Sockets,
        endpoint: str,
        receiver: int,
        sender: int,
        layouts: LinkLayouts,
        arena: Arena,
        copies: CopyThread,
        config: KVTransferConfig,
        ticket: bytes = b"",
        staging: StagingMemory | None = None,
    ) -> None:
        """receiver, sender: incarnations. ticket: for a link without encryption, see `TransferReceiver.admit`. staging:
        of all links of this worker.

        An earlier link to the same receiver must have no open transfer, because the hello tells the receiver that this
        worker has stopped writing for it. Raises ValueError if `endpoint` is not valid, and for a part that the arena
        does not have.
        """
        self.receiver, self.connector = receiver, ""
        self.closed = ""  # the reason, once the link is closed
        self.bytes_written = 0  # of KV blocks, with those of transfers that were aborted
        self._broken = ""  # why the connector has failed
        layout, part, self._theirs = layouts
        self._own = make_copier(arena, layout, copies, part)
        self._layout = layout.of(part)
        self._arena, self._copies = arena, copies
        self._generation, self._config, self._endpoint = arena.generation, config, endpoint
        self._staging = staging or StagingMemory(arena)
        self._writer: BlockWriter | None = None
        self._transfers = OutgoingTransfers(self._layout, arena.generation)
        self.drops = self._transfers.drops
        self._decoder = msgspec.msgpack.Decoder(ToSender)
        self._encode = msgspec.msgpack.Encoder().encode
        self._payloads: dict[BlockWrite, Payload] = {}
        self._outbox: deque[tuple[bytes, Payload | None]] = deque()
        self._deadline = time.monotonic() + (OPEN_S if config.connector == "nixl" else HELLO_S)
        try:
            self.socket = sockets.connect_dealer(endpoint, b"k")
        except zmq.ZMQError as e:
            raise ValueError(f"{endpoint!r} is no endpoint of KV links: {e}") from e
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(_BROKEN)
        self._post(LinkHello(LINK_VERSION, sender, self._generation, receiver, self._layout, ticket, config.connector))

    def open_transfers(self) -> dict[int, list[int]]:
        """Numbers of transfers that have not ended, with the source blocks named so far, which must not change."""
        return self._transfers.open_transfers()

    @property
    def busy(self) -> bool:
        """Whether to poll within a millisecond: frames or copies wait for room, of which no descriptor tells, or the
        `poll` of another link has made events."""
        if self._transfers.has_output:
            return True
        can_start = bool(self.connector) and self._transfers.has_waiting()
        return not self.closed and (bool(self._outbox or self._broken) or can_start)

    @property
    def needs_polling(self) -> bool:
        """Whether a GPU copies, or a copy waits for layers of a step that runs."""
        return self._own.needs_polling or (bool(self.connector) and not self.closed and self._transfers.awaits_layers)

    def begin(self, number: int, receiver_generation: int) -> None:
        """Opens a transfer. Raises ValueError for a used number."""
        self._transfers.begin(number, receiver_generation)
        if self.closed:
            self._transfers.on_link_lost()

    def write(
        self,
        number: int,
        sources: list[int],
        targets: list[int],
        layers: range,
        is_stored: Callable[[], bool] | None = None,
    ) -> None:
        """Copies blocks `sources` in `layers` to the receiver's blocks `targets`, once the receiver allows it.

        is_stored: the copy waits until this is true, asked at each `poll`.

        K and V of these layers must not change until the transfer has ended. Raises ValueError for blocks that are not
        in the pool, and as `OutgoingTransfers.write`.
        """
        if any(not 0 <= block < self._own.num_blocks for block in sources):
            raise ValueError(f"transfer {number}: some of {sources} are not blocks of this worker")
        self._transfers.write(number, sources, targets, layers, is_stored)

    def abort(self, number: int, reason: str) -> None:
        """Aborts a transfer. `poll` reports its end once none of its source blocks is read any more."""
        self._transfers.abort(number, reason)

    def poll(self) -> list[SenderEnded]:
        """Receives frames, starts copies, sends frames of complete ones. Returns the transfers that have ended.

        An unexpected error closes the link: its transfers fail, and the worker's steps go on.
        """
        try:
            self._advance()
        except Exception as e:
            log.exception("KV link to %x", self.receiver)
            self._lose(f"an error of this worker: {type(e).__name__}: {e}")
        return self._transfers.take_events()

    def _advance(self) -> None:
        self._own.poll()
        if not self.closed:
            self._receive()
        if not self.closed:
            if self._broken:
                self._lose(f"{self._endpoint}: {self._broken}")
            elif drain_monitor(self.monitor):
                self._lose(f"the link to {self._endpoint} has closed")
            elif not self.connector and time.monotonic() > self._deadline:
                self._lose(f"{self._endpoint} does not answer")
            elif self._arena.generation != self._generation:
                self._lose("this worker's KV memory is another one now")
        self._start_writes()
        self._send()

    def close(self) -> None:
        """Aborts all transfers and closes the link. Waits some milliseconds for copies in flight."""
        for number in self.open_transfers():
            self.abort(number, "the sender has closed the link")
        self._own.drain()
        deadline = time.monotonic() + CLOSE_S
        while self._transfers.num_copies and time.monotonic() < deadline:
            time.sleep(0.0005)
            self._own.drain()
            self._own.poll()  # copies that only the connector knows
        self._send()
        if not self._transfers.num_copies:
            self._post(LinkClosed())
            self._send()
        self._lose("closed by this worker", linger_ms=200)
        if self._writer is not None:
            self._writer.join()

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            if self.closed or not readable(self.socket):
                return
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
            frame = decode_frame(self._decoder, parts[0], self.drops)
            if frame is not None:
                self._handle(frame)

    def _handle(self, frame: LinkFrame) -> None:
        match frame:
            case LinkWelcome():
                self._welcome(frame)
            case LinkRefused():
                self._lose(f"refused by {self._endpoint}: {frame.reason}")
            case WritesAllowed():
                self._transfers.on_allowed(frame)
            case BufferFree(place):
                if self._writer is not None:
                    self._writer.free(place)
            case StopWrites():
                self._transfers.on_stop(frame)
            case Probe():
                pass

    def _welcome(self, frame: LinkWelcome) -> None:
        if self._writer is not None or frame.receiver != self.receiver:
            self._lose(f"{self._endpoint} is {frame.receiver:x}, not {self.receiver:x}")
            return
        try:
            self._writer = make_writer(
                self._config, frame, self._arena, self._own, self._layout, self._copies, self._staging, self._theirs
            )
        except ConfigError as e:
            self._lose(str(e))
            return
        if self._config.faults != KVTransferFaults():
            self._writer = FaultyWriter(self._writer, self._config.faults, random.Random())
        self._writer.open(self._opened, self._fail)

    def _opened(self) -> None:
        if self.closed or self._writer is None:
            return
        self.connector = self._writer.name
        self._transfers.set_chunk_bytes(self._writer.chunk_bytes)
        self._post(LinkReady(self.connector, os.getpid() if self._writer.maps_memory else 0))

    def _fail(self, reason: str) -> None:
        """The connector has failed. `poll` closes the link."""
        self._broken = reason
        self._transfers.on_link_lost()  # the receiver must not hear that these transfers have stopped

    def _start_writes(self) -> None:
        if self._writer is None or not self.connector:
            return
        while not self.closed and (write := self._transfers.next_write()) is not None:
            try:
                is_started = self._writer.try_start(write, self._written, self._transfers.on_failed)
            except ValueError as e:
                log.error("KV transfer %d: %s", write.number, e)
                self._transfers.on_failed(write, str(e))
                continue
            if not is_started:
                self._transfers.not_started(write)
                return

    def _written(self, write: BlockWrite, sums: Words | None, payload: Payload | None) -> None:
        self.bytes_written += self._bytes_of(write)
        if payload is not None:
            self._payloads[write] = payload
        if not self._transfers.on_written(write, sums) and payload is not None:
            self._payloads.pop(write).discard()

    def _bytes_of(self, write: BlockWrite) -> int:
        return len(write.sources) * len(write.layers) * self._layout.section_of(write.layers).piece_bytes

    def _post(self, frame: LinkFrame, payload: Payload | None = None) -> None:
        self._outbox.append((self._encode(frame), payload))

    def _send(self) -> None:
        for frame, write in self._transfers.take_frames():
            self._post(frame, None if write is None else self._payloads.pop(write, None))
        while self._outbox and not self.closed:
            data, payload = self._outbox[0]
            try:
                if payload is None:
                    self.socket.send(data, zmq.NOBLOCK)
                else:
                    self.socket.send(data, zmq.NOBLOCK | zmq.SNDMORE)
                    payload.sent(self.socket.send(payload.view, zmq.NOBLOCK, copy=False, track=True))
            except zmq.Again:
                return
            self._outbox.popleft()

    def _lose(self, reason: str, linger_ms: int = 0) -> None:
        if self.closed:
            return
        self.closed = reason
        log.info("KV link to %x: %s", self.receiver, reason)
        self._transfers.on_link_lost()
        if self._writer is not None:
            self._writer.close()
        self._outbox.clear()
        self._payloads.clear()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
