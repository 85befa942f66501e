"""When requests run out of time."""

import heapq


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int]] = []

    def add(self, when: float, request_id: str, attempt: int) -> None:
        heapq.heappush(self._heap, (when, request_id, attempt))

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[tuple[str, int]]:
        """Ids and attempts; whoever ended or came again since is among them."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id, attempt = heapq.heappop(self._heap)
            due.append((request_id, attempt))
        return due
