"""The start-up report on a terminal: a bar for each service."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartupProgressBars:
    """A `start_up.StartupDisplay`. After `close` the bars stay as they are and lines follow below."""

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        width = max((len(name) for name in names), default=0)
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<" + str(width) + "}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[phase]}"),
            console=console,
            refresh_per_second=5,  # the cores are for those who start
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(name, total=None, phase="starting") for name in names
        }
        self._bars.start()

    def phase(self, name: str, phase: str, progress: float) -> None:
        """A phase without progress pulses."""
        self._bars.update(self._tasks[name], total=1.0 if progress > 0 else None, completed=progress, phase=phase)

    def ready(self, name: str, seconds: float) -> None:
        self._bars.update(self._tasks[name], total=1.0, completed=1.0, phase=f"ready after {seconds:.1f} s")

    def say(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        self._bars.stop()


def startup_progress_bars(out: TextIO, names: Sequence[str]) -> StartupProgressBars:
    return StartupProgressBars(names, Console(file=out))
