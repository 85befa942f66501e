"""Pending writes to device memory: the last value written to an index counts, by any of the methods."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.execution.device_writes import MOST_FEW, DeviceWrites

PLACES = st.integers(0, 40)
VALUES = st.integers(-(2**31), 2**31 - 1)
SAID = st.one_of(
    st.tuples(st.just("put"), PLACES, VALUES),
    st.tuples(st.just("run"), PLACES, st.lists(VALUES, max_size=5) | st.lists(VALUES, min_size=MOST_FEW + 1)),
    st.tuples(st.just("add"), st.lists(PLACES, unique=True, max_size=6), VALUES),
)


@given(st.lists(SAID, max_size=12))
def test_the_last_value_written_to_an_index_counts(said: list[tuple[str, object, object]]) -> None:
    writes, wanted = DeviceWrites(), dict[int, int]()
    for kind, place, value in said:
        if kind == "put":
            writes.put(place, value)
            wanted[place] = value
        elif kind == "run":
            writes.put_run(place, np.array(value, np.int64))
            wanted |= dict(zip(range(place, place + len(value)), value, strict=True))
        else:
            values = np.arange(len(place)) + value // 2
            writes.add(np.array(place, np.int64), values)
            wanted |= dict(zip(place, values.tolist(), strict=True))
    index, values = writes.take()
    assert index.dtype == values.dtype == np.int32
    assert len(set(index.tolist())) == len(index)
    assert dict(zip(index.tolist(), values.tolist(), strict=True)) == wanted
    assert len(writes.take()[0]) == 0


def test_values_are_32_bit_words_and_cleared_writes_are_dropped() -> None:
    writes = DeviceWrites()
    writes.put_all([3, 4], [0xFFFFFFFF, 0x80000000])
    index, values = writes.take()
    assert index.tolist() == [3, 4] and values.tolist() == [-1, -(2**31)]
    writes.put(1, 1)
    writes.add(np.array([2]), np.array([2]))
    writes.clear()
    assert len(writes.take()[0]) == 0
