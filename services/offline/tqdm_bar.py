"""The progress of `generate` on a bar that the caller brings: `use_tqdm=functools.partial(tqdm, ...)`."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from blockyard.services.offline.batch import BatchProgress


class TqdmProgressBar:
    """A context; `show` brings it up to date. The bar is made as vLLM makes it."""

    def __init__(self, make: Callable[..., Any], num_prompts: int) -> None:
        self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0.0, 0.0))
        self._shown = 0

    def __enter__(self) -> "TqdmProgressBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
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
