"""What the blocks of a choice are called, as far as its tokens are known."""

from blockyard.services.scheduler.sequences.requests import ID_BYTES, Sequence
from blockyard.shared.block_hashes import HASH_BYTES, hash_block, hash_list, root_hash, split_hashes


class BlockHasher:
    """`shared`: blocks are for everybody who asks for the same tokens; if not, for the choices of one request."""

    def __init__(self, scope: str, shared: bool) -> None:
        self._scope, self._shared = scope, shared

    def hashes(self, sequence: Sequence, block_size: int, num_tokens: int) -> list[bytes]:
        """Names of the choice's full blocks, kept with it; the first `num_tokens` of its tokens are known."""
        if sequence.hash_block_size != block_size:
            sequence.hash_block_size, sequence.block_hashes = block_size, self._prompt_hashes(sequence, block_size)
        hashes = sequence.block_hashes
        missing = num_tokens // block_size - len(hashes)
        if missing > 0:
            first = len(hashes) * block_size
            parent = hashes[-1] if hashes else self._root(sequence)
            ids = _ids(sequence, first, first + missing * block_size)
            if missing == 1:  # as generation goes on
                hashes.append(hash_block(parent, ids))
            else:
                hashes += hash_list(parent, ids, block_size)
        return hashes

    def _prompt_hashes(self, sequence: Sequence, block_size: int) -> list[bytes]:
        """As they came with the request; none if they are those of another block size."""
        given = sequence.request.frame.block_hashes if self._shared else b""
        fits = len(given) == sequence.request.num_prompt // block_size * HASH_BYTES
        return split_hashes(given) if fits else []

    def _root(self, sequence: Sequence) -> bytes:
        frame = sequence.request.frame
        if self._shared:
            return root_hash(self._scope, frame.cache_salt)
        own = frame.request_id.encode("utf-8", "surrogatepass")
        return root_hash(self._scope, frame.cache_salt, [own])  # found by this request alone


def _ids(sequence: Sequence, first: int, end: int) -> bytes:
    """Token ids from `first` to before `end`, which runs from the prompt into the outputs."""
    request = sequence.request
    start = first - request.num_prompt
    if start >= 0:
        return sequence.outputs[start : end - request.num_prompt].tobytes()
    ids = request.frame.prompt_ids[first * ID_BYTES : end * ID_BYTES]
    return ids + sequence.outputs[: max(0, end - request.num_prompt)].tobytes()
