"""The progress bar of `bench serve`."""

import sys

from rich.console import Console
from rich.progress import BarColumn, ClientProgress, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from blockyard.services.bench.load.client import LoadRun


class LoadProgressBar:
    """A `watch.LoadDisplay`. It draws only when it is told to: a thread of its own would hold up what is timed."""

    def __init__(self, num: int, console: Console | None = None) -> None:
        self._bars = ClientProgress(
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

    def show(self, load: LoadRun) -> None:
        failed = f", [red]{load.num_refused} failed" if load.num_refused else ""
        self._bars.update(self._task, completed=load.num_ended, state=f"{load.num_running} running{failed}")
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop()
