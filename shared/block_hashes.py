"""Hashes of KV blocks: equal for the same tokens after the same prefix in the same model.

A hash is 16 bytes of BLAKE2b over (the parent block's hash, the block's token ids). Tenants choose the ids, so hashes
must not collide even on purpose. BLAKE2b takes one round for a block of 16 tokens, SHA-256 two. Everything else that KV
depends on (model, revision, KV dtype, cache salt, images) is hashed into the root, the parent of the first block. The
tokenizer hashes a prompt's full blocks; the scheduler continues with the blocks that generation fills.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

HASH_BYTES = 16
_MANY = 64
_begin = blake2b(digest_size=HASH_BYTES)  # copied, never fed
_names = struct.Struct(f"{HASH_BYTES}s" * _MANY)


def root_hash(scope: str, cache_salt: str = "", image_hashes: Sequence[bytes] = ()) -> bytes:
    """Returns the parent hash of the first block. `scope` is model, revision and KV dtype as text."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (scope, cache_salt)]
    # Each part is prefixed with its length, so that different lists of parts never give the same bytes.
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in [*parts, *image_hashes])
    return blake2b(framed, digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, token_ids: bytes) -> bytes:
    """Returns the hash of one block with exactly these tokens (uint32 each)."""
    return blake2b(parent + token_ids, digest_size=HASH_BYTES).digest()


def hash_list(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Returns the hashes of the full blocks of `token_ids` (uint32 each), chained from `parent`."""
    step = 4 * block_size
    names = []
    begin = _begin.copy  # faster than the constructor, which parses its arguments
    for (ids,) in struct.iter_unpack(f"{step}s", token_ids[: len(token_ids) // step * step]):
        block = begin()
        block.update(parent + ids)
        parent = block.digest()
        names.append(parent)
    return names


def block_hashes(parent: bytes, token_ids: bytes, block_size: int) -> bytes:
    """Returns `hash_list` joined, 16 bytes a block."""
    return b"".join(hash_list(parent, token_ids, block_size))


def split_hashes(names: bytes) -> list[bytes]:
    """Splits joined hashes into a list, many at once: ten times as fast as slices."""
    end = len(names) // _names.size * _names.size
    rest = [names[i : i + HASH_BYTES] for i in range(end, len(names), HASH_BYTES)]
    return [*chain.from_iterable(_names.iter_unpack(names[:end])), *rest]
