"""Progress bars of `generate`: our own, and one that the caller provides."""

import concurrent.futures
import sys
import time
from collections.abc import Callable
from typing import Any

from blockyard.services.offline.batch import BatchProgress
from blockyard.shared.errors import RequestError
from blockyard.shared.progress_bars import make_progress

REFRESH_S = 0.1  # of the progress bar
UseTqdm = bool | Callable[..., Any]  # whether to show a progress bar, or a factory of bars such as `tqdm`


def check_bar(show_bar: UseTqdm) -> None:
    """Raises RequestError."""
    if not isinstance(show_bar, bool) and not callable(show_bar):
        raise RequestError(f"use_tqdm must be a bool or a factory of progress bars, got {show_bar!r}", "use_tqdm")


def wait(
    progress: BatchProgress,
    future: "concurrent.futures.Future[None]",
    num_prompts: int,
    show_bar: UseTqdm,
    what: str = "Generating",
) -> None:
    """Waits until a batch is done, showing its progress. Raises what the future does."""
    if not show_bar or not num_prompts:
        future.result()
        return
    with TqdmProgressBar(show_bar, num_prompts) if callable(show_bar) else RichProgressBar(num_prompts, what) as bar:
        bar.show(progress)
        while concurrent.futures.wait([future], REFRESH_S).not_done:
            bar.show(progress)
        bar.show(progress)
    future.result()


class RichProgressBar:
    """Shows finished prompts and tokens/s. A context manager; `show` updates it."""

    def __init__(self, num_prompts: int, what: str = "Generating") -> None:
        """`what` is done behind tokenizing."""
        self._what = what
        self._progress = make_progress(sys.stderr, "{task.fields[speed]}", bar_width=20)
        self._num_prompts = num_prompts
        self._task = self._progress.add_task("Tokenizing", total=num_prompts, speed="")
        self._generating = False

    def __enter__(self) -> "RichProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def show(self, progress: BatchProgress) -> None:
        if progress.began_s is None:
            self._progress.update(self._task, completed=progress.num_tokenized)
            return
        if not self._generating:
            self._generating = True
            self._progress.reset(self._task, description=self._what)
        done = progress.num_finished == self._num_prompts
        took_s = max((progress.last_finish_s if done else time.monotonic()) - progress.began_s, 1e-3)
        speed = (
            f"{progress.num_prompt_tokens / took_s:,.0f} tok/s in, {progress.num_output_tokens / took_s:,.0f} tok/s out"
        )
        self._progress.update(self._task, completed=progress.num_finished, speed=speed)


class TqdmProgressBar:
    """Shows progress on a bar of `make`, which is called as vLLM calls it. A context manager; `show` updates it."""

    def __init__(self, make: Callable[..., Any], num_prompts: int) -> None:
        self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0.0, 0.0))
        self._shown = 0

    def __enter__(self) -> "TqdmProgressBar":
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def show(self, progress: BatchProgress) -> None:
        finished = progress.num_finished
        if progress.began_s is None or finished == self._shown:
            return
        took_s = max(time.monotonic() - progress.began_s, 1e-3)
        self._bar.postfix = _speed(progress.num_prompt_tokens / took_s, progress.num_output_tokens / took_s)
        self._bar.update(finished - self._shown)
        self._shown = finished


def _speed(tokens_in: float, tokens_out: float) -> str:
    return f"est. speed input: {tokens_in:.2f} toks/s, output: {tokens_out:.2f} toks/s"
