"""Which of two ways to compute a step is quicker, found out on the steps that are served."""

from dataclasses import dataclass, field

SIZES = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)  # rows; more are computed as before
TRIALS = 4  # of each size; the best counts
MARGIN = 1.2  # plain steps must be quicker by as much: on a busy machine times are rough


@dataclass(slots=True)
class _Times:
    plain_s: list[float] = field(default_factory=list)
    compiled_s: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.plain_s) >= TRIALS


class Trials:
    """Of compiled steps against plain ones, by size."""

    def __init__(self) -> None:
        self._times = {size: _Times() for size in SIZES}

    def is_over(self, rows: int) -> bool:
        return self._of(rows).over

    def add(self, rows: int, plain_s: float, compiled_s: float) -> None:
        times = self._of(rows)
        times.plain_s.append(plain_s)
        times.compiled_s.append(compiled_s)

    def prefers_compiled(self, rows: int) -> bool:
        """True before the trials, too; False for more rows than they reach."""
        if rows > SIZES[-1]:
            return False
        times = self._of(rows)
        return not times.over or min(times.compiled_s) < MARGIN * min(times.plain_s)

    def told(self, rows: int) -> str:
        """What came of them."""
        times = self._of(rows)
        size = next(size for size in SIZES if size >= rows)
        return f"up to {size} rows in {1e3 * min(times.compiled_s):.2f} ms, plain {1e3 * min(times.plain_s):.2f} ms"

    def _of(self, rows: int) -> _Times:
        return self._times[next(size for size in SIZES if size >= rows)]
