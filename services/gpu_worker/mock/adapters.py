"""The adapters of a mock worker: nothing is read, and a digest is that of the path."""

from collections.abc import Sequence
from hashlib import blake2b

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.shared.messages import AdapterPlaced, SlotStart

BROKEN = "broken"  # a path that ends with it cannot be read
VIRTUAL_TOKENS = 5  # of each prompt adapter


def mock_digest(path: str) -> bytes:
    return blake2b(path.encode(), digest_size=16).digest()


class MockAdapters:
    """Implements `AdapterHost`. An adapter is there with the next poll."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}  # paths, by the scheduler's number
        self.places: dict[int, int] = {}  # the adapter in each place
        self._asked: list[tuple[int, str, bool]] = []

    @property
    def is_loading(self) -> bool:
        return bool(self._asked)

    def load(self, adapter: int, path: str, *, is_prompt: bool = False) -> None:
        self._asked.append((adapter, path, is_prompt))

    def drop(self, adapter: int) -> None:
        self.held.pop(adapter, None)

    def reset(self) -> None:
        self.held.clear()
        self.places.clear()
        self._asked.clear()

    def poll(self, *, is_idle: bool = False) -> list[LoadedAdapter]:
        asked, self._asked = self._asked, []
        broken = {adapter for adapter, path, _ in asked if path.endswith(BROKEN)}
        self.held.update((adapter, path) for adapter, path, _ in asked if adapter not in broken)
        return [
            LoadedAdapter(adapter, error="it is broken")
            if adapter in broken
            else LoadedAdapter(adapter, mock_digest(path), num_virtual_tokens=VIRTUAL_TOKENS if is_prompt else 0)
            for adapter, path, is_prompt in asked
        ]

    def start(self, starts: Sequence[SlotStart]) -> None:
        for one in starts:
            needs = one.prompt_adapter
            assert needs is None or needs in self.held, f"prompt adapter {needs} is not here, and a slot starts with it"

    def place(self, placed: Sequence[AdapterPlaced]) -> None:
        for one in placed:
            assert one.adapter in self.held, f"adapter {one.adapter} is placed, and is not in host memory"
            self.places[one.place] = one.adapter
