"""Measures linear layers while the worker has nothing else to do, some milliseconds at a time."""

from collections.abc import Iterator
from typing import Protocol

WAIT_S = 0.02  # for compilers; requests wait as long at most


class Compiling(Protocol):
    """As `KernelCompiler`."""

    def wait(self, timeout_s: float | None = None) -> bool: ...
    def close(self) -> None: ...


class Tuning(Protocol):
    """As `Tuner`, once it has begun."""

    missing: list[int]

    def pieces(self) -> Iterator[int | None]: ...
    def describe(self) -> str: ...


class IdleTuning:
    """The tuner's pieces, as soon as the kernels that it compares are compiled."""

    def __init__(self, tuner: Tuning, compiler: Compiling) -> None:
        self._tuner, self._compiler = tuner, compiler
        self._pieces, self._num_sizes, self._is_over = tuner.pieces(), len(tuner.missing), not tuner.missing
        if self._is_over:
            compiler.close()

    @property
    def done(self) -> float:
        """The part of the sizes that is measured; 1.0: no piece is left."""
        return 1.0 if self._is_over else 1.0 - (len(self._tuner.missing) + 1) / (self._num_sizes + 1)

    def step(self) -> int | None:
        """Measures a piece. Returns a number of rows if that was the last piece of theirs: what computes them has
        changed."""
        if self._is_over or not self._compiler.wait(WAIT_S):
            return None
        try:
            return next(self._pieces)
        except StopIteration:
            self._is_over = True
            self._compiler.close()
            return None

    def describe(self) -> str:
        return self._tuner.describe()
