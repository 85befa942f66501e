"""Token ids as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.shared.token_ids import first_outside, num_ids, pack, unpack

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids)
def test_what_is_packed_is_unpacked(given: list[int]) -> None:
    data = pack(given)
    assert data == b"".join(i.to_bytes(4, "little") for i in given)
    assert unpack(data) == given
    assert num_ids(data) == len(given)


@given(ids, st.integers(0, 2**32), st.integers(0, 2100))
def test_the_first_id_outside_is_found_wherever_it_stands(some: list[int], vocab_size: int, num_before: int) -> None:
    before = [max(vocab_size - 1, 0)] * num_before if vocab_size else []
    expected = next((i for i in before + some if i >= vocab_size), None)
    assert first_outside(pack(before + some), vocab_size) == expected


@pytest.mark.parametrize("vocab_size", [1, 100, 2**31 - 1, 2**31, 2**31 + 5])
def test_the_last_id_of_a_vocabulary_is_inside(vocab_size: int) -> None:
    assert first_outside(pack([vocab_size - 1] * 3000), vocab_size) is None
    assert first_outside(pack([vocab_size - 1] * 3000 + [vocab_size]), vocab_size) == vocab_size


@pytest.mark.parametrize("wrong", [[-1], [2**32]])
def test_what_is_no_uint32_is_not_packed(wrong: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack(wrong)


@pytest.mark.parametrize("wrong", [["1"], [[1]], [1.0]])
def test_what_is_no_integer_is_not_packed(wrong: list[int]) -> None:
    with pytest.raises(TypeError):
        pack(wrong)


def test_bytes_that_are_no_whole_ids_are_refused() -> None:
    for read in (num_ids, unpack):
        with pytest.raises(ValueError, match="5 bytes"):
            read(b"12345")
