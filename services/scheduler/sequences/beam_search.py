"""The algorithm of beam search, given the log-probabilities of each step.

As in transformers' `generate(num_beams=...)`: a step ranks the continuations of all hypotheses by the sum of their
log-probabilities. Continuations that end and are among the best `width` are finished; the best `width` of the others
continue. The score of a finished one is its sum divided by its length (output tokens with the last one) to the power
of the length penalty.

With `BeamStop.VLLM` as in vLLM: a step looks at the likeliest 2 * `width` tokens of each hypothesis, every
continuation among them that ends is finished, and the length is that of prompt and output without the end token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from blockyard.shared.messages import Beam, BeamStop, FinishReason, Sampling, TokenLogprobs


@dataclass(slots=True)
class Hypothesis:
    """Output tokens with the sum of their log-probabilities, and the likeliest next tokens once they are computed."""

    outputs: "array[int]"
    total: float = 0.0
    entries: list[TokenLogprobs] = field(default_factory=list)  # one for each token, if requested
    top: TokenLogprobs | None = None  # the likeliest next tokens

    def extended(self, entry: TokenLogprobs, keep: bool) -> "Hypothesis":
        entries = [*self.entries, entry] if keep else []
        return Hypothesis(self.outputs + array("I", [entry.token_id]), self.total + entry.logprob, entries)


@dataclass(slots=True)
class Finished:
    score: float
    hypothesis: Hypothesis
    finish: FinishReason
    stop_token: int | None  # None for end-of-sequence


class BeamSearch:
    def __init__(self, beam: Beam, sampling: Sampling, num_prompt_tokens: int = 0) -> None:
        self.width = beam.width
        self.finished: list[Finished] = []  # the best first, `width` at most
        self._beam, self._max_tokens, self._num_logprobs = beam, sampling.max_tokens, sampling.num_logprobs
        self._is_vllms = beam.stop is BeamStop.VLLM
        self._num_prompt_tokens = num_prompt_tokens if self._is_vllms else 0  # that count in a length
        self._stops, self._ignores_eos = set(sampling.stop_token_ids), sampling.ignore_eos

    def num_candidates(self, eos: Sequence[int]) -> int:
        """How many of the likeliest tokens of each hypothesis a step needs."""
        return 2 * self.width if self._is_vllms else self.width + len(self._ends(eos))

    def shorten(self, max_tokens: int) -> None:
        """Lowers `max_tokens` to what the model's length leaves."""
        self._max_tokens = min(self._max_tokens, max_tokens)

    def step(self, live: Sequence[Hypothesis], eos: Sequence[int]) -> list[tuple[int, Hypothesis]]:
        """The next live hypotheses, each with the index of the one it extends; empty once the search is over.

        The live ones are equally long, and what follows each is known.
        """
        tops, ends = [h.top for h in live if h.top is not None], self._ends(eos)
        num_candidates = self.num_candidates(eos)
        ranked = sorted(
            (-(h.total + logprob), place, rank)
            for place, (h, top) in enumerate(zip(live, tops, strict=True))
            for rank, logprob in enumerate(top.top_logprobs[:num_candidates])
        )
        length = len(live[0].outputs) + 1
        goes_on: list[tuple[int, Hypothesis]] = []
        for order, (_, place, rank) in enumerate(ranked):
            token = tops[place].top_ids[rank]
            is_last = token in ends or length >= self._max_tokens
            if (order >= self.width and not self._is_vllms) if is_last else len(goes_on) == self.width:
                continue
            hypothesis = live[place].extended(self._entry(tops[place], rank), self._num_logprobs is not None)
            if is_last:
                self._finish(hypothesis, token in ends, length)
            else:
                goes_on.append((place, hypothesis))
        if not goes_on or self._is_over(max(h.total for _, h in goes_on), length):
            return []
        return goes_on

    def _ends(self, eos: Sequence[int]) -> set[int]:
        """Ids that end a hypothesis."""
        return self._stops if self._ignores_eos else self._stops.union(eos)

    def _finish(self, hypothesis: Hypothesis, is_end: bool, length: int) -> None:
        token = hypothesis.outputs[-1]
        finish = FinishReason.STOP if is_end else FinishReason.LENGTH
        counted = self._num_prompt_tokens + length - (self._is_vllms and is_end)
        score = hypothesis.total / max(counted, 1) ** self._beam.length_penalty
        self.finished.append(Finished(score, hypothesis, finish, token if is_end and token in self._stops else None))
        self.finished.sort(key=lambda f: -f.score)
        del self.finished[self.width :]

    def _is_over(self, best: float, length: int) -> bool:
        """Whether no live hypothesis can still be better. `best` is the highest sum among them."""
        if len(self.finished) < self.width:
            return False
        if self._beam.stop is BeamStop.FIRST:
            return True
        hopes = self._beam.stop in (BeamStop.NEVER, BeamStop.VLLM) and self._beam.length_penalty > 0
        longest = self._num_prompt_tokens + (self._max_tokens if hopes else length)
        return bool(best / longest**self._beam.length_penalty <= self.finished[-1].score)

    def _entry(self, top: TokenLogprobs, rank: int) -> TokenLogprobs:
        """The log-probability entry of a token, as if it had been sampled."""
        shown = self._num_logprobs or 0
        return msgspec.structs.replace(
            top,
            token_id=top.top_ids[rank],
            logprob=top.top_logprobs[rank],
            rank=rank + 1,
            top_ids=top.top_ids[:shown],
            top_logprobs=top.top_logprobs[:shown],
        )
