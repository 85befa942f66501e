"""Picks the connector of a link by trying it."""

import logging

from blockyard.services.kv_transfer.arena import map_arena
from blockyard.services.kv_transfer.connectors.interface import BlockReader, BlockWriter
from blockyard.services.kv_transfer.connectors.shm import ShmReader, ShmWriter
from blockyard.services.kv_transfer.connectors.tcp import TcpReader, TcpWriter
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.host_blocks import Checksums, Words, blocks_of
from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.services.kv_transfer.protocol.frames import ArenaHandle
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

CONNECTORS = ("auto", "shm", "tcp")


def make_writer(
    name: str, handle: ArenaHandle | None, own: Words, layout: BlockLayout, copies: CopyThread
) -> BlockWriter:
    """Makes a writer. "auto" takes shm, or tcp if the receiver's memory cannot be mapped.

    handle: of the receiver's arena; None if it cannot be exported. own [layers, num_blocks, words]. Raises ConfigError
    for an unknown name, and for "shm" if the memory cannot be mapped.
    """
    checksums = Checksums(layout) if layout.checksums else None
    if name not in CONNECTORS:
        raise ConfigError(f"unknown KV connector {name!r}: use one of {', '.join(CONNECTORS)}")
    if name != "tcp":
        try:
            if handle is None:
                raise ValueError("its memory is not host memory")
            return ShmWriter(own, blocks_of(map_arena(handle), layout), copies, checksums)
        except (OSError, ValueError) as e:
            if name == "shm":
                raise ConfigError(f"KV connector shm: the receiver's memory cannot be mapped: {e}") from e
            log.info("KV blocks go over tcp, the receiver's memory cannot be mapped: %s", e)
    return TcpWriter(own, copies, checksums)


def make_reader(name: str, own: Words, layout: BlockLayout, copies: CopyThread) -> BlockReader | None:
    """Makes the reader that belongs to the writer `name`; None for an unknown name."""
    checksums = Checksums(layout) if layout.checksums else None
    match name:
        case "shm":
            return ShmReader(own, copies, checksums)
        case "tcp":
            return TcpReader(own, copies, checksums)
    return None
