"""Stands in for the KV cache of a mock worker: records for each block its tokens and a hash of all tokens before."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from zlib import crc32

from blockyard.shared.messages import BlockCopy, BlockFetch, BlockSave, FullBlock
from blockyard.shared.token_ids import ID_BYTES

BlockContents = tuple[int, bytes]  # the state before a block, and its token ids
UNKNOWN: BlockContents = (-1, b"")  # the block is not written from its beginning: no sequence has this


class TokensByBlock:
    """A sequence's tokens by block; the last block may not be full."""

    __slots__ = ("_blocks", "_size_bytes")

    def __init__(self, ids: bytes, block_size: int) -> None:
        self._size_bytes = size = block_size * ID_BYTES
        self._blocks: list[BlockContents] = []
        state = 0
        for first in range(0, len(ids), size):
            block = ids[first : first + size]
            self._blocks.append((state, block))
            state = crc32(block, state)

    def append(self, token: int) -> None:
        ids = token.to_bytes(ID_BYTES, "little")
        before, last = self._blocks[-1]
        if len(last) < self._size_bytes:
            self._blocks[-1] = (before, last + ids)
        else:
            self._blocks.append((crc32(last, before), ids))

    def state(self, num_tokens: int) -> int:
        """State after so many tokens, at least one."""
        (last,) = self.contents(num_tokens, (num_tokens - 1) * ID_BYTES // self._size_bytes)
        return _state_after(last)

    def contents(self, end: int, first: int = 0) -> list[BlockContents]:
        """Contents of blocks from `first` on, when tokens up to `end` are computed."""
        full, rest = divmod(end * ID_BYTES, self._size_bytes)
        contents = self._blocks[first:full]
        if rest:
            before, ids = self._blocks[full]
            contents.append((before, ids[:rest]))
        return contents


@dataclass(slots=True)
class MockKV:
    """Contents and hashes of all blocks, as `KVPool` and `BlockHashes` have them. It outlives slots."""

    block_size: int
    hashes: dict[int, bytes] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)  # blocks of failed fetches, and blocks computed from them
    in_transfer: dict[int, set[int]] = field(default_factory=dict)  # blocks that other workers read or write
    _contents: dict[int, BlockContents] = field(default_factory=dict)
    _host: dict[int, tuple[bytes, BlockContents]] = field(default_factory=dict)  # hash and contents of a host block

    def write(self, blocks: list[int], first: int, end: int, tokens: TokensByBlock) -> None:
        """A sequence with this block table has computed positions `first` to `end` - 1."""
        begin, offset = divmod(first, self.block_size)
        for block, (before, ids) in zip(blocks[begin:], tokens.contents(end, begin), strict=False):
            kept = self._contents.get(block, UNKNOWN) if offset else (before, b"")
            is_ours = kept[0] == before and kept[1][: offset * ID_BYTES] == ids[: offset * ID_BYTES]
            self._contents[block] = (before, ids) if is_ours else UNKNOWN
            self.hashes.pop(block, None)
            self.bad.discard(block)
            offset = 0

    def state(self, block: int) -> int:
        """State of a full block, after its last token."""
        return _state_after(self._contents[block])

    def host_states(self) -> Iterable[tuple[int, bytes, int]]:
        """Host blocks, their hashes and the state after their last token."""
        return ((host, name, _state_after(contents)) for host, (name, contents) in self._host.items())

    def save(self, save: BlockSave) -> bool:
        """False if the block's contents are known to differ from its hash."""
        contents = self._contents.get(save.block, UNKNOWN)
        self._host.pop(save.host, None)
        self._host[save.host] = (save.block_hash, contents)
        is_full = len(contents[1]) == self.block_size * ID_BYTES
        return (
            save.block not in self.bad and self.hashes.get(save.block, save.block_hash) == save.block_hash and is_full
        )

    def has(self, host: int) -> bool:
        return host in self._host

    def fetch(self, fetch: BlockFetch) -> bool:
        """Whether the fetch succeeded; tests make it fail."""
        _, self._contents[fetch.block] = self._host[fetch.host]
        self.hashes.pop(fetch.block, None)
        self.bad.discard(fetch.block)
        return True

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks as the real pool does: all sources are read before any destination is written."""
        read = [(copy.dst, self._contents.get(copy.src, UNKNOWN), copy.src in self.bad) for copy in copies]
        for dst, contents, is_bad in read:
            self.hashes.pop(dst, None)
            self._contents[dst] = contents
            self.bad.discard(dst)
            if is_bad:
                self.bad.add(dst)

    def contents_of(self, block: int) -> BlockContents:
        return self._contents.get(block, UNKNOWN)

    def receive(self, block: int, contents: BlockContents) -> None:
        """Another worker has written a block. It has no hash until a plan names one."""
        self.hashes.pop(block, None)
        self.bad.discard(block)
        self._contents[block] = contents

    def first_difference(self, blocks: list[int], tokens: TokensByBlock, end: int, begin: int = 0) -> int | None:
        """The first position from `begin` to `end` - 1 where the blocks differ from the sequence; None: none."""
        size = self.block_size
        first = begin // size
        expected = tokens.contents(end, first)
        there = [*map(self._contents.get, blocks[first : first + len(expected)])]
        if there == expected:
            return None
        for i, (before, ids) in enumerate(expected):
            known, written = (there[i] if i < len(there) else None) or UNKNOWN
            if known != before or not written.startswith(ids):
                differ = (at for at, pair in enumerate(zip_longest(written, ids)) if pair[0] != pair[1])
                same = 0 if known != before else next(differ) // ID_BYTES
                return max(begin, (first + i) * size + same)
        return None  # another sequence has extended the last block

    def add(self, names: Iterable[FullBlock]) -> None:
        for entry in names:
            if entry.block not in self.bad:
                self.hashes[entry.block] = entry.block_hash

    def clear(self) -> None:
        """Forgets contents of blocks, too: reading one is an error."""
        self.hashes.clear()
        self.bad.clear()
        self._contents.clear()
        self._host.clear()

    def blocks_and_hashes(self) -> tuple[list[int], bytes]:
        """Blocks, and their hashes in the same order."""
        return list(self.hashes), b"".join(self.hashes.values())

    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return list(self._host), b"".join(name for name, _ in self._host.values())


def _state_after(contents: BlockContents) -> int:
    before, ids = contents
    return crc32(ids, max(before, 0))
