"""What a mock worker has instead of KV: for each place in its blocks, which tokens led up to it."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blockyard.shared.messages import BlockName

EMPTY = 0  # the state before a sequence's first token


def advance(state: int, token_id: int) -> int:
    """A number for "these tokens in this order": KV depends on all that came before it."""
    return hash((state, token_id))


def states_of(token_ids: Iterable[int]) -> "array[int]":
    """After each of a sequence's tokens."""
    states, state = array("q"), EMPTY
    for token in token_ids:
        state = advance(state, token)
        states.append(state)
    return states


@dataclass(slots=True)
class MockKV:
    """Outlives slots, as KV does. Also keeps the names of its full blocks, as `BlockNames` does, without numpy."""

    block_size: int
    names: dict[int, bytes] = field(default_factory=dict)
    _states: dict[int, int] = field(default_factory=dict)  # by place: block times size plus offset

    def write(self, blocks: list[int], first: int, states: Sequence[int]) -> None:
        """A sequence with this block table has computed its tokens from position `first` on."""
        size = self.block_size
        for position, state in enumerate(states, first):
            block = blocks[position // size]
            self._states[block * size + position % size] = state
            self.names.pop(block, None)

    def first_difference(self, blocks: list[int], states: Sequence[int]) -> int | None:
        """The first position at which the blocks do not hold what a sequence would have computed itself."""
        size = self.block_size
        for position, state in enumerate(states):
            if self._states.get(blocks[position // size] * size + position % size) != state:
                return position
        return None

    def learn(self, names: Iterable[BlockName]) -> None:
        for entry in names:
            self.names[entry.block] = entry.name

    def listed(self) -> tuple[list[int], bytes]:
        """Blocks, and their names in the same order."""
        return list(self.names), b"".join(self.names.values())
