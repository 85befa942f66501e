"""The progress bar of `bench serve`."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blockyard.services.bench.load.client import Course


class Bar:
    """A `watch.Display`. It draws only when it is told to: a thread of its own would hold up what is timed."""

    def __init__(self, num: int, console: Console | None = None) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console or Console(file=sys.stderr),
            auto_refresh=False,
        )
        self._task = self._bars.add_task("Requests", total=num, state="")
        self._bars.start()

    def show(self, course: Course) -> None:
        failed = f", [red]{course.num_refused} failed" if course.num_refused else ""
        self._bars.update(self._task, completed=course.num_ended, state=f"{course.num_running} running{failed}")
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop()
