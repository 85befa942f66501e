"""Compares token sequences that may differ where two tokens score the same up to rounding.

Rounding depends on how many rows a step has and how its KV was chunked, so two right runs can part at a tie. At the
first difference a float64 reference scores the two tokens: within the dtype's rounding of each other the stream is
compared no further and counted; else the comparison fails. The count is bounded and printed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 8e-3}  # of the largest score, through a model
TOKENS_PER_TIE = 100_000

Score = Callable[[list[int]], Tensor]  # ids so far -> float64 scores of the next token, noise included


class Ties:
    """One comparison: of a test, or of a whole session."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._rounding = ROUNDING[dtype]
        self.tokens = 0
        self.ties: list[str] = []

    def compare(self, name: str, prompt: list[int], expected: list[int], got: list[int], score: Score) -> None:
        """Raises AssertionError at a difference that rounding does not explain."""
        for i, (a, b) in enumerate(zip(expected, got, strict=False)):
            if a != b:
                self._judge(name, prompt + expected[:i], a, b, score)
                return
            self.tokens += 1
        assert len(expected) == len(got), f"{name}: {len(got)} tokens instead of {len(expected)}"

    def check(self) -> str:
        """Call at the end: the bound, and a line to print."""
        allowed = 1 + self.tokens // TOKENS_PER_TIE  # one is within the bound's own chance at any length
        line = f"{len(self.ties)} ties in {self.tokens} equal tokens"
        assert len(self.ties) <= allowed, f"{line}, at most {allowed} may be: {self.ties}"
        return line

    def _judge(self, name: str, ids: list[int], expected: int, got: int, score: Score) -> None:
        scores = score(ids)
        assert scores.dtype == torch.float64
        bound = self._rounding * float(scores[torch.isfinite(scores)].abs().max())
        gap = float((scores[expected] - scores[got]).abs())
        best = float(scores.max() - torch.minimum(scores[expected], scores[got]))
        assert max(gap, best) <= bound, (
            f"{name}: token {len(ids)} is {got} instead of {expected}; their scores differ by {gap:.3g},"
            f" the best by {best:.3g}, rounding explains {bound:.3g}"
        )
        self.ties.append(f"{name} at {len(ids)}")
