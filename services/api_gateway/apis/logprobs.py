"""Log-probabilities as JSON: OpenAI's formats for chat and completions, and vLLM's for the prompt's."""

import msgspec

from blockyard.services.api_gateway.apis.text_offsets import TextOffsets
from blockyard.shared.messages import TextLogprobs

FLOOR = -9999.0  # shown for minus infinity, which JSON does not have


class TopToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


def show(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def floored(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def chat_logprobs(tokens: list[TextLogprobs], num_top: int) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentToken(
                show(t.token),
                floored(t.logprob),
                list(t.token),
                [
                    TopToken(show(token), floored(logprob), list(token))
                    for token, logprob in zip(t.top_tokens[:num_top], t.top_logprobs, strict=False)
                ],
            )
            for t in tokens
        ]
    )


def completion_logprobs(
    tokens: list[TextLogprobs], num_top: int, offsets: TextOffsets, text: str, first_token: str | None = None
) -> CompletionLogprobs:
    """`text` came with the tokens; `first_token` is a prompt token without a log-probability, before the others."""
    first = [] if first_token is None else [first_token]
    out = CompletionLogprobs(
        offsets.take([one.encode() for one in first] + [t.token for t in tokens], text),
        [None] * len(first),
        [*first],
        [None] * len(first),
    )
    for t in tokens:
        shown = show(t.token)
        top = {shown: floored(t.logprob)}  # the sampled token comes first
        for candidate, logprob in zip(t.top_tokens[:num_top], t.top_logprobs, strict=False):
            top.setdefault(show(candidate), floored(logprob))
        out.token_logprobs.append(floored(t.logprob))
        out.tokens.append(shown)
        out.top_logprobs.append(top)
    return out


def prompt_logprobs(tokens: list[TextLogprobs], num_top: int) -> list[dict[int, PromptToken] | None]:
    """One entry per prompt token: the token itself and its top candidates. The first token's entry is None."""
    out: list[dict[int, PromptToken] | None] = [None]
    for t in tokens:
        entry = {t.token_id: PromptToken(floored(t.logprob), t.rank, show(t.token))}
        candidates = zip(t.top_ids[:num_top], t.top_tokens, t.top_logprobs, strict=False)
        for rank, (token_id, token, logprob) in enumerate(candidates, start=1):
            entry.setdefault(token_id, PromptToken(floored(logprob), rank, show(token)))
        out.append(entry)
    return out
