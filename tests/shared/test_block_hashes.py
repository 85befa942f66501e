"""Hashes of KV blocks: chained, of full blocks only, and different whenever KV would differ."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.shared.block_hashes import (
    HASH_BYTES,
    block_hashes,
    hash_block,
    hash_list,
    root_hash,
    split_hashes,
)
from blockyard.shared.messages import ExtraKey
from blockyard.shared.token_ids import pack, unpack

ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def split(names: bytes) -> list[bytes]:
    return [names[i : i + HASH_BYTES] for i in range(0, len(names), HASH_BYTES)]


def name(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def test_known_value() -> None:
    """A changed hash must fail a test: processes of two versions would disagree silently."""
    root = name(b"".join(struct.pack("<Q", len(part)) + part for part in (b"m", b"s")))
    assert root_hash("m", "s") == root
    first = name(root + struct.pack("<2I", 1, 2))
    second = name(first + struct.pack("<2I", 3, 4))
    assert block_hashes(root, pack([1, 2, 3, 4, 5]), 2) == first + second
    assert hash_block(root, pack([1, 2])) == first


@pytest.mark.parametrize("num_names", [0, 1, 63, 64, 65, 200])
def test_joined_hashes_equal_the_list(num_names: int) -> None:
    names = hash_list(root_hash("m"), pack(list(range(2 * num_names + 1))), 2)
    assert len(names) == num_names
    assert split_hashes(b"".join(names)) == names


@given(ids=ids_lists, more=ids_lists, block_size=st.integers(1, 8))
def test_chain(ids: list[int], more: list[int], block_size: int) -> None:
    root = root_hash("m")
    names = split(block_hashes(root, pack(ids), block_size))
    assert len(names) == len(ids) // block_size
    longer = split(block_hashes(root, pack(ids + more), block_size))
    assert longer[: len(names)] == names
    # the scheduler goes on from the last full block
    start = len(names) * block_size
    rest = split(block_hashes(names[-1] if names else root, pack((ids + more)[start:]), block_size))
    assert names + rest == longer
    assert len(set(longer)) == len(longer)


@given(ids=st.lists(st.integers(0, 99), min_size=8, max_size=8), at=st.integers(0, 7))
def test_a_change_alters_the_hash_of_its_block_and_all_after(ids: list[int], at: int) -> None:
    changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    before, after = (split(block_hashes(root_hash("m"), pack(i), 2)) for i in (ids, changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [n < at // 2 for n in range(4)]


def test_the_root_contains_everything_else_that_kv_depends_on() -> None:
    roots = [
        root_hash("m"),
        root_hash("n"),
        root_hash("m", cache_salt="x"),
        root_hash("mx"),
        root_hash("m", owner="x"),
        root_hash("m", owner=""),
    ]
    assert len(set(roots)) == len(roots)


@given(ids=ids_lists)
def test_token_ids_travel_as_little_endian_uint32(ids: list[int]) -> None:
    assert unpack(pack(ids)) == ids
    assert pack([258]) == b"\x02\x01\x00\x00"


@given(
    ids=ids_lists,
    block_size=st.integers(1, 8),
    first=st.integers(0, 40),
    size=st.integers(1, 20),
    cut=st.integers(0, 9),
)
def test_an_extra_key_alters_the_hash_of_its_first_block_and_all_after(
    ids: list[int], block_size: int, first: int, size: int, cut: int
) -> None:
    root, key = root_hash("m"), ExtraKey(first, first + size, b"image")
    plain = hash_list(root, pack(ids), block_size)
    found = hash_list(root, pack(ids), block_size, [key])
    assert [a == b for a, b in zip(plain, found, strict=True)] == [
        (n + 1) * block_size <= first for n in range(len(plain))
    ]
    # another process goes on from any full block
    done = min(cut, len(found))
    rest = pack(ids[done * block_size :])
    assert hash_list(found[done - 1] if done else root, rest, block_size, [key], done * block_size) == found[done:]


def test_extra_keys_differ_by_digest_and_place() -> None:
    one, other = b"a" * 16, b"b" * 16
    lists: list[list[ExtraKey]] = [
        [],
        [ExtraKey(0, 4, one)],
        [ExtraKey(0, 4, other)],
        [ExtraKey(1, 4, one)],
        [ExtraKey(0, 2, one), ExtraKey(2, 4, other)],
        [ExtraKey(0, 2, other), ExtraKey(2, 4, one)],
        [ExtraKey(0, 2, one + other), ExtraKey(2, 4, b"")],
    ]
    found = [block_hashes(root_hash("m"), pack([7] * 4), 4, keys) for keys in lists]
    assert len({*found}) == len(lists)


def test_one_extra_key_is_never_two() -> None:
    """The bytes behind the count are equal: the place of the second key is the length of the one digest."""
    one, other = b"aaaa", b"bbbb"
    digest = len(one).to_bytes(8, "little") + one + len(other).to_bytes(8, "little") + other
    two = [ExtraKey(0, 64, one), ExtraKey(len(digest), 64, other)]
    found = [block_hashes(root_hash("m"), pack([7] * 64), 64, keys) for keys in (two, [ExtraKey(0, 64, digest)])]
    assert found[0] != found[1]
