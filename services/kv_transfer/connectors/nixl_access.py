"""nixl on the receiver's side: staging buffers that senders write to, and the reader that empties them.

Each sender has buffers and an agent of its own. It names the buffer of a `BlocksWritten` in that message (`Place`), and
may write to it again after the `BufferFree` with the same bytes.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from torch import Tensor

from blockyard.services.kv_transfer.block_copier import BlockCopier
from blockyard.services.kv_transfer.connectors.interface import Landed, LandingFailed
from blockyard.services.kv_transfer.connectors.nixl_agent import (
    TOKEN_BYTES,
    AgentThread,
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
from blockyard.services.kv_transfer.protocol.incoming import Landing
from blockyard.services.kv_transfer.staging import StagingBuffers, StagingMemory
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

NUM_BUFFERS = 4  # of a link on the receiver's side: some are written, some emptied, and the word of that is on its way
END_S = 5.0  # to wait for the end of the thread
PROGRESS_S = 0.001  # interval in which a receiver answers its senders while transfers are open
IDLE_S = 0.02  # the same without open transfers: a new link connects within some of these


class NixlReader:
    """Copies blocks from the staging buffers of one sender into this worker's arena.

    A buffer is free again as soon as its blocks have landed, or are not wanted.
    """

    has_payloads = True  # a `Place`

    def __init__(
        self, own: BlockCopier, layout: BlockLayout, access: "_Access", freed: Callable[[bytes], None]
    ) -> None:
        """freed: is called with the `Place` of each buffer that is free."""
        self._own, self._layout, self._access, self._freed = own, layout, access, freed

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        place, packed = Place.read(payload), self.packed(landing, payload)
        if place is None or packed is None:
            failed(landing, f"the sender names no buffer of its own that holds the blocks: {place}")
            return
        access = self._access
        access.landings += 1

        def end() -> None:
            access.landings -= 1
            self._freed(place.bytes())
            access.release_if_idle()

        def done(sums: Words | None) -> None:
            end()
            landed(landing, sums)

        def broke(error: Exception) -> None:
            end()
            failed(landing, str(error))

        self._own.scatter(packed, landing.targets, landing.layers, done, broke)

    def packed(self, landing: Landing, payload: memoryview | None) -> Tensor | None:
        """Returns the bytes of blocks that were written to a buffer; None if the payload names none that holds them."""
        place, buffers = Place.read(payload), self._access.buffers
        num_bytes = len(landing.layers) * len(landing.targets) * self._layout.section_of(landing.layers).piece_bytes
        if place is None or place.buffer >= len(buffers) or num_bytes > buffers.num_bytes:
            return None
        return buffers[place.buffer][:num_bytes]

    def discard(self, payload: memoryview | None) -> None:
        """Frees the buffer of blocks that are not wanted."""
        if payload is not None:
            self._freed(payload.tobytes())


class _Access:
    """The buffers of one sender, and what the sender reads of this worker's memory."""

    def __init__(self, staging: StagingMemory, buffers: StagingBuffers) -> None:
        self.buffers, self._staging = buffers, staging
        self.region = region_at(buffers.arena, buffers.arena.expose())
        self.token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), np.uint8).copy()
        self.landings = 0  # in flight
        self._is_closed = False

    def close(self) -> None:
        """The agent is destroyed. Frees the buffers once nothing reads them."""
        self._is_closed = True
        self.release_if_idle()

    def release_if_idle(self) -> None:
        """A sender of this host may still write to the address, which gets no other memory."""
        if self._is_closed and not self.landings:
            self.buffers.arena.hide(self.region.address)
            self._staging.drop(self.buffers)


class NixlAccesses:
    """Lets senders write to staging memory of this worker with nixl, each through an agent of its own.

    A sender's agent cannot be disconnected for certain, but it can be destroyed. One thread calls all of them.
    """

    def __init__(
        self, layout: BlockLayout, staging: StagingMemory, copies: CopyThread, backends: Sequence[str] = ()
    ) -> None:
        """layout: of the arena. Raises ConfigError if the package is not installed."""
        nixl_package()
        log.warning("the KV connector nixl does not encrypt KV blocks: use it in a network that you trust")
        self._layout, self._staging = layout, staging
        self._report, self._backends = copies.report, backends
        self._accesses: dict[int, _Access] = {}  # by sender
        self._closing: set[_Access] = set()  # their agents are being destroyed
        self._agents: dict[int, NixlAgent] = {}  # by sender; of the thread
        self._is_active = False
        self._thread = AgentThread("kv-nixl-reads", self._turn)

    def set_active(self, is_active: bool) -> None:
        """is_active: transfers are open."""
        if is_active and not self._is_active:
            self._thread.submit(_nothing)  # ends its wait
        self._is_active = is_active

    def open(self, sender: int, opened: Callable[[bytes], None], failed: Callable[[str], None]) -> None:
        """A later `CopyThread.poll` calls `opened` with what the sender's `NixlWriter` needs, or `failed`.

        Calls `failed` at once if there is no memory for buffers.
        """
        try:
            buffers = self._staging.take(NUM_BUFFERS, self._layout.largest_piece_bytes)
        except ConfigError as e:
            failed(str(e))
            return
        access = self._accesses[sender] = _Access(self._staging, buffers)
        self._thread.submit(lambda: self._open(sender, access, opened, failed))

    def reader(
        self, sender: int, own: BlockCopier, layout: BlockLayout, freed: Callable[[bytes], None]
    ) -> NixlReader | None:
        """Returns the reader of a sender for which `open` was called. own, layout: of what the sender writes."""
        access = self._accesses.get(sender)
        return None if access is None else NixlReader(own, layout, access, freed)

    def close(self, sender: int, closed: Callable[[], None]) -> None:
        """Calls `closed` once other hosts cannot write any more, before any later `opened`."""
        access = self._accesses.pop(sender, None)
        if access is not None:
            self._closing.add(access)

        def end() -> None:
            if access is not None and access in self._closing:
                self._closing.remove(access)
                access.close()
            closed()

        self._thread.submit(lambda: self._close(sender, end))

    def stop(self) -> None:
        """Closes all. Waits some milliseconds. No landing may be in flight."""
        self._thread.submit(self._close_all)
        self._thread.stop()
        if not self._thread.join(END_S):
            raise RuntimeError("nixl does not end: it may still write to staging memory")
        for access in [*self._accesses.values(), *self._closing]:
            access.close()
        self._accesses.clear()
        self._closing.clear()

    def _open(
        self, sender: int, access: _Access, opened: Callable[[bytes], None], failed: Callable[[str], None]
    ) -> None:
        region, token = access.region, access.token

        def start() -> None:
            region.use_device()
            agent = NixlAgent(secrets.token_hex(8), self._backends, [region, Region(token.ctypes.data, TOKEN_BYTES)])
            self._agents[sender] = agent
            target = NixlTarget(
                agent.metadata(), region.address, len(access.buffers), access.buffers.num_bytes, region.kind,
                region.device, token.ctypes.data, token.tobytes(), *host_id(),
            )  # fmt: skip
            remote = msgspec.msgpack.encode(target)
            self._report(lambda: opened(remote))

        if error := error_of(start):
            self._report(lambda: failed(error))

    def _close(self, sender: int, closed: Callable[[], None]) -> None:
        agent = self._agents.pop(sender, None)
        if agent is not None:
            agent.destroy()
        self._report(closed)

    def _close_all(self) -> None:
        while self._agents:
            self._agents.popitem()[1].destroy()

    def _turn(self) -> float | None:
        for sender, agent in list(self._agents.items()):
            if error := error_of(agent.progress):
                log.warning("KV link of %x: %s", sender, error)
                self._agents.pop(sender).destroy()  # the sender's next write fails, which closes the link
        if not self._agents:
            return None
        return PROGRESS_S if self._is_active else IDLE_S


def _nothing() -> None:
    pass
