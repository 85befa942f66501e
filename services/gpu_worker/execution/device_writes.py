"""Words that are to be written on the device before its next step, in the order in which they were said."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.generic]

MOST_FEW = 64  # words that are quicker kept as a list: an array costs as much to begin with


class DeviceWrites:
    """Arrays of places and values, and lists of them where there are few: a thousand slots may start in a step."""

    def __init__(self) -> None:
        self._index: list[Words] = []
        self._values: list[Words] = []
        self._few_index: list[int] = []
        self._few_values: list[int] = []

    def clear(self) -> None:
        for kept in (self._index, self._values, self._few_index, self._few_values):
            kept.clear()

    def put(self, place: int, value: int) -> None:
        """A value is taken modulo 2**32."""
        self._few_index.append(place)
        self._few_values.append(value)

    def put_all(self, places: Iterable[int], values: Iterable[int]) -> None:
        """As many of one as of the other."""
        self._few_index.extend(places)
        self._few_values.extend(values)

    def put_run(self, place: int, values: Numbers) -> None:
        """`values` at `place` and behind it."""
        if len(values) <= MOST_FEW:
            self.put_all(range(place, place + len(values)), values.tolist())
        else:
            self.add(np.arange(place, place + len(values)), values)

    def add(self, index: Numbers, values: Numbers) -> None:
        self._settle()
        self._index.append(index.astype(np.int32))
        self._values.append(values.astype(np.int32))

    def take(self) -> tuple[Words, Words]:
        """Index and value of everything; the last of what was said of a place. Nothing is left here."""
        many = bool(self._few_index) or len(self._index) > 1  # an array by itself says nothing twice
        self._settle()
        if not self._index:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        index, values = np.concatenate(self._index), np.concatenate(self._values)
        self.clear()
        if many:
            _, last = np.unique(index[::-1], return_index=True)
            if len(last) < len(index):
                keep = len(index) - 1 - last
                index, values = index[keep], values[keep]
        return index, values

    def _settle(self) -> None:
        if self._few_index:
            self._index.append(np.array(self._few_index, np.int32))
            self._values.append(np.array(self._few_values, np.int64).astype(np.int32))
            self._few_index.clear()
            self._few_values.clear()
