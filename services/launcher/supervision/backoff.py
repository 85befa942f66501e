"""How long to wait before a child that died is started again."""

FIRST_S = 0.2
MOST_S = 10.0
HEALTHY_S = 30.0


class BackOff:
    """0.2 s after the first death, doubling up to 10 s; a child that ran for 30 s begins anew."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def delay_s(self, ran_s: float) -> float:
        """To be called once a death, with the time the child had run."""
        if ran_s >= HEALTHY_S:
            self._next_s = FIRST_S
        delay = self._next_s
        self._next_s = min(2 * delay, MOST_S)
        return delay
