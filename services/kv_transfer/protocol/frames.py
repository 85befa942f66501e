"""Frames between two workers about KV transfers. Only `kv_transfer` sends and reads them.

The sender of blocks opens the link. A link belongs to one incarnation and one generation of the arena on each side.
After it has broken, the sender opens a new link with a new hello. Incarnations and transfer numbers have 64 bits.

Of workers with several ranks, each rank is a sender or a receiver of its own, with an incarnation and transfer numbers
of its own: see `routes`.
"""

import msgspec

from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart

LINK_VERSION = 3


class HostArenaHandle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Names the host memory of an arena to other processes of the host. Valid for one generation."""

    pid: int
    fd: int  # in the process `pid`
    num_bytes: int
    incarnation: int  # of the worker that owns the arena
    generation: int
    nonce: bytes  # random bytes behind the blocks; a reader compares them to know that it opened the right memfd


class DeviceArenaHandle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Names the GPU memory of an arena to other processes of the host. Valid for one generation."""

    ipc: bytes  # CUDA IPC handle of the whole allocation
    offset: int  # bytes before the first block
    num_bytes: int
    incarnation: int
    generation: int
    nonce: bytes  # random bytes behind the blocks, as in `HostArenaHandle`


ArenaHandle = HostArenaHandle | DeviceArenaHandle


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Names reserved blocks of a receiver that a sender writes. The scheduler gives both workers the same one."""

    number: int  # unique: these two workers never use it again
    sender: int  # incarnation
    sender_generation: int  # of its arena
    receiver: int
    receiver_generation: int
    blocks: list[int]  # the receiver's, all different. Frames name a block by its index here, its position
    part: LayoutPart | None = None  # of each block, that this sender writes; None: all


class LinkFrame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all frames on a link. Without fields."""


class LinkHello(LinkFrame, frozen=True):
    """The sender's first frame. It also says that the sender has stopped writing for earlier links to this receiver."""

    version: int
    sender: int
    generation: int
    receiver: int
    layout: BlockLayout  # its part goes over this link
    ticket: bytes = b""  # one-time, needed on a link without encryption
    connector: str = ""  # that the sender asks for


class LinkWelcome(LinkFrame, frozen=True):
    """The receiver accepts the hello."""

    receiver: int
    generation: int
    arena: ArenaHandle | None  # None if it cannot be mapped
    remote: bytes = b""  # of the receiver's side of the connector, for that of the sender


class LinkRefused(LinkFrame, frozen=True):
    """The receiver rejects the hello. The link ends."""

    reason: str


class LinkReady(LinkFrame, frozen=True):
    """The sender has chosen a connector."""

    connector: str
    pid: int  # of the sender if its process writes to the receiver's memory itself, otherwise 0


class WritesAllowed(LinkFrame, frozen=True):
    """The sender may write the blocks of this transfer from now on."""

    transfer: Transfer


class BlocksWritten(LinkFrame, frozen=True):
    """Positions [first, first + count) were written in some layers.

    The second message part has their bytes on tcp, and on nixl names the buffer that has them.
    """

    number: int
    generation: int  # of the receiver's memory
    first: int
    count: int
    first_layer: int
    num_layers: int


class BlockSums(LinkFrame, frozen=True):
    """Positions [first, first + count) were written in all layers. The sender does not write them again."""

    number: int
    generation: int
    first: int
    count: int
    sums: bytes  # checksums, uint64 little-endian, one a position; empty if checksums are off


class BufferFree(LinkFrame, frozen=True):
    """On nixl: the receiver has emptied a buffer, or does not want what is in it. The sender may write to it again."""

    place: bytes  # as it came beside the `BlocksWritten`


class StopWrites(LinkFrame, frozen=True):
    """The receiver aborts the transfer. The sender answers with Stopped, unless it has sent the last BlockSums."""

    number: int


class Stopped(LinkFrame, frozen=True):
    """The sender aborts the transfer, and writes nothing more for it."""

    number: int
    reason: str


class LinkClosed(LinkFrame, frozen=True):
    """The sender's last frame: it has ended all transfers that it had begun, and writes nothing more."""


class Probe(LinkFrame, frozen=True):
    """Ignored. The receiver sends it to learn whether the link is still open."""


ToReceiver = LinkHello | LinkReady | BlocksWritten | BlockSums | Stopped | LinkClosed
ToSender = LinkWelcome | LinkRefused | WritesAllowed | BufferFree | StopWrites | Probe
