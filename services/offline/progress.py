"""The progress bar of `generate`: prompts done and tokens a second."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from blockyard.services.offline.batch import BatchProgress


class RichProgressBar:
    """A context; `show` brings it up to date."""

    def __init__(self, num_prompts: int) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(file=sys.stderr),
        )
        self._num_prompts = num_prompts
        self._task = self._bars.add_task("Tokenizing", total=num_prompts, speed="")
        self._generating = False

    def __enter__(self) -> "RichProgressBar":
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def show(self, progress: BatchProgress) -> None:
        if progress.began_s is None:
            self._bars.update(self._task, completed=progress.num_tokenized)
            return
        if not self._generating:
            self._generating = True
            self._bars.reset(self._task, description="Generating")
        done = progress.num_finished == self._num_prompts
        took_s = max((progress.heard_s if done else time.monotonic()) - progress.began_s, 1e-3)
        speed = (
            f"{progress.num_prompt_tokens / took_s:,.0f} tok/s in, {progress.num_output_tokens / took_s:,.0f} tok/s out"
        )
        self._bars.update(self._task, completed=progress.num_finished, speed=speed)
