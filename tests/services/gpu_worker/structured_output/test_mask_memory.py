"""The layout of the shared memory: every offset and bit, as the kernels of the GPU read them."""

import mmap
import os

import numpy as np
import pytest

from blockyard.services.gpu_worker.structured_output.mask_memory import (
    PAGE,
    TOKEN_BITS,
    MaskMemory,
    record_of,
    tag_of,
)

SLOTS, VOCAB = 300, 1000
WORDS = 32


def test_the_layout_is_the_documented_one() -> None:
    memory = MaskMemory.create(SLOTS, VOCAB)
    assert memory.offsets == [0, PAGE, PAGE + 2 * PAGE, PAGE + 3 * PAGE]  # 2400, 4800 and 2400 bytes before the masks
    memory.write_token(7, owner=3, index=100, token=999)
    memory.begin(7, 3, 101)
    memory.masks[7, 1, 31] = np.int32(-(1 << 31))
    memory.publish(7, 3, 101)
    other = mmap.mmap(memory.fd, os.fstat(memory.fd).st_size)

    def words(offset: int, dtype: str, place: int) -> int:
        return int(np.ndarray((place + 1,), dtype, other, offset)[place])

    assert words(0, "<i8", 7) == 3 << 42 | 100 << 20 | 999
    assert words(PAGE, "<i8", 7 * 2 + 1) == 3 << 32 | 101
    assert words(3 * PAGE, "<i8", 7) == 3 << 32 | 101
    assert words(4 * PAGE, "<u4", (7 * 2 + 1) * WORDS + 31) == 1 << 31
    assert os.fstat(memory.fd).st_size == 4 * PAGE + -(-SLOTS * 2 * WORDS * 4 // PAGE) * PAGE
    memory.close()


def test_words_of_an_earlier_owner_or_another_index_do_not_fit() -> None:
    memory = MaskMemory.create(4, VOCAB)
    memory.publish(2, owner=5, index=10)
    assert memory.has_mask(2, 5, 10)
    assert not any(memory.has_mask(*one) for one in ((2, 5, 8), (2, 5, 11), (2, 6, 10), (1, 5, 10)))
    memory.write_token(2, 5, 10, 77)
    slots = np.array([1, 2])
    for owner, index, expected in ((5, 10, True), (5, 11, False), (6, 10, False)):
        found, tokens = memory.tokens(slots, np.array([record_of(owner, index, 0)] * 2))
        assert found.tolist() == [False, expected]
        assert tokens[1] == 77
    memory.clear(2)
    assert not memory.has_mask(2, 5, 10)
    assert not memory.sampled.any()
    memory.close()


def test_the_largest_words_are_positive() -> None:
    owner, index, token = 2**21 - 1, 2**22 - 1, 2**20 - 1
    memory = MaskMemory.create(1, VOCAB)
    memory.write_token(0, owner, index, token)
    memory.publish(0, owner, index)
    found, tokens = memory.tokens(np.array([0]), np.array([record_of(owner, index, 0)]))
    assert (found[0], tokens[0]) == (True, token)
    assert int(memory.tags[0, 1]) == tag_of(owner, index) > 0
    assert int(memory.sampled[0]) == 2**63 - 1
    memory.close()


def test_sizes_that_do_not_fit_are_refused() -> None:
    memory = MaskMemory.create(4, VOCAB)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        MaskMemory(memory.fd, 400, VOCAB)
    memory.close()
    with pytest.raises(ValueError, match="vocabulary"):
        MaskMemory.create(1, (1 << TOKEN_BITS) + 1)
