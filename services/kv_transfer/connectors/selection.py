"""Opens the blocks of an arena, and picks the connector of a link by trying it."""

import logging

from blockyard.services.kv_transfer.arena import Arena, DeviceArena
from blockyard.services.kv_transfer.block_copier import BlockCopier, HostCopier
from blockyard.services.kv_transfer.connectors.interface import BlockReader, BlockWriter
from blockyard.services.kv_transfer.connectors.mapped import MappedReader, MappedWriter
from blockyard.services.kv_transfer.connectors.nixl import NixlWriter
from blockyard.services.kv_transfer.connectors.tcp import TcpReader, TcpWriter
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart
from blockyard.services.kv_transfer.protocol.frames import LinkWelcome
from blockyard.services.kv_transfer.staging import StagingMemory
from blockyard.shared.config.services.worker import KVTransferConfig
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

CONNECTORS = ("auto", "cuda_ipc", "shm", "tcp", "nixl")


def check_connector(name: str, arena: Arena) -> None:
    """Raises ConfigError for a connector that no link of this worker could use. The start of a worker calls it, too."""
    if name not in CONNECTORS:
        raise ConfigError(f"unknown KV connector {name!r}: use one of {', '.join(CONNECTORS)}")
    on_gpu = isinstance(arena, DeviceArena)
    if name == ("shm" if on_gpu else "cuda_ipc"):
        raise ConfigError(f"KV connector {name}: the KV memory of this worker is on {'a GPU' if on_gpu else 'a CPU'}")


def make_copier(arena: Arena, layout: BlockLayout, copies: CopyThread, part: LayoutPart | None = None) -> BlockCopier:
    """layout: of the arena. part: that is copied; None: all of it.

    Raises ValueError if the arena's memory is not whole blocks of words of 8 bytes, or does not have the part.
    """
    if isinstance(arena, DeviceArena):
        # imports Triton, which a worker on the CPU does not load
        from blockyard.services.kv_transfer import device_copier  # noqa: PLC0415

        return device_copier.make_copier(arena.bytes, layout, copies, part)
    return HostCopier(arena.bytes.numpy(), layout, copies, part)


def make_writer(
    config: KVTransferConfig, welcome: LinkWelcome, arena: Arena, own: BlockCopier, layout: BlockLayout,
    copies: CopyThread, staging: StagingMemory, theirs: LayoutPart | None = None,
) -> BlockWriter:  # fmt: skip
    """Makes a writer. "auto" maps the receiver's memory, or takes tcp if it cannot.

    layout: of what goes over the link. theirs: what the receiver's rank has.

    Raises ConfigError as `check_connector` does, and for a connector that cannot be used with this receiver.
    """
    name, handle = config.connector, welcome.arena
    check_connector(name, arena)
    if name == "nixl":
        return NixlWriter(own, layout, staging, welcome.remote, copies, config.backends)
    if name != "tcp":
        try:
            if handle is None:
                raise ValueError("it is not exported")
            return MappedWriter(own, own.map_peer(handle, theirs))
        except (OSError, ValueError) as e:
            if name != "auto":
                raise ConfigError(f"KV connector {name}: the receiver's memory cannot be mapped: {e}") from e
            log.info("KV blocks go over tcp, the receiver's memory cannot be mapped: %s", e)
    return TcpWriter(own, layout)


def make_reader(name: str, own: BlockCopier) -> BlockReader | None:
    """Makes the reader that belongs to the writer `name`, other than nixl; None for an unknown name."""
    if name == own.connector:
        return MappedReader(own)
    return TcpReader(own) if name == "tcp" else None
