"""The report of a worker's start: phases, progress and notes."""

from collections.abc import Callable

from blockyard.services.gpu_worker.interfaces import Report


class StartReport:
    """Reports the phases of a start, each with all notes so far."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._notes: list[str] = []

    def phase(self, name: str, progress: float = 0.0, *more_notes: str) -> None:
        """progress: fraction of the phase. more_notes: for this phase alone."""
        self._report(name, progress, [*self._notes, *more_notes])

    def note(self, *notes: str) -> None:
        """Adds lines to the following reports."""
        self._notes.extend(notes)


class Throttle:
    """Passes a fraction on only if it has grown by 0.01, because there are thousands of weights."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress, self._last = progress, -1.0

    def __call__(self, fraction: float) -> None:
        if fraction - self._last >= 0.01:
            self._last = fraction
            self._progress(fraction)
