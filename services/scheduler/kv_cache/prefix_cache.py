"""Prefix caching: hashes of a sequence's full blocks, and the search for blocks that are cached already."""

from dataclasses import dataclass, field

from blockyard.services.scheduler.kv_cache.block_pool import BlockPool
from blockyard.services.scheduler.kv_cache.sliding_window import SlidingWindow
from blockyard.services.scheduler.sequences.requests import Sequence
from blockyard.shared.block_hashes import HASH_BYTES, hash_block, hash_list, root_hash, split_hashes
from blockyard.shared.token_ids import ID_BYTES


class BlockHasher:
    """Hashes the full blocks of sequences. A block's hash covers its tokens and all tokens before them.

    With `enabled`, requests share blocks. Without, the root hash contains the request's id, so that only its sequences
    find them: a preempted sequence then still finds its own blocks in host memory.
    """

    def __init__(self, scope: str, enabled: bool) -> None:
        self.enabled = enabled
        self._scope = scope

    def disabled(self) -> "BlockHasher":
        """One that does not let requests share blocks."""
        return BlockHasher(self._scope, False)

    def hashes(self, sequence: Sequence, block_size: int, num_tokens: int) -> list[bytes]:
        """Hashes of at least the full blocks of the first `num_tokens` tokens, kept with the sequence."""
        if sequence.hash_block_size != block_size:
            sequence.hash_block_size, sequence.block_hashes = block_size, self._prompt_hashes(sequence, block_size)
        hashes = sequence.block_hashes
        missing = num_tokens // block_size - len(hashes)
        if missing > 0:
            first = len(hashes) * block_size
            parent = hashes[-1] if hashes else self._root(sequence)
            ids, keys = _ids(sequence, first, first + missing * block_size), sequence.request.frame.extra_keys
            if missing == 1 and not keys:  # the usual case during decode
                hashes.append(hash_block(parent, ids))
            else:
                hashes += hash_list(parent, ids, block_size, keys, first)
        return hashes

    def _prompt_hashes(self, sequence: Sequence, block_size: int) -> list[bytes]:
        """The hashes that came with the request; empty if they are of another block size."""
        given = sequence.request.frame.block_hashes if self.enabled else b""
        fits = len(given) == sequence.request.num_prompt // block_size * HASH_BYTES
        return split_hashes(given) if fits else []

    def _root(self, sequence: Sequence) -> bytes:
        frame = sequence.request.frame
        owner = None if self.enabled else frame.request_id
        return root_hash(self._scope, frame.cache_salt, owner, frame.adapter_digest + frame.prompt_adapter_digest)


def _ids(sequence: Sequence, first: int, end: int) -> bytes:
    """Token ids at positions `first` to `end` - 1 of prompt and outputs."""
    request = sequence.request
    start = first - request.num_prompt
    if start >= 0:
        return sequence.outputs[start : end - request.num_prompt].tobytes()
    ids = request.frame.prompt_ids[first * ID_BYTES : end * ID_BYTES]
    return ids + sequence.outputs[: max(0, end - request.num_prompt)].tobytes()


@dataclass(slots=True)
class PrefixMatch:
    """The leading blocks of a waiting sequence that need not be computed."""

    blocks: list[int] = field(default_factory=list)  # on the device, in order, behind the skipped ones
    next_hash: bytes | None = None  # of the first block to compute; None if prefix caching does not apply to it
    is_query: bool = False  # counts in the hit rate
    num_tokens: int = 0  # tokens that need not be computed
    copy_from: int | None = None  # block with the last of these tokens, to be copied because it is not full
    host_hashes: dict[int, bytes] = field(default_factory=dict)  # by index in the table: blocks to fetch from the host
    num_skipped: int = 0  # leading blocks outside the sliding window, which no later token reads

    def complete(self, next_hash: bytes | None, num_tokens: int, is_query: bool) -> None:
        self.next_hash, self.num_tokens, self.is_query = next_hash, num_tokens, is_query

    @property
    def num_blocks_found(self) -> int:
        """Leading blocks that need not be computed."""
        return self.num_skipped + len(self.blocks) + len(self.host_hashes)


def find_prefix(pool: BlockPool, hashes: list[bytes], max_blocks: int) -> PrefixMatch:
    """The longest cached prefix of at most `max_blocks` blocks, on the device first and then in host memory."""
    found = PrefixMatch(pool.index.find(hashes, max_blocks))
    if len(found.blocks) < max_blocks and pool.host.num_used:
        _extend_from_host(pool, hashes[:max_blocks], found)
    return found


def find_in_window(pool: BlockPool, window: SlidingWindow, hashes: list[bytes]) -> PrefixMatch:
    """The longest prefix for which all blocks inside the sliding window at its end are cached."""
    on_device, in_host = pool.index.get, pool.host.get
    num_blocks, first = window.longest_hit(hashes, lambda h: on_device(h) is not None or in_host(h) is not None)
    found = PrefixMatch(num_skipped=first)
    for i in range(first, num_blocks):
        if (block := on_device(hashes[i])) is not None:
            found.blocks.append(block)
        else:
            found.host_hashes[i] = hashes[i]
    return found


def _extend_from_host(pool: BlockPool, hashes: list[bytes], found: PrefixMatch) -> None:
    """Continues a match with blocks from host memory and from the device, up to the first block in neither."""
    on_device, in_host = pool.index.get, pool.host.get
    start = len(found.blocks)
    if in_host(hashes[start]) is None:
        return
    rest = hashes[start:]
    if pool.index.has_none(rest):  # the usual case: one lookup of all hashes runs at C speed
        is_in_host = [*map(pool.host.has, rest)]
        end = is_in_host.index(False) if False in is_in_host else len(is_in_host)
        found.host_hashes.update(zip(range(start, start + end), rest[:end], strict=True))
        return
    for i in range(start, len(hashes)):
        if (block := on_device(hashes[i])) is not None:
            found.blocks.append(block)
        elif in_host(hashes[i]) is not None:
            found.host_hashes[i] = hashes[i]
        else:
            return
