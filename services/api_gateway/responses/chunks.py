"""The bytes of streamed events: what is the same in every event of a stream is encoded once, when it opens."""

from dataclasses import dataclass

import msgspec

from blockyard.shared.messages import FinishReason

encode = msgspec.json.Encoder().encode

NULL = b"null"
REASONS = {FinishReason.STOP: b'"stop"', FinishReason.LENGTH: b'"length"', None: NULL}


@dataclass(frozen=True, slots=True)
class Shape:
    """How one HTTP answer looks."""

    chat: bool
    answer_id: str
    created: int
    model: str
    role: str = "assistant"
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    num_top: int = 0  # candidates shown a token
    prompt_logprobs: int | None = None  # candidates shown for each token of the prompt; None: nothing
    echo: bool = False
    token_ids: bool = False
    stamps: bool = False
    no_output: bool = False  # max_tokens 0: what is generated to get at the prompt's log-probabilities is left out
    prompt_tokens_details: bool = False


def head(shape: Shape, index: int) -> bytes:
    """An event of choice `index` up to its text."""
    kind = "chat.completion.chunk" if shape.chat else "text_completion"
    meta = encode({"id": shape.answer_id, "object": kind, "created": shape.created, "model": shape.model})
    text = b'"delta":{"content":' if shape.chat else b'"text":'
    return b'data: %b,"choices":[{"index":%d,%b' % (meta[:-1], index, text)


def tail(
    shape: Shape,
    *,
    logprobs: bytes = NULL,
    finish: FinishReason | None = None,
    stop_reason: int | str | None = None,
    token_ids: list[int] | None = None,
    prompt_token_ids: list[int] | None = None,
    usage: bytes = NULL,
) -> bytes:
    """An event from its text on, up to where a stamp may stand; `close` ends it."""
    parts = [b"}" if shape.chat else b"", b',"logprobs":', logprobs, b',"finish_reason":', REASONS[finish]]
    parts += [b',"stop_reason":', encode(stop_reason), b',"token_ids":', encode(token_ids)]
    of_prompt = b',"prompt_token_ids":' + encode(prompt_token_ids)
    parts += [b"}]", of_prompt] if shape.chat else [of_prompt, b"}]"]  # of the answer, or of the choice, as in vLLM
    if shape.include_usage or shape.continuous_usage:
        parts += [b',"usage":', usage]
    return b"".join(parts)


def close(stamp_s: float | None) -> bytes:
    return b"}\n\n" if stamp_s is None else b',"stamp":%b}\n\n' % encode(stamp_s)


def role_event(shape: Shape, index: int, prompt_token_ids: list[int] | None, usage: bytes) -> bytes:
    """The first event of a chat choice."""
    start = head(shape, index).removesuffix(b'"content":')
    role = b'"role":%b,"content":""' % encode(shape.role)
    return start + role + tail(shape, prompt_token_ids=prompt_token_ids, usage=usage) + close(None)


def usage_event(shape: Shape, usage: bytes) -> bytes:
    """The last event before [DONE], with `stream_options.include_usage`."""
    kind = "chat.completion.chunk" if shape.chat else "text_completion"
    meta = encode({"id": shape.answer_id, "object": kind, "created": shape.created, "model": shape.model})
    of_prompt = b',"prompt_token_ids":null' if shape.chat else b""
    return b'data: %b,"choices":[]%b,"usage":%b}\n\n' % (meta[:-1], of_prompt, usage)
