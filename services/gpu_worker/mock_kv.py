"""What a mock worker has instead of KV: for each place in its blocks, which tokens led up to it."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blockyard.shared.messages import BlockFetch, BlockName, BlockSave

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
    bad: set[int] = field(default_factory=set)  # blocks that could not be fetched, and what was to be made of them
    _states: dict[int, int] = field(default_factory=dict)  # by place: block times size plus offset
    _host: dict[int, tuple[bytes, list[int]]] = field(default_factory=dict)  # name and states of a host block

    def write(self, blocks: list[int], first: int, states: Sequence[int]) -> None:
        """A sequence with this block table has computed its tokens from position `first` on."""
        size = self.block_size
        for position, state in enumerate(states, first):
            block = blocks[position // size]
            self._states[block * size + position % size] = state
            self.names.pop(block, None)
            self.bad.discard(block)

    def save(self, save: BlockSave) -> bool:
        """False if the block does not hold what it is called, as far as that is known."""
        first = save.block * self.block_size
        states = [self._states.get(place, EMPTY) for place in range(first, first + self.block_size)]
        self._host.pop(save.host, None)
        self._host[save.host] = (save.name, states)
        return save.block not in self.bad and self.names.get(save.block, save.name) == save.name and all(states)

    def has(self, host: int) -> bool:
        return host in self._host

    def fetch(self, fetch: BlockFetch) -> bool:
        """Whether the copy could be made; `has` says so."""
        _, states = self._host[fetch.host]
        for offset, state in enumerate(states):
            self._states[fetch.block * self.block_size + offset] = state
        self.names.pop(fetch.block, None)
        self.bad.discard(fetch.block)
        return True

    def copy(self, src: int, dst: int) -> None:
        size = self.block_size
        self.names.pop(dst, None)
        for offset in range(size):
            self._states[dst * size + offset] = self._states.get(src * size + offset, EMPTY)
        self.bad.discard(dst)
        if src in self.bad:
            self.bad.add(dst)

    def first_difference(self, blocks: list[int], states: Sequence[int], begin: int = 0) -> int | None:
        """The first position from `begin` on at which the blocks do not hold what a sequence would have computed."""
        size = self.block_size
        for position in range(begin, len(states)):
            if self._states.get(blocks[position // size] * size + position % size) != states[position]:
                return position
        return None

    def learn(self, names: Iterable[BlockName]) -> None:
        for entry in names:
            if entry.block not in self.bad:
                self.names[entry.block] = entry.name

    def forget_all(self) -> None:
        """What is in the blocks, too: nobody may read it."""
        self.names.clear()
        self.bad.clear()
        self._states.clear()
        self._host.clear()

    def listed(self) -> tuple[list[int], bytes]:
        """Blocks, and their names in the same order."""
        return list(self.names), b"".join(self.names.values())

    def host_listed(self) -> tuple[list[int], bytes]:
        return list(self._host), b"".join(name for name, _ in self._host.values())
