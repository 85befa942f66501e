"""The prompt's part of an answer that echoes it."""

from dataclasses import dataclass

import msgspec

from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    text: str
    first_piece: str  # the first token's text: it has no log-probability
    logprobs: list[TextLogprobs]  # the journal's list, complete once the first token is there


def without_output(delta: TextDelta) -> TextDelta:
    """For max_tokens 0: the one token that was generated for the prompt's sake is not shown."""
    finish = None if delta.finish is None else FinishReason.LENGTH
    return msgspec.structs.replace(delta, token_ids=[], text="", logprobs=[], finish=finish, stop_reason=None)
