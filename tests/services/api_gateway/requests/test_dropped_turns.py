"""Conversations that are shortened keep their system prompt, whole calls, and a message of the user in front."""

from typing import Any

import msgspec

from blockyard.services.api_gateway.requests.dropped_turns import MAX_BYTES, TOO_LONG, Conversation, longest_fitting
from blockyard.shared.errors import RequestError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "tool_calls": []},
    {"role": "tool", "content": "e"},
    {"role": "tool", "content": "f"},
    {"role": "assistant", "content": "g"},
]


def test_what_is_left() -> None:
    conversation = Conversation(msgspec.json.encode(MESSAGES))
    left = [msgspec.json.decode(conversation.without(count)) for count in range(conversation.most_dropped + 1)]
    texts = ["".join(message["content"] for message in messages) for messages in left]
    assert texts == ["sabcdefg", "sabcdefg", "scdefg", "scdefg", "scg"]


def test_a_conversation_of_one_message_cannot_be_shorter() -> None:
    for messages in (MESSAGES[:1], MESSAGES[:2], MESSAGES[1:2], []):
        assert Conversation(msgspec.json.encode(messages)).most_dropped == 0


async def test_a_very_long_conversation_is_not_shortened() -> None:
    async def fits(messages: bytes, count: int) -> int:
        return count

    async def fits_shorter(messages: bytes, count: int) -> int:
        if count == 0:
            raise RequestError("too long", "messages", code=TOO_LONG)
        return count

    assert await longest_fitting(msgspec.json.encode(MESSAGES), fits) == 0
    assert await longest_fitting(msgspec.json.encode(MESSAGES), fits_shorter) == 1
    long = [MESSAGES[0], *({"role": "user", "content": "x" * 1000} for _ in range(MAX_BYTES // 1000))]
    assert await longest_fitting(msgspec.json.encode(long), fits) == 0
    assert await longest_fitting(msgspec.json.encode(long), fits_shorter) is None
