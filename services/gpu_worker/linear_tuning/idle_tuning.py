"""Runs the autotuning of linear layers while the worker is idle, a few milliseconds at a time."""

from collections.abc import Iterator, Sequence
from typing import Protocol

WAIT_S = 0.02  # for compile processes, per step; a new request is delayed by at most this time


class Compiling(Protocol):
    """The methods of `KernelCompiler` that `IdleTuning` calls."""

    def wait(self, timeout_s: float | None = None) -> bool: ...
    def close(self) -> None: ...


class Tuning(Protocol):
    """The members of `Tuner` that `IdleTuning` uses, after `Tuner.begin`."""

    missing: list[int]

    def pieces(self) -> Iterator[int | None]: ...
    def installed(self, sizes: Sequence[int] | None = None) -> bytes: ...
    def describe(self) -> str: ...


class IdleTuning:
    """Runs the pieces of a tuner one by one, once its candidate kernels are compiled."""

    def __init__(self, tuner: Tuning, compiler: Compiling) -> None:
        self._tuner, self._compiler = tuner, compiler
        self._pieces, self._num_sizes, self._is_over = tuner.pieces(), len(tuner.missing), not tuner.missing
        if self._is_over:
            compiler.close()

    @property
    def done(self) -> float:
        """The fraction of sizes that are measured. 1.0: no piece is left."""
        return 1.0 if self._is_over else 1.0 - (len(self._tuner.missing) + 1) / (self._num_sizes + 1)

    def step(self) -> int | None:
        """Runs one piece. Returns a number of rows if the piece installed new kernels for it: a CUDA graph of this
        size must be captured again. Returns None otherwise."""
        if self._is_over or not self._compiler.wait(WAIT_S):
            return None
        try:
            return next(self._pieces)
        except StopIteration:
            self._is_over = True
            self._compiler.close()
            return None

    def installed(self, rows: int) -> bytes:
        """Returns the kernels for a number of rows: see `Tuner.installed`."""
        return self._tuner.installed([rows])

    def describe(self) -> str:
        return self._tuner.describe()
