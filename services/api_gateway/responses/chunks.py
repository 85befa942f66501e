"""The bytes of streamed events, in the dialects of chat and completions.

The parts that are equal in every event of a stream are encoded once, when the stream opens.
"""

import msgspec

from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.shared.messages import FinishReason

encode = msgspec.json.Encoder().encode

NULL = b"null"
REASONS = {FinishReason.STOP: b'"stop"', FinishReason.LENGTH: b'"length"', None: NULL}


def head(options: ResponseOptions, index: int) -> bytes:
    """An event of choice `index` up to its text."""
    text = b'"delta":{"content":' if options.chat else b'"text":'
    return b'data: %b,"choices":[{"index":%d,%b' % (_meta(options), index, text)


def tail(
    options: ResponseOptions,
    *,
    logprobs: bytes = NULL,
    finish: FinishReason | None = None,
    stop_reason: int | str | None = None,
    token_ids: list[int] | None = None,
    prompt_token_ids: list[int] | None = None,
    usage: bytes = NULL,
) -> bytes:
    """An event from the end of its text to the place of the stamp; `close` ends the event."""
    parts = [b"}" if options.chat else b"", b',"logprobs":', logprobs, b',"finish_reason":', REASONS[finish]]
    parts += [b',"stop_reason":', encode(stop_reason), b',"token_ids":', encode(token_ids)]
    of_prompt = b',"prompt_token_ids":' + encode(prompt_token_ids)
    # as in vLLM: a field of the answer in chat, of the choice in completions
    parts += [b"}]", of_prompt] if options.chat else [of_prompt, b"}]"]
    if options.include_usage or options.continuous_usage:
        parts += [b',"usage":', usage]
    return b"".join(parts)


def close(stamp_s: float | None) -> bytes:
    return b"}\n\n" if stamp_s is None else b',"stamp":%b}\n\n' % encode(stamp_s)


def role_event(options: ResponseOptions, index: int, prompt_token_ids: list[int] | None, usage: bytes) -> bytes:
    """The first event of a chat choice."""
    start = head(options, index).removesuffix(b'"content":')
    role = b'"role":%b,"content":""' % encode(options.role)
    return start + role + tail(options, prompt_token_ids=prompt_token_ids, usage=usage) + close(None)


def usage_event(options: ResponseOptions, usage: bytes) -> bytes:
    """The last event before [DONE], with `stream_options.include_usage`."""
    of_prompt = b',"prompt_token_ids":null' if options.chat else b""
    return b'data: %b,"choices":[]%b,"usage":%b}\n\n' % (_meta(options), of_prompt, usage)


def _meta(options: ResponseOptions) -> bytes:
    """The fields of every event, as an object that is still open."""
    kind = "chat.completion.chunk" if options.chat else "text_completion"
    fields = {"id": options.answer_id, "object": kind, "created": options.created, "model": options.model}
    return encode(fields)[:-1]
