"""What arrived for a prompt, as the output its caller gets."""

from typing import Protocol

from blockyard.services.launcher.offline.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs
from blockyard.shared.ring_client.choices import best
from blockyard.shared.ring_client.journal import ChoiceLog, Entry
from blockyard.shared.token_ids import unpack

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class TokenCount(Protocol):
    num_output_tokens: int


class Collected:
    """A journal sink."""

    __slots__ = ("_count", "_detokenize", "finish", "logprobs", "stop_reason", "text")

    def __init__(self, count: TokenCount, detokenize: bool) -> None:
        self._count, self._detokenize = count, detokenize
        self.text: list[str] = []
        self.logprobs: list[TextLogprobs] = []
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        self._count.num_output_tokens += len(delta.token_ids)
        if self._detokenize:
            self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


def request_output(entry: Entry, prompt: str | None, count: int, num_logprobs: int | None) -> RequestOutput:
    """The best `count` of an entry whose choices have all ended and whose sinks are Collected."""
    pairs = [(choice, choice.sink) for choice in entry.choices if isinstance(choice.sink, Collected)]
    chosen = best(pairs, [sink.logprobs for _, sink in pairs], count)
    num_prompt_logprobs = entry.sampling.num_prompt_logprobs
    of_prompt: list[PositionLogprobs | None] | None = None
    if num_prompt_logprobs is not None:
        of_prompt = [None, *(_position(t, num_prompt_logprobs) for t in entry.prompt_logprobs)]
    return RequestOutput(
        request_id=entry.request_id,
        prompt=prompt,
        prompt_token_ids=unpack(entry.prompt_ids),
        outputs=[_completion(i, choice, sink, num_logprobs) for i, (choice, sink) in enumerate(chosen)],
        prompt_logprobs=of_prompt,
        num_cached_tokens=entry.cached_tokens,
        finished=True,
    )


def _completion(index: int, choice: ChoiceLog, sink: Collected, num_logprobs: int | None) -> CompletionOutput:
    asked = num_logprobs is not None
    return CompletionOutput(
        index=index,
        text="".join(sink.text),
        token_ids=choice.output_ids.tolist(),
        cumulative_logprob=sum(t.logprob for t in sink.logprobs) if asked else None,
        logprobs=[_position(t, num_logprobs) for t in sink.logprobs] if num_logprobs is not None else None,
        finish_reason=REASONS.get(sink.finish) if sink.finish is not None else None,
        stop_reason=sink.stop_reason,
    )


def _position(token: TextLogprobs, num_top: int) -> PositionLogprobs:
    """The token itself, then the likeliest candidates."""
    out = {token.token_id: Logprob(token.logprob, token.rank, _show(token.token))}
    candidates = zip(token.top_ids[:num_top], token.top_tokens, token.top_logprobs, strict=False)
    for rank, (token_id, text, logprob) in enumerate(candidates, start=1):
        out.setdefault(token_id, Logprob(logprob, rank, _show(text)))
    return out


def _show(token: bytes) -> str:
    return token.decode("utf-8", "replace")
