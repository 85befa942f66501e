"""How quickly the waiting queue is served: what Retry-After and the longest wait are computed from."""

HALF_LIFE_S = 10.0  # of what was measured
LEAST_S = 0.5  # less than this was measured: nothing is known


class ServiceRate:
    """Tokens that leave the queue for a seat, over the time in which somebody waited. Fades while that goes on."""

    def __init__(self) -> None:
        self._pending = 0  # since the last tick
        self._tokens = self._seconds = 0.0
        self._at: float | None = None  # the last tick, if somebody waited on then

    def served(self, num_tokens: int) -> None:
        self._pending += num_tokens

    def tick(self, now: float, backlog: bool) -> None:
        """After seats were given out. `backlog`: somebody waits on. Who never waited says nothing of the rate."""
        served, self._pending = self._pending, 0
        if self._at is not None:
            fade = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
            self._tokens = self._tokens * fade + served
            self._seconds = self._seconds * fade + now - self._at
        self._at = now if backlog else None

    @property
    def tokens_per_s(self) -> float | None:
        """None if it is not known."""
        return self._tokens / self._seconds if self._seconds >= LEAST_S else None
