"""A clock for time limits on others, which leaves out the time in which this process itself stood still."""

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds of a monotonic clock. A pause between two calls counts as `longest_s` at most.

    A process that was stopped, or that got no CPU time, has heard nothing meanwhile, so that silence proves nothing.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._clock = longest_s, clock
        self._read = self._now = clock()

    def now(self) -> float:
        """To be called more often than every `longest_s`."""
        read = self._clock()
        self._now += min(read - self._read, self._longest_s)
        self._read = read
        return self._now
