"""Copies and checksums of scattered KV blocks in host memory, with numpy.

numpy releases the GIL in these calls, and unlike torch it starts no threads, which would compete with the model's.
"""

import math

import numpy as np
import numpy.typing as npt

from blockyard.kernels.kv_cache.block_checksum import MIX_1, MIX_2, SHIFT, multipliers, salts
from blockyard.services.kv_transfer.arena import Bytes
from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart, Section

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

TILE_BYTES = 1 << 19  # of a temporary buffer, small enough for the core's L2 cache
LONG_RUN_BYTES = 32 << 10  # runs of at least this size are copied one by one; shorter runs are gathered


def blocks_of(memory: Bytes, layout: BlockLayout) -> list[Words]:
    """memory [num_bytes] uint8 -> [layers, num_blocks, words] of each section, the same memory.

    Raises ValueError if num_bytes is no multiple of a block, or a block's bytes in a layer are no multiple of 8.
    """
    num_blocks, rest = divmod(memory.nbytes, layout.block_bytes)
    if rest or any(section.piece_bytes % 8 for section in layout.sections):
        raise ValueError(f"{memory.nbytes} bytes are not whole blocks of {layout.block_bytes} in words of 8 bytes")
    found: list[Words] = []
    for section in layout.sections:
        size = (len(section.layers), num_blocks, section.piece_bytes // 8)
        start = num_blocks * section.bytes_before // 8
        found.append(memory.view(np.uint64)[start : start + math.prod(size)].reshape(size))
    return found


def blocks_of_part(memory: Bytes, layout: BlockLayout, part: LayoutPart) -> list[Words]:
    """As `blocks_of`, of a part of what the layout has: [layers, num_blocks, planes, words], not contiguous.

    Raises ValueError as `blocks_of` and `BlockLayout.cut` do, and for heads of other sizes than words of 8 bytes.
    """
    whole, found = blocks_of(memory, layout), list[Words]()
    for own, one in layout.cut(part):
        first, stop = own.head_words(one.heads)
        layers = own.local(one.layers)
        words = whole[own.index][layers.start : layers.stop]
        found.append(words.reshape(*words.shape[:2], own.planes, -1)[..., first:stop])
    return found


def copy_blocks(source: Words, source_ids: Ids, target: Words, target_ids: Ids, layers: range) -> None:
    """Copies blocks of `layers`. source, target [all layers, num_blocks, words]; ids [n], no target id twice.

    The memory is that of one section, here and below, and layers are numbers in it. Both may be of `blocks_of_part`,
    with one more dimension.
    """
    if (runs := _long_runs(source, source_ids, target_ids)) is not None:
        these = slice(layers.start, layers.stop)
        for from_block, to_block, count in runs:
            np.copyto(target[these, to_block : to_block + count], source[these, from_block : from_block + count])
        return
    tile = _tile(source)
    for layer in layers:
        for at in range(0, len(source_ids), len(tile)):
            ids = source_ids[at : at + len(tile)]
            part = tile[: len(ids)]
            _gather(source[layer], ids, part)
            target[layer][target_ids[at : at + len(tile)]] = part


def pack_blocks(source: Words, ids: Ids, layers: range, packed: Words) -> None:
    """Copies blocks of `layers` from source [all layers, num_blocks, words] into packed [len(layers), n, words]."""
    if (runs := _long_runs(source, ids, np.arange(len(ids)))) is not None:
        for block, at, count in runs:
            np.copyto(packed[:, at : at + count], source[layers.start : layers.stop, block : block + count])
        return
    for i, layer in enumerate(layers):
        _gather(source[layer], ids, packed[i])


def unpack_blocks(packed: Words, target: Words, ids: Ids, layers: range) -> None:
    """The reverse of `pack_blocks`. No id may occur twice."""
    for i, layer in enumerate(layers):
        target[layer][ids] = packed[i]


class Checksums:
    """Computes checksums of a section's blocks as `kernels/kv_cache/block_checksum` defines them.

    Layers are numbers in the section.
    """

    def __init__(self, section: Section) -> None:
        self._multipliers = multipliers(section.piece_bytes // 8).numpy().view(np.uint64)  # planes, heads, words
        self._salts = salts(section.layers.stop)[section.layers.start :].numpy().view(np.uint64)

    def of_blocks(self, memory: Words, ids: Ids, layers: range) -> Words:
        """memory [all layers, num_blocks, words], ids [n] -> [n]: the part of each block's checksum over `layers`."""
        if (runs := _long_runs(memory, ids, ids)) is not None:
            parts = [memory[layers.start : layers.stop, first : first + count] for first, _, count in runs]
            return np.concatenate([np.zeros(0, np.uint64), *(self.of_packed(part, layers) for part in parts)])
        sums, tile = np.zeros(len(ids), np.uint64), _tile(memory)
        for layer in layers:
            for at in range(0, len(ids), len(tile)):
                words = tile[: len(ids) - at]
                _gather(memory[layer], ids[at : at + len(tile)], words)
                sums[at : at + len(tile)] += self.of_packed(words[None], range(layer, layer + 1))
        return sums

    def of_packed(self, packed: Words, layers: range) -> Words:
        """packed [len(layers), n, words], of any strides -> [n], as `of_blocks`."""
        if not packed.size:
            return np.zeros(packed.shape[1], np.uint64)
        tile, pieces = _tile(packed), np.empty(packed.shape[:2], np.uint64)
        num_blocks = min(packed.shape[1], len(tile))
        num_layers = min(len(layers), len(tile) // num_blocks)  # in one tile
        for first in range(0, len(layers), num_layers):
            for at in range(0, packed.shape[1], num_blocks):
                words = packed[first : first + num_layers, at : at + num_blocks]
                mixed = tile[: words.shape[0] * words.shape[1]].reshape(words.shape)
                np.right_shift(words, np.uint64(SHIFT), out=mixed)
                np.bitwise_xor(words, mixed, out=mixed)
                sums = pieces[first : first + num_layers, at : at + num_blocks]
                np.einsum("lbw,w->lb", mixed.reshape(*sums.shape, -1), self._multipliers, out=sums)
        salted = pieces + self._salts[layers.start : layers.stop, None]
        return np.asarray(_mix(salted).sum(0))  # once for all tiles: it has many calls on few words


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _gather(blocks: Words, ids: Ids, out: Words) -> None:
    """blocks [num_blocks, ...] -> out [n, ...]"""
    if blocks.flags.c_contiguous:
        np.take(blocks, ids, axis=0, out=out, mode="clip")
    else:  # of which `take` would copy all blocks first
        out[:] = blocks[ids]


def _piece_bytes(memory: Words) -> int:
    return 8 * math.prod(memory.shape[2:])


def _tile(memory: Words) -> Words:
    return np.empty((max(1, TILE_BYTES // _piece_bytes(memory)), *memory.shape[2:]), np.uint64)


def _long_runs(memory: Words, source_ids: Ids, target_ids: Ids) -> list[tuple[int, int, int]] | None:
    """Finds runs of consecutive ids on both sides: (source block, target block, length). None if runs are short."""
    breaks = np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(target_ids) != 1)) + 1
    starts = [0, *breaks.tolist()]
    if len(source_ids) * _piece_bytes(memory) < LONG_RUN_BYTES * len(starts):
        return None
    ends = [*starts[1:], len(source_ids)]
    return [(int(source_ids[i]), int(target_ids[i]), end - i) for i, end in zip(starts, ends, strict=True)]
