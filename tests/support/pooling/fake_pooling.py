"""A ring client's pooling in one process, for tests of the gateway and the offline API.

A token is a byte of UTF-8. `vector_of` is the vector of a text; a score is the share of the first text's words that the
second one has. Half of the tokens of each were cached. It refuses what the real one refuses, with the same fields.
"""

import asyncio
import struct
from collections.abc import Sequence

from blockyard.shared.errors import RequestError, TooLong
from blockyard.shared.messages import ModelCard, PoolingCard, PoolingTask
from blockyard.shared.ring_client.pooling.calls import WHOLE_LENGTH, PooledAnswer, PooledText, PoolingCall, TextPair
from blockyard.shared.ring_client.pooling.text_jobs import field_of
from blockyard.shared.token_ids import pack, unpack

EMBED = PoolingCard(PoolingTask.EMBED, width=4, max_len=64, pooling="MEAN", normalizes=True, dimensions=[2])
SCORE = PoolingCard(PoolingTask.SCORE, width=1, max_len=64, takes_pairs=True, labels=["LABEL_0"])
CLASSIFY = PoolingCard(PoolingTask.CLASSIFY, width=3, max_len=64, labels=["bad", "so-so", "good"])
REWARD = PoolingCard(PoolingTask.REWARD, width=2, max_len=64, of_tokens=True, pooling="ALL")


def vector_of(text: str | bytes, width: int = 4) -> list[float]:
    """Numbers that float32 has exactly."""
    data = text.encode() if isinstance(text, str) else bytes(unpack(text))
    return [sum(data[i::width]) / 64 - 3 for i in range(width)]


def score_of(first: str, second: str) -> float:
    words = first.split()
    return sum(word in second.split() for word in words) / len(words)


class FakePooling:
    """In place of `RingClient.pooling`. Tests read `calls`, and set `error` or clear `answers`."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.calls: list[PoolingCall] = []
        self.error: RequestError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_dropped = self.num_waiting_tokens = 0

    async def pool(self, call: PoolingCall) -> PooledAnswer:
        self.calls.append(call)
        if call.check_room is not None:
            call.check_room()
        num_tokens = sum(len(str(one)) for one in call.inputs)
        self.num_waiting_tokens += num_tokens
        try:
            await asyncio.sleep(0)
            await self.answers.wait()
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise
        finally:
            self.num_waiting_tokens -= num_tokens
        if self.error is not None:
            raise self.error
        assert self.card.pooling is not None
        items = [self._item(call, one, i) for i, one in enumerate(call.inputs)]
        return PooledAnswer(self.card, items)

    def _item(self, call: PoolingCall, given: object, index: int) -> PooledText:
        pooling = self.card.pooling
        assert pooling is not None and isinstance(given, str | bytes | TextPair)
        length = self._length(call, given, index)
        ids = b"" if isinstance(given, TextPair) else given if isinstance(given, bytes) else pack(list(given.encode()))
        if isinstance(given, TextPair):
            return packed([score_of(*given)], 0, length)
        match pooling.task:
            case PoolingTask.EMBED:
                numbers = vector_of(given, pooling.width)[: call.params.dimensions]
            case PoolingTask.CLASSIFY:
                numbers = [0.25, 0.5, 0.25] if call.params.use_activation is not False else [-1.0, 2.0, -1.0]
            case _:
                rows = [[float(i), 1.0] for i in range(length)]
                return packed([n for row in rows for n in row], 2, length, ids)
        return packed(numbers, 0, length, ids)

    def _length(self, call: PoolingCall, given: str | bytes | TextPair, index: int) -> int:
        pooling = self.card.pooling
        assert pooling is not None
        texts = given if isinstance(given, TextPair) else (given,)
        length = sum(len(text) // 4 if isinstance(text, bytes) else len(text.encode()) for text in texts)
        cut = call.truncate_prompt_tokens
        most = pooling.max_len if cut in (None, WHOLE_LENGTH) else min(cut, pooling.max_len)
        if length <= most or cut is not None:
            return min(length, most)
        field = field_of(call, index, isinstance(given, TextPair))
        raise RequestError(
            f"{field} has {length} tokens, at most {most} fit",
            field,
            code="context_length_exceeded",
            too_long=TooLong(length, most),
        )


def packed(numbers: Sequence[float], width: int, num_tokens: int, ids: bytes = b"") -> PooledText:
    return PooledText(struct.pack(f"<{len(numbers)}f", *numbers), width, num_tokens, ids, num_tokens // 2)
