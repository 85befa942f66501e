"""Hashes of KV blocks: equal for the same tokens after the same prefix in the same model.

A hash is 16 bytes of BLAKE2b over (the parent block's hash, the block's token ids). Tenants choose the ids, so hashes
must not collide even on purpose. BLAKE2b takes one round for a block of 16 tokens, SHA-256 two. What the KV of all
tokens depends on (model, revision, KV dtype, cache salt) is hashed into the root, the parent of the first block. What
the KV of some tokens depends on, such as an image, is hashed into their blocks as an `ExtraKey`. The tokenizer hashes a
prompt's full blocks; the scheduler continues with the blocks that generation fills.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain

from blockyard.shared.messages import ExtraKey
from blockyard.shared.token_ids import ID_BYTES, num_ids

HASH_BYTES = 16
_MANY = 64
_begin = blake2b(digest_size=HASH_BYTES)  # copied, never fed
_names = struct.Struct(f"{HASH_BYTES}s" * _MANY)


def root_hash(scope: str, cache_salt: str = "", owner: str | None = None, adapter: bytes = b"") -> bytes:
    """Returns the parent hash of the first block. `scope` is model, revision and KV dtype as text.

    `owner`: a request that shares no block with others; None: requests share blocks. `adapter`: the digest of the
    adapter's bytes; empty: the model itself.
    """
    parts = [scope, cache_salt] if owner is None else [scope, cache_salt, owner]
    if adapter:  # as many parts as no other root has
        parts = [scope, cache_salt, owner or "", "adapter", adapter.hex()]
    return blake2b(_framed(text.encode("utf-8", "surrogatepass") for text in parts), digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, token_ids: bytes) -> bytes:
    """Returns the hash of one block with exactly these tokens (uint32 each)."""
    return blake2b(parent + token_ids, digest_size=HASH_BYTES).digest()


def hash_list(
    parent: bytes, token_ids: bytes, block_size: int, keys: Sequence[ExtraKey] = (), first: int = 0
) -> list[bytes]:
    """Returns the hashes of the full blocks of `token_ids` (uint32 each), chained from `parent`.

    `first`: the position of the first of these ids, for the `keys`.
    """
    if keys:
        return _hashes_with_keys(parent, token_ids, block_size, keys, first)
    step = 4 * block_size
    names = []
    begin = _begin.copy  # faster than the constructor, which parses its arguments
    for (ids,) in struct.iter_unpack(f"{step}s", token_ids[: len(token_ids) // step * step]):
        block = begin()
        block.update(parent + ids)
        parent = block.digest()
        names.append(parent)
    return names


def block_hashes(parent: bytes, token_ids: bytes, block_size: int, keys: Sequence[ExtraKey] = ()) -> bytes:
    """Returns `hash_list` joined, 16 bytes a block."""
    return b"".join(hash_list(parent, token_ids, block_size, keys))


def split_hashes(names: bytes) -> list[bytes]:
    """Splits joined hashes into a list, many at once: ten times as fast as slices."""
    end = len(names) // _names.size * _names.size
    rest = [names[i : i + HASH_BYTES] for i in range(end, len(names), HASH_BYTES)]
    return [*chain.from_iterable(_names.iter_unpack(names[:end])), *rest]


def _hashes_with_keys(
    parent: bytes, token_ids: bytes, block_size: int, keys: Sequence[ExtraKey], first: int
) -> list[bytes]:
    """Hashes blocks that have keys: see `hash_list`.

    A block's keys are hashed behind its ids, each with where it begins in the block or before.
    """
    names = []
    for start in range(first, first + num_ids(token_ids) // block_size * block_size, block_size):
        ids = token_ids[ID_BYTES * (start - first) : ID_BYTES * (start - first + block_size)]
        here = [key for key in keys if key.first < start + block_size and start < key.end]
        if here:  # the count makes one key never look like two
            places = b"".join((key.first - start).to_bytes(8, "little", signed=True) for key in here)
            ids += len(here).to_bytes(8, "little") + places + _framed(key.digest for key in here)
        parent = hash_block(parent, ids)
        names.append(parent)
    return names


def _framed(parts: Iterable[bytes]) -> bytes:
    """Each part with its length before it, so that different lists of parts never give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
