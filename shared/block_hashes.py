"""Names of KV blocks: whoever computes the same block of the same model calls it the same.

A name is 16 bytes of BLAKE2b over (the parent's name, the block's token ids): tenants may choose the ids, so that names
must not collide even where somebody tries. It takes such a block in one round, where SHA-256 takes two. What else a
block's KV depends on (model, revision, KV dtype, cache salt, images) is hashed into the root, the parent of
the first block. The tokenizer names a prompt's full blocks, the scheduler goes on with those that generation fills.
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
    """The name that stands before the first block. `scope` is model, revision and KV dtype in words."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (scope, cache_salt)]
    # Lengths stand before the parts, so that no two lists of parts read the same.
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in [*parts, *image_hashes])
    return blake2b(framed, digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, token_ids: bytes) -> bytes:
    """The name of one block, all of whose tokens these are (uint32 each)."""
    return blake2b(parent + token_ids, digest_size=HASH_BYTES).digest()


def hash_list(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Names of the full blocks of `token_ids` (uint32 each), chained from `parent`."""
    step = 4 * block_size
    names = []
    begin = _begin.copy  # for less than what the constructor takes to read its arguments
    for (ids,) in struct.iter_unpack(f"{step}s", token_ids[: len(token_ids) // step * step]):
        block = begin()
        block.update(parent + ids)
        parent = block.digest()
        names.append(parent)
    return names


def block_hashes(parent: bytes, token_ids: bytes, block_size: int) -> bytes:
    """As `hash_list`, 16 bytes each."""
    return b"".join(hash_list(parent, token_ids, block_size))


def split_hashes(names: bytes) -> list[bytes]:
    """A list of what stands side by side: many at once, in a tenth of the time that slices take."""
    end = len(names) // _names.size * _names.size
    rest = [names[i : i + HASH_BYTES] for i in range(end, len(names), HASH_BYTES)]
    return [*chain.from_iterable(_names.iter_unpack(names[:end])), *rest]
