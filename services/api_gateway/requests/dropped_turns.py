"""A conversation without its oldest turns, for requests that prefer losing turns to an error."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from blockyard.shared.errors import RequestError

TOO_LONG = "context_length_exceeded"
MAX_BYTES = 4 << 20  # of messages to shorten: each attempt encodes them again in the loop that serves streams
T = TypeVar("T")


class Conversation:
    """Messages in units that can be dropped: a message with the results of its calls.

    System messages at the beginning stay, and the last unit. If the first unit that is left is not the user's, the
    user's last message before it stays too, because chat templates begin with one.
    """

    def __init__(self, messages: bytes) -> None:
        """`messages` as `Tokenize` has them."""
        decoded: list[dict[str, Any]] = msgspec.json.decode(messages)
        head = 0
        while head < len(decoded) and decoded[head]["role"] == "system":
            head += 1
        self._head, self._units = decoded[:head], list[list[dict[str, Any]]]()
        for message in decoded[head:]:
            if message["role"] == "tool" and self._units:
                self._units[-1].append(message)
            else:
                self._units.append([message])

    @property
    def most_dropped(self) -> int:
        """How many units can be dropped."""
        return max(0, len(self._units) - 1)

    def without(self, count: int) -> bytes:
        """The messages without the oldest units."""
        kept = [message for unit in self._units[count:] for message in unit]
        if kept and kept[0]["role"] != "user":
            asked = [unit[0] for unit in self._units[:count] if unit[0]["role"] == "user"]
            kept = asked[-1:] + kept
        return msgspec.json.encode(self._head + kept)


async def longest_fitting(messages: bytes, tokenize: Callable[[bytes, int], Awaitable[T]]) -> T | None:
    """Returns the result of `tokenize` for all messages, or without as few of the oldest units as it takes to fit.

    `tokenize` takes messages and the number of dropped units, and raises RequestError for a prompt that is too long.
    None if the last unit alone does not fit, or the messages have more than `MAX_BYTES`. Raises its other errors.
    """
    try:
        return await tokenize(messages, 0)
    except RequestError as e:
        if e.code != TOO_LONG:
            raise
    if len(messages) > MAX_BYTES:
        return None
    conversation = Conversation(messages)
    found, low, high = None, 1, conversation.most_dropped
    while low <= high:
        count = (low + high) // 2
        try:
            found, high = await tokenize(conversation.without(count), count), count - 1
        except RequestError as e:
            if e.code != TOO_LONG:
                raise
            low = count + 1
    return found
