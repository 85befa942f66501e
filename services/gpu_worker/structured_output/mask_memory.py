"""The shared memory between a worker and its matcher processes: tokens go down, masks come up.

One memfd, mapped by the worker and by all of its matcher processes. A constrained slot belongs to one matcher process,
so each word has one writer at a time. A GPU worker pins the mapping, and its kernels read and write the same words
(`kernels/sampling`). All words are little-endian. `S` is the number of slots, `W` is ceil(vocab_size / 32). Regions, in
order, each at a multiple of 4096 bytes:

| region | type | written by | contents |
|---|---|---|---|
| `sampled` | int64 [S] | worker or device | the last token of the slot: `owner << 42 | index << 20 | token` |
| `tags` | int64 [S, 2] | matcher | of the mask at the same place in `masks`: `owner << 32 | index`; 0: none |
| `working` | int64 [S] | matcher | the tag of the mask that is being made now; index 0: it compiles; 0: none |
| `masks` | int32 [S, 2, W] | matcher | of index i at [slot, i % 2]: bit t % 32 of word t // 32 allows token t |

The *index* of a token is its place in the whole sequence, prompt included: the first output token has the index
`num_prompt_tokens`. An *owner* is a number of each start of a constrained slot, from 1 to 2**21 - 1 and then again from
1; 0 stands for a slot without a constraint. Indexes are below 2**22 and token ids below 2**20, so a record is never
negative. Bits of a mask beyond `vocab_size` are 0.

Rules:

- At the start of a slot the worker sets its `sampled` and `tags` to 0, and only then sends `SlotOpen` to the matcher.
  Words that a step in flight or the matcher writes later for an earlier owner do not fit the new one.
- The matcher writes a mask first and its tag last. x86-64 keeps the order of stores; other machines need a fence
  between them. The reader of a tag that fits may use the mask until it has written the token of that index.
- The matcher writes the mask of index i + 1 only after it has read the token at i. So two masks a slot are enough, one
  record a slot is enough, and the matcher, which looks only for the token of the index of its last mask, sees each
  token once. Tokens before the first mask are in `SlotOpen`.
- A record is one word, so its token needs no order.
- A matcher that cannot make a mask leaves the tag as it is and sends `SlotFailed`.
- When a process has ended, the worker sets the tags of its slots to 0 and opens them again, with the same owners.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.shared.grammars.interface import MaskWords

TOKEN_BITS, INDEX_BITS, OWNER_BITS = 20, 22, 21
PAGE = 4096


def tag_of(owner: int, index: int) -> int:
    return owner << 32 | index


def record_of(owner: int, index: int, token: int) -> int:
    return owner << (INDEX_BITS + TOKEN_BITS) | index << TOKEN_BITS | token


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def region_sizes(num_slots: int, vocab_size: int) -> list[int]:
    """Bytes of the regions, each rounded up to whole pages."""
    sizes = [num_slots * 8, num_slots * 2 * 8, num_slots * 8, num_slots * 2 * num_mask_words(vocab_size) * 4]
    return [-(-size // PAGE) * PAGE for size in sizes]


class MaskMemory:
    """The regions as numpy arrays over the mapping."""

    def __init__(self, fd: int, num_slots: int, vocab_size: int) -> None:
        """Maps the memory of a descriptor, which stays open. Both sides give the same sizes."""
        self.fd, self.num_slots, self.vocab_size = fd, num_slots, vocab_size
        sizes = region_sizes(num_slots, vocab_size)
        if os.fstat(fd).st_size != sum(sizes):
            raise ValueError(f"expected {sum(sizes)} bytes of shared memory, got {os.fstat(fd).st_size}")
        self.mapping = mmap.mmap(fd, sum(sizes))
        self.shared: object = None  # what lets a device read and write the mapping
        at = self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]  # in bytes, of the regions in order
        self.sampled: Ints = np.ndarray((num_slots,), np.int64, self.mapping, at[0])
        self.tags: Ints = np.ndarray((num_slots, 2), np.int64, self.mapping, at[1])
        self.working: Ints = np.ndarray((num_slots,), np.int64, self.mapping, at[2])
        self.masks: MaskWords = np.ndarray((num_slots, 2, num_mask_words(vocab_size)), np.int32, self.mapping, at[3])

    @classmethod
    def create(cls, num_slots: int, vocab_size: int) -> "MaskMemory":
        """Makes the memory, all zeros. Child processes do not inherit its descriptor unless they are given it."""
        if vocab_size > 1 << TOKEN_BITS:
            raise ValueError(f"expected a vocabulary of at most {1 << TOKEN_BITS} tokens, got {vocab_size}")
        fd = os.memfd_create("blockyard-masks")
        os.ftruncate(fd, sum(region_sizes(num_slots, vocab_size)))
        return cls(fd, num_slots, vocab_size)

    def close(self) -> None:
        """Closes the descriptor. The mapping lives as long as arrays over it."""
        os.close(self.fd)

    def clear(self, slot: int) -> None:
        """Worker: prepares a slot for a new owner."""
        self.sampled[slot] = 0
        self.clear_tags(slot)

    def clear_tags(self, slot: int) -> None:
        """Worker: the process that made this slot's masks has ended."""
        self.tags[slot] = 0
        self.working[slot] = 0

    def write_token(self, slot: int, owner: int, index: int, token: int) -> None:
        """Worker: the token at an index was sampled."""
        self.sampled[slot] = record_of(owner, index, token)

    def has_mask(self, slot: int, owner: int, index: int) -> bool:
        return int(self.tags[slot, index % 2]) == tag_of(owner, index)

    def tokens(self, slots: Ints, keys: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Matcher: which of these slots have a token at the wanted index, and the tokens of all. keys: `record_of` of
        each slot's owner and wanted index, with token 0."""
        records = self.sampled[slots]
        return records >> TOKEN_BITS == keys >> TOKEN_BITS, records & (1 << TOKEN_BITS) - 1

    def begin(self, slot: int, owner: int, index: int) -> None:
        """Matcher: works on the mask of an index."""
        self.working[slot] = tag_of(owner, index)

    def publish(self, slot: int, owner: int, index: int) -> None:
        """Matcher: the mask of an index is written."""
        self.tags[slot, index % 2] = tag_of(owner, index)

    def rest(self, slot: int) -> None:
        """Matcher: works on no mask of this slot."""
        self.working[slot] = 0
