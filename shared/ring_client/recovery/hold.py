"""Holds new requests for some seconds, within bounds, while the scheduler of their model restarts."""

from collections.abc import Iterator

from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.open_entry import OpenEntry
from blockyard.shared.ring_client.schedulers import AWAY_S, not_ready

HOLD_S = AWAY_S
MAX_HELD = 1024  # choices, as the default of a scheduler's queue
MAX_HELD_TOKENS = 2**22  # of their prompts


class HeldRequests:
    """Requests that were never sent. Requests to be sent again wait in `Dispatch.waiting`."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self._held: dict[str, tuple[OpenEntry, float]] = {}  # with the time at which it fails
        self._num_choices = self._num_tokens = 0

    def __iter__(self) -> Iterator[OpenEntry]:
        return iter([entry for entry, _ in self._held.values()])

    def __len__(self) -> int:
        return len(self._held)

    def check(self, model: str, num_choices: int, num_tokens: int) -> None:
        """Raises a 503 if so many more choices and prompt tokens exceed the bounds."""
        if self._num_choices + num_choices > MAX_HELD or self._num_tokens + num_tokens > MAX_HELD_TOKENS:
            raise not_ready(f"the model `{model}`")

    def put(self, entry: OpenEntry, now: float) -> None:
        self._held[entry.request_id] = entry, now + self.hold_s
        self._count(entry, 1)

    def drop(self, entry: OpenEntry) -> None:
        """Removes a request that was sent or has ended."""
        if self._held.pop(entry.request_id, None) is not None:
            self._count(entry, -1)

    def overdue(self, now: float) -> list[tuple[OpenEntry, RequestError]]:
        """Returns requests that were held for too long, each with its error."""
        due = [entry for entry, until in self._held.values() if until <= now]
        return [(entry, not_ready(f"the model `{entry.model}`")) for entry in due]

    def _count(self, entry: OpenEntry, sign: int) -> None:
        num_choices, num_tokens = entry.num_held
        self._num_choices += sign * num_choices
        self._num_tokens += sign * num_tokens
