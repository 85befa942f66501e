"""nixl, between any two workers that have the package: its agents write from one worker's memory into the other's.

nixl picks the transport: RDMA where there is a network card for it, CMA (`process_vm_writev`) between processes of one
host, otherwise TCP. It encrypts nothing, and over TCP UCX lets all that reach its port write: use it in a
network that you trust. A link has an agent on each side.

nixl posts each piece of memory on its own, in 5 us, and a block has a piece in each layer. So blocks are packed into a
staging buffer here, written to one of the receiver in one piece, and unpacked there (`nixl_access`). A link has some
buffers on each side: one is packed while another one is written and a third unpacked. A packed copy waits until the
receiver has freed a buffer, which it says in a frame.

- When nixl calls a write done, its source is not read any more, and nothing of it is on the way. Whether the bytes have
  arrived is for the checksum to tell: nixl has called a copy of a killed process done.
- A write that fails closes the link. Its bytes may still be on the way, so the receiver hears of no end of its transfer
  before its own agent is destroyed.
- If the link breaks, the receiver destroys its agent. Then another host cannot write: the memory is not registered with
  any network card, and no socket is left. A process of the same host needs no agent of the receiver to write by CMA,
  so its end has to be proven as with `shm`, by a pidfd.
- The receiver's buffers have an address of their own for this, which is never used for something else: a write that
  comes after `hide` fails.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
from torch import Tensor

from blockyard.services.kv_transfer.block_copier import BlockCopier
from blockyard.services.kv_transfer.connectors.interface import LinkLost, WriteFailed, Written
from blockyard.services.kv_transfer.connectors.nixl_agent import (
    TOKEN_BYTES,
    AgentThread,
    Job,
    NixlAgent,
    NixlTarget,
    Place,
    Region,
    error_of,
    host_id,
    nixl_package,
    region_at,
)
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite
from blockyard.services.kv_transfer.staging import StagingBuffers, StagingMemory
from blockyard.shared.errors import ConfigError

NUM_BUFFERS = 3  # of a link on the sender's side
OPEN_S = 20.0  # to open a link: the first agent of a process takes 0.5 s
STALLED_S = 30.0  # a copy that takes longer closes the link: the receiver may have stopped, and nixl waits for ever
END_S = 5.0  # to wait for the end of a thread
CHECK_S = 0.00005  # interval of checks of copies in flight
WAIT_S = 1.0  # interval of checks of the time that copies wait for a buffer


class NixlWriter:
    """Writes blocks to the staging memory of one receiver."""

    name = "nixl"

    def __init__(
        self, own: BlockCopier, layout: BlockLayout, staging: StagingMemory, remote: bytes, copies: CopyThread,
        backends: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """remote: what the receiver's `NixlAccesses` has opened. Raises ConfigError if it cannot be used."""
        nixl_package()
        try:
            target = msgspec.msgpack.decode(remote, type=NixlTarget)
        except msgspec.DecodeError as e:
            raise ConfigError(f"KV connector nixl: the receiver's answer: {e}") from e
        boot, namespace = host_id()
        self.maps_memory = target.boot == boot
        if self.maps_memory and target.pid_namespace != namespace:
            # neither could know that the other's process has ended
            raise ConfigError(
                "KV connector nixl: both workers are on this host in different PID namespaces: let their containers "
                "share one, or use the KV connector tcp"
            )
        self._own, self._layout, self._staging = own, layout, staging
        least = layout.largest_piece_bytes
        if target.buffer_bytes < least or target.num_buffers < 1:
            raise ConfigError(f"KV connector nixl: the receiver's buffers of {target.buffer_bytes} bytes are too small")
        self._buffers: StagingBuffers | None = staging.take(NUM_BUFFERS, least)
        self.chunk_bytes = min(self._buffers.num_bytes, target.buffer_bytes)
        self._free = list(range(NUM_BUFFERS))
        self._region = region_at(self._buffers.arena, self._buffers.arena.bytes.data_ptr())
        self._is_closed = False
        self._copies = _AgentCopies(target, self._region, backends, copies.report)
        self._thread = AgentThread("kv-nixl-writes", self._copies.turn)

    def open(self, opened: Callable[[], None], lost: LinkLost) -> None:
        self._thread.submit(lambda: self._copies.open(opened, lost))

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        if not self._free or self._buffers is None or self._is_closed:
            return False
        if max(write.sources) >= self._own.num_blocks:
            raise ValueError(f"blocks of transfer {write.number} are not in the pool")
        index = self._free.pop()
        piece = self._layout.section_of(write.layers).piece_bytes
        packed = self._buffers[index][: len(write.layers) * len(write.sources) * piece]

        def end() -> None:
            self._free.append(index)
            self._release_if_idle()

        def sent(sums: Words | None, place: Place | None, error: str) -> None:
            end()
            if place is None:
                failed(write, error)
            else:
                written(write, sums, _Placed(self, place))

        def gathered(sums: Words | None) -> None:
            if self._is_closed:
                sent(sums, None, "the link is closed")
            else:
                self._submit(packed, lambda place, error: sent(sums, place, error))

        self._own.gather(write.sources, write.layers, packed, gathered, lambda error: sent(None, None, str(error)))
        return True

    def free(self, place: bytes) -> None:
        found = Place.read(memoryview(place))
        if found is not None:
            self._thread.submit(lambda: self._copies.free(found))

    def close(self) -> None:
        self._is_closed = True
        self._thread.submit(lambda: self._copies.close(self._release_if_idle))
        self._thread.stop()

    def join(self) -> None:
        """Raises RuntimeError if nixl may still write: no new link may tell the receiver that it does not."""
        if not self._thread.join(END_S) or not self._copies.is_closed:
            raise RuntimeError("nixl does not end its copies")
        self._release_if_idle()

    def _submit(self, packed: Tensor, ended: "_Ended") -> None:
        offset = packed.data_ptr() - self._region.address
        self._thread.submit(lambda: self._copies.send(offset, packed.numel(), ended))

    def _release_if_idle(self) -> None:
        """Gives the buffers back once the agent is destroyed and nothing is packed any more."""
        if self._buffers is not None and self._copies.is_closed and len(self._free) == NUM_BUFFERS:
            self._staging.give_back(self._buffers)
            self._buffers = None


class _Placed:
    """The place of written blocks, as the `Payload` of their frame."""

    def __init__(self, writer: NixlWriter, place: Place) -> None:
        self._writer, self._place = writer, place

    @property
    def view(self) -> memoryview:
        return memoryview(self._place.bytes())

    def sent(self, tracker: zmq.MessageTracker) -> None:
        """Does nothing: the receiver frees the buffer."""

    def discard(self) -> None:
        self._writer.free(self._place.bytes())


_Ended = Callable[[Place | None, str], None]  # where a copy was written to; or None, and the error


@dataclass(slots=True)
class _Copy:
    end: Callable[[str], None]  # with the error, "" for none
    until: float  # when it has stalled
    handle: object = None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed copy that waits for a buffer of the receiver."""

    offset: int  # in own staging memory
    num_bytes: int
    ended: _Ended
    until: float


@dataclass(slots=True)
class _TheirBuffers:
    """Which buffers of the receiver this side may write to."""

    free: deque[int]
    uses: dict[int, int] = field(default_factory=dict)  # by buffer that is not free: the number of its use
    num_uses: int = 0

    def take(self) -> Place:
        place = Place(self.num_uses + 1, self.free.popleft())
        self.uses[place.buffer] = self.num_uses = place.use
        return place

    def end(self, place: Place) -> None:
        if self.uses.get(place.buffer) == place.use:
            del self.uses[place.buffer]
            self.free.append(place.buffer)


class _AgentCopies:
    """The agent of a writer and its copies in flight. Only the writer's thread calls it, and `report` its results."""

    def __init__(
        self, target: NixlTarget, region: Region, backends: Sequence[str], report: Callable[[Job], None]
    ) -> None:
        self._target, self._region, self._backends, self._report = target, region, backends, report
        self._agent: NixlAgent | None = None
        self._lost: LinkLost | None = None
        self._flights: list[_Copy] = []
        self._waiting: deque[_Packed] = deque()
        self._theirs = _TheirBuffers(deque(range(target.num_buffers)))
        self.is_closed = False
        self._reason = "the link is not open"
        self._token = np.zeros(TOKEN_BYTES, np.uint8)

    def open(self, opened: Callable[[], None], lost: LinkLost) -> None:
        """Connects to the receiver, and reads its token."""
        self._lost, target = lost, self._target

        own, theirs = Region(self._token.ctypes.data, TOKEN_BYTES), Region(target.token_address, TOKEN_BYTES)

        def compare(error: str) -> None:
            if error:
                return  # `lost` gets it
            if self._token.tobytes() != target.token:
                raise ConnectionError("nixl has read other memory than the receiver's")
            self._report(opened)

        def start() -> None:
            self._region.use_device()
            self._agent = NixlAgent(secrets.token_hex(8), self._backends, [self._region, own])
            self._agent.connect(target.metadata)
            pieces = own.piece(0, TOKEN_BYTES), theirs.piece(0, TOKEN_BYTES)
            flight.handle = self._agent.start("READ", pieces[0], "DRAM", pieces[1], "DRAM")

        flight = _Copy(compare, time.monotonic() + OPEN_S)
        self._flights.append(flight)
        self._attempt(start)

    def send(self, offset: int, num_bytes: int, ended: _Ended) -> None:
        """Writes own staging memory to a buffer of the receiver, once one is free."""

        def report(place: Place | None, error: str) -> None:
            self._report(lambda: ended(place, error))

        if self._agent is None:
            report(None, self._reason)
        else:
            self._waiting.append(_Packed(offset, num_bytes, report, time.monotonic() + STALLED_S))

    def free(self, place: Place) -> None:
        self._theirs.end(place)

    def turn(self) -> float | None:
        """Finds complete copies, and starts those that wait."""
        self._attempt(self._advance)
        return CHECK_S if self._flights else WAIT_S if self._waiting else None

    def close(self, closed: Job) -> None:
        self._lost = None
        self._break("the link is closed")
        self.is_closed = True
        self._report(closed)

    def _advance(self) -> None:
        now = time.monotonic()
        for flight in list(self._flights):
            assert self._agent is not None
            if self._agent.is_done(flight.handle):
                self._flights.remove(flight)
                flight.end("")
            elif now > flight.until:
                raise ConnectionError("the receiver does not answer nixl")
        while self._waiting and self._theirs.free:
            self._write(self._waiting.popleft())
        if self._waiting and now > self._waiting[0].until:
            raise ConnectionError("the receiver does not answer nixl: it frees no buffer")

    def _write(self, it: _Packed) -> None:
        assert self._agent is not None
        place, target = self._theirs.take(), self._target
        own = self._region.piece(it.offset, it.num_bytes)
        theirs = Region(target.address, 0, device=target.device).piece(place.buffer * target.buffer_bytes, it.num_bytes)
        flight = _Copy(lambda error: it.ended(None if error else place, error), time.monotonic() + STALLED_S)
        self._flights.append(flight)  # before it starts: it may start and then fail
        flight.handle = self._agent.start("WRITE", own, self._region.kind, theirs, target.kind)

    def _attempt(self, work: Job) -> None:
        """Closes the link if nixl reports an error."""
        if error := error_of(work):
            self._break(error)

    def _break(self, reason: str) -> None:
        """Destroys the agent, so that no source is read any more, and then reports all copies as failed."""
        if self._lost is not None:
            lost, self._lost = self._lost, None
            self._report(lambda: lost(reason))
        agent, self._agent, self._reason = self._agent, None, reason
        flights, self._flights = self._flights, []
        waiting, self._waiting = self._waiting, deque()
        for flight in flights:
            flight.handle = None
        if agent is not None:
            agent.destroy()
        for flight in flights:
            flight.end(reason)
        for packed in waiting:
            packed.ended(None, reason)
