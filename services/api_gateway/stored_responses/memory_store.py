"""Responses in memory, within bounds on number, bytes and time."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from blockyard.services.api_gateway.stored_responses.response_store import StoreLimits, num_bytes
from blockyard.shared.messages import StoredResponse


@dataclass(slots=True)
class _Kept:
    response: StoredResponse
    events: bytes
    size: int
    used_s: float


class MemoryStore:
    """The dict's order is that of the last use, so what expires first stands first."""

    is_shared = False

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: StoredResponse, events: bytes = b"") -> None:
        self.delete(response.response_id)
        size = num_bytes(response, events)
        self._kept[response.response_id] = _Kept(response, events, size, self._clock())
        self.num_bytes += size
        if len(self._kept) > self._limits.max_responses or self.num_bytes > self._limits.max_bytes:
            self._shrink()

    def get(self, response_id: str) -> StoredResponse | None:
        kept = self._kept.get(response_id)
        if kept is None:
            return None
        now = self._clock()
        if kept.response.ended and now - kept.used_s > self._limits.ttl_s:
            self.delete(response_id)
            return None
        kept.used_s = now
        self._kept.move_to_end(response_id)
        return kept.response

    def events(self, response_id: str) -> bytes:
        kept = self._kept.get(response_id)
        return b"" if kept is None else kept.events

    def delete(self, response_id: str) -> None:
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self.num_bytes -= kept.size

    def sweep(self) -> None:
        until = self._clock() - self._limits.ttl_s
        expired = []
        for response_id, kept in self._kept.items():
            if kept.used_s >= until:
                break
            if kept.response.ended:
                expired.append(response_id)
        for response_id in expired:
            self.delete(response_id)

    def close(self) -> None:
        self._kept.clear()
        self.num_bytes = 0

    def _shrink(self) -> None:
        num, size, dropped = len(self._kept), self.num_bytes, []
        for response_id, kept in self._kept.items():
            if num <= self._limits.max_responses and size <= self._limits.max_bytes:
                break
            if kept.response.ended:
                dropped.append(response_id)
                num, size = num - 1, size - kept.size
        for response_id in dropped:
            self.delete(response_id)
