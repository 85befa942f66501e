"""How long a worker's steps take, learned from those that it has answered.

A step takes so long for itself, so long for each decode, and so long for each token of a prompt. The three are fitted
to the steps seen, of which older ones count less (least squares with a half-life, and a little weight on what was
believed before, so that what the steps do not tell apart stays where it was). The context that decodes read and the
pairs of a long prompt are not among them: they change slowly, and the fit goes with them.
"""

from typing import NamedTuple

FADE = 0.5 ** (1 / 32)  # of a step's weight, with each later one
DECODES, TOKENS = 64.0, 512.0  # that count as one, so that all three weigh alike
MOST_TOKENS = 1 << 30
PRIOR = 0.02  # the weight of what was believed, in steps


class StepLoad(NamedTuple):
    """What a plan asks of its worker."""

    decodes: int  # choices that get one more token
    tokens: int  # of prompts


class StepTimes:
    def __init__(self, step_s: float) -> None:
        """`step_s`: of a step with one decode, 0 if that is not known."""
        self.num_steps = 0
        self._base, self._decode, self._token = step_s, 0.0, 0.0  # seconds, the latter of so many
        self._off_s = 0.0  # what the last ones were off by
        self._sums = (0.0,) * 9  # of steps with d decodes, t tokens and y seconds: 1, d, t, dd, dt, tt, y, dy, ty

    @property
    def is_known(self) -> bool:
        return self.num_steps > 0 or self._base > 0

    def expected_s(self, load: StepLoad) -> float:
        """Seconds of a step."""
        return self._base + self._decode * load.decodes / DECODES + self._token * load.tokens / TOKENS

    def tokens_within(self, seconds: float) -> int:
        """Of prompts, that make a step so much longer; more than any step has if that is not known."""
        return int(seconds * TOKENS / self._token) if self._token * MOST_TOKENS > seconds * TOKENS else MOST_TOKENS

    def lower_bound(self, load: StepLoad) -> float:
        """Seconds that a step will hardly fall short of."""
        expected = self.expected_s(load)
        return max(expected - 2 * self._off_s, expected / 2)

    def record(self, load: StepLoad, step_s: float) -> None:
        if step_s <= 0:
            return  # the worker does not say
        off_s = abs(step_s - self.expected_s(load))
        self._off_s += (min(off_s, step_s) - self._off_s) / 16 if self.num_steps else 0.0
        self.num_steps += 1
        d, t = load.decodes / DECODES, load.tokens / TOKENS
        n, sd, st, sdd, sdt, stt, sy, sdy, sty = self._sums
        self._sums = (
            n * FADE + 1.0,
            sd * FADE + d,
            st * FADE + t,
            sdd * FADE + d * d,
            sdt * FADE + d * t,
            stt * FADE + t * t,
            sy * FADE + step_s,
            sdy * FADE + d * step_s,
            sty * FADE + t * step_s,
        )
        self._fit()

    def _fit(self) -> None:
        """Solves the normal equations by elimination; none of the three is below 0."""
        n, d, t, dd, dt, tt, y, dy, ty = self._sums
        n, dd, tt = n + PRIOR, dd + PRIOR, tt + PRIOR
        y, dy, ty = y + PRIOR * self._base, dy + PRIOR * self._decode, ty + PRIOR * self._token
        a, b = d / n, t / n
        dd, dt, dy = dd - a * d, dt - a * t, dy - a * y
        tt, ty = tt - b * t, ty - b * y
        c = dt / dd
        token = (ty - c * dy) / (tt - c * dt)
        token = token if token > 0.0 else 0.0
        decode = (dy - dt * token) / dd
        decode = decode if decode > 0.0 else 0.0
        base = (y - d * decode - t * token) / n
        self._base, self._decode, self._token = base if base > 0.0 else 0.0, decode, token
