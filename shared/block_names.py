"""Names of KV blocks: whoever computes the same block of the same model calls it the same.

A name is 16 bytes of SHA-256 over (the parent's name, the block's token ids). What else its KV depends on
(model, revision, KV dtype, adapter, cache salt, images) is hashed into the root, the parent of the first block.
The tokenizer names a prompt's full blocks, the scheduler goes on with those that generation fills.
"""

import hashlib
from collections.abc import Sequence

NAME_BYTES = 16


def root_name(scope: str, adapter: str = "", cache_salt: str = "", image_hashes: Sequence[bytes] = ()) -> bytes:
    """The name that stands before the first block. `scope` is model, revision and KV dtype in words."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (scope, adapter, cache_salt)]
    # Lengths stand before the parts, so that no two lists of parts read the same.
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in [*parts, *image_hashes])
    return hashlib.sha256(framed).digest()[:NAME_BYTES]


def block_name(parent: bytes, token_ids: bytes) -> bytes:
    """The name of one block, all of whose tokens these are (uint32 each)."""
    return hashlib.sha256(parent + token_ids).digest()[:NAME_BYTES]


def block_names(parent: bytes, token_ids: bytes, block_size: int) -> bytes:
    """Names of the full blocks of `token_ids` (uint32 each), 16 bytes each, chained from `parent`."""
    sha256 = hashlib.sha256
    step = 4 * block_size
    names = []
    for end in range(step, len(token_ids) + 1, step):
        parent = sha256(parent + token_ids[end - step : end]).digest()[:NAME_BYTES]
        names.append(parent)
    return b"".join(names)
