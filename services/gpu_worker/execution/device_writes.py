"""Collects words to write on the device before its next step. The last value of a place counts."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from blockyard.services.gpu_worker.arrays import Words

Numbers = npt.NDArray[np.generic]

NO_WORDS: Words = np.empty(0, np.int32)
MOST_FEW = 64  # below this many words a list is quicker than an array


class DeviceWrites:
    """Places and values, as arrays and, for few words, as lists: a thousand slots may start in a step."""

    def __init__(self) -> None:
        self._index: list[Words] = []
        self._values: list[Words] = []
        self._few_index: list[int] = []
        self._few_values: list[int] = []

    def clear(self) -> None:
        for kept in (self._index, self._values, self._few_index, self._few_values):
            kept.clear()

    def put(self, place: int, value: int) -> None:
        """The value is taken modulo 2**32."""
        self._few_index.append(place)
        self._few_values.append(value)

    def put_all(self, places: Iterable[int], values: Iterable[int]) -> None:
        """Both have the same length."""
        self._few_index.extend(places)
        self._few_values.extend(values)

    def put_run(self, place: int, values: Numbers) -> None:
        """Writes `values` from `place` on."""
        if len(values) <= MOST_FEW:
            self.put_all(range(place, place + len(values)), values.tolist())
        else:
            self.add(np.arange(place, place + len(values)), values)

    def add(self, index: Numbers, values: Numbers) -> None:
        self._few_to_arrays()
        self._index.append(index.astype(np.int32))
        self._values.append(values.astype(np.int32))

    def take(self) -> tuple[Words, Words]:
        """Index and value of all words, each place once, and clears them."""
        if not self._few_index and not self._index:
            return NO_WORDS, NO_WORDS
        many = bool(self._few_index) or len(self._index) > 1  # one array names each place once
        self._few_to_arrays()
        index, values = np.concatenate(self._index), np.concatenate(self._values)
        self.clear()
        if many:
            _, last = np.unique(index[::-1], return_index=True)
            if len(last) < len(index):
                keep = len(index) - 1 - last
                index, values = index[keep], values[keep]
        return index, values

    def _few_to_arrays(self) -> None:
        if self._few_index:
            self._index.append(np.array(self._few_index, np.int32))
            self._values.append(np.array(self._few_values, np.int64).astype(np.int32))
            self._few_index.clear()
            self._few_values.clear()
