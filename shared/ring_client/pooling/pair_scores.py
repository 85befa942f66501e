"""Scores of pairs of texts: of a model that reads both, or the similarity of two vectors."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PooledText, PoolingCall, TextPair
from blockyard.shared.ring_client.pooling.pooling_client import PoolingClient

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float64]

LEAST_NORM = 1e-12  # a vector of zeros is like no other
FIRST, SECOND = "first", "second"  # names of the texts in calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """One first text for all second ones, or one for each. The fields are their names in errors."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    first_field: str
    second_field: str
    first_is_single: bool  # the field holds a text, not a list
    second_is_single: bool

    def joined(self) -> list[TextPair]:
        firsts = list(self.firsts) * len(self.seconds) if len(self.firsts) == 1 else self.firsts
        return [TextPair(a, b) for a, b in zip(firsts, self.seconds, strict=True)]


async def score_pairs(client: PoolingClient, call: PoolingCall, pairs: Pairs, compares: bool) -> PooledAnswer:
    """Returns one number for each pair. `call` has everything but the inputs.

    With `compares` the model makes a vector of each text, and the number is their similarity; a text that is part of
    several pairs is computed once, and its tokens count once. Raises RequestError with the name of the wrong text.
    """
    call = replace(call, field=FIRST, first_field=FIRST, second_field=SECOND, is_single=False)
    try:
        if not compares:
            return await client.pool(replace(call, inputs=pairs.joined()))
        if call.max_first_tokens is None and call.max_second_tokens is None:
            answer = await client.pool(replace(call, inputs=[*pairs.firsts, *pairs.seconds]))
            return compared(answer, len(pairs.firsts))
        first = await client.pool(replace(call, inputs=pairs.firsts, max_second_tokens=None))
        limit, name = call.max_second_tokens, f"{call.request_id}-second"
        second = await client.pool(
            replace(call, request_id=name, inputs=pairs.seconds, max_first_tokens=limit, first_field=SECOND)
        )
        both = PooledAnswer(first.card, [*first.items, *second.items])
        return compared(both, len(pairs.firsts))
    except RequestError as e:
        raise _renamed(e, pairs, compares) from e


def compared(answer: PooledAnswer, num_firsts: int) -> PooledAnswer:
    """The similarities of vectors: the first `num_firsts` are of the first texts of pairs."""
    assert answer.card.pooling is not None
    name, firsts, seconds = answer.card.pooling.similarity, answer.items[:num_firsts], answer.items[num_firsts:]
    tokens, cached = [item.num_tokens for item in seconds], [item.cached_tokens for item in seconds]
    for i, item in enumerate(firsts):
        tokens[i] += item.num_tokens
        cached[i] += item.cached_tokens
    vectors = [item.data.astype("f8") for item in firsts]
    if len(vectors) == 1:
        vectors *= len(seconds)
    scores = [similarity(a, b.data.astype("f8"), name) for a, b in zip(vectors, seconds, strict=True)]
    items = [
        PooledText(struct.pack("<f", score), 0, num_tokens, cached_tokens=num_cached)
        for score, num_tokens, num_cached in zip(scores, tokens, cached, strict=True)
    ]
    return PooledAnswer(answer.card, items)


def similarity(first: "Vector", second: "Vector", name: str) -> float:
    """Of two vectors, by one of the functions of sentence-transformers. Distances are negative."""
    match name:
        case "euclidean":
            return -math.sqrt(((first - second) ** 2).sum())
        case "manhattan":
            return -float(abs(first - second).sum())
    found = float(first @ second)
    return found if name == "dot" else found / max(math.sqrt((first @ first) * (second @ second)), LEAST_NORM)


def only_number(item: PooledText) -> float:
    """The score of a pair. Raises RequestError if the result is not one number."""
    if math.prod(item.shape) != 1:
        raise RequestError(f"the model makes {item.shape} numbers of a pair, not one score", status=500)
    number: float = struct.unpack("<f", item.raw)[0]
    return number


def _renamed(error: RequestError, pairs: Pairs, compares: bool) -> RequestError:
    """The error of `first[3]` with the name that the text has in the request."""
    name, _, rest = error.field.partition("[")
    if name not in (FIRST, SECOND) or not rest[:-1].isdecimal():
        return error
    index, is_second = int(rest[:-1]), name == SECOND
    if not is_second and index >= len(pairs.firsts):
        # vectors of second texts are behind the first ones'; a pair may have the first text of all pairs
        index, is_second = (index - len(pairs.firsts), True) if compares else (0, False)
    field = pairs.second_field if is_second else pairs.first_field
    if not (pairs.second_is_single if is_second else pairs.first_is_single):
        field = f"{field}[{index}]"
    text = str(error).replace(error.field, field)
    return RequestError(text, field, error.status, error.code, error.retry_after_s, error.too_long)
