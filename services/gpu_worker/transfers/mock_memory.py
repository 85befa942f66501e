"""The KV memory of a mock worker with KV transfers. It imports torch, which other mock workers do not load.

The bytes of a block are the contents that `MockKV` has of it: the state before it, the length and the token ids.
"""

import struct

import numpy as np

from blockyard.services.gpu_worker.mock.kv import UNKNOWN, BlockContents, MockKV
from blockyard.services.kv_transfer.arena import HostArena
from blockyard.services.kv_transfer.layout import BlockLayout, LayerRun
from blockyard.shared.token_ids import ID_BYTES

_HEADER = struct.Struct("<qq")  # state before the block, bytes of its token ids


class MockMemory:
    """Implements `TransferBlocks`: blocks are encoded into an arena when they are sent, and decoded from it when
    they have landed."""

    def __init__(self, kv: MockKV, num_blocks: int) -> None:
        # 32 bytes a token, of which the token ids take 4 and the header at most 16
        self.layout = BlockLayout(runs=(LayerRun(1, 2, 1),), block_size=kv.block_size, dtype="mock", dtype_bytes=8)
        assert self.layout.block_bytes >= _HEADER.size + kv.block_size * ID_BYTES
        self.arena = HostArena(num_blocks * self.layout.block_bytes)
        self._kv = kv
        self._bytes = self.arena.bytes.numpy().reshape(num_blocks, self.layout.block_bytes)

    def begin_send(self, transfer: int, blocks: list[int]) -> None:
        self._kv.in_transfer.setdefault(transfer, set()).update(blocks)
        for block in blocks:
            self._bytes[block] = self._encode(self._kv.contents_of(block))

    def begin_receive(self, transfer: int, blocks: list[int]) -> None:
        self._kv.in_transfer[transfer] = set(blocks)
        for block in blocks:
            self._kv.receive(block, UNKNOWN)

    def landed(self, blocks: list[int]) -> None:
        for block in blocks:
            self._kv.receive(block, _decode(self._bytes[block].tobytes()))

    def end(self, transfer: int) -> None:
        self._kv.in_transfer.pop(transfer, None)

    def _encode(self, contents: BlockContents) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        state, ids = contents
        data = _HEADER.pack(state, len(ids)) + ids
        return np.frombuffer(data.ljust(self.layout.block_bytes, b"\0"), np.uint8)


def _decode(data: bytes) -> BlockContents:
    state, size = _HEADER.unpack_from(data)
    return state, data[_HEADER.size : _HEADER.size + max(size, 0)]
