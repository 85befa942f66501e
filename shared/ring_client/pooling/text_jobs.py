"""Tokenizes the inputs of a call: many texts in one job, as many as a job's limits are for.

While nothing else waits, a call of many texts to an encoder is divided into parts: so a worker computes the first texts
while tokenizers read the others. A decoder's step of few texts may take as long as one of many.
"""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from blockyard.shared.errors import RequestError, TooLong
from blockyard.shared.messages import ModelCard, PoolingCard, TextError, TextsTokenized, TokenizeTexts
from blockyard.shared.ring_client.pooling.calls import WHOLE_LENGTH, PoolingCall, PoolingInput, TextPair
from blockyard.shared.ring_client.pooling.params_check import pooling_card
from blockyard.shared.ring_client.tokenizer_client import QUICK_BYTES, TokenizerClient
from blockyard.shared.token_ids import ID_BYTES, first_outside, num_ids, pack

TRY_AGAIN = (429, 503)  # statuses that say nothing about the texts
SIDES = ("left", "right")
MANY_BYTES = 32 << 10  # of a call that is worth dividing
FIRST_BYTES = 8 << 10  # of its first part, about 2,000 tokens; each next one is twice as large


@dataclass(slots=True)
class TokenizedInputs:
    """The ids of some inputs of a call."""

    places: Sequence[int]  # in the call
    prompts: list[bytes]
    second_starts: "array[int] | None" = None  # None: no token has a type
    skip: int = 0  # leading tokens that are not pooled


def field_of(call: PoolingCall, index: int, is_second: bool = False) -> str:
    """Returns the name of an input in errors."""
    name = (call.second_field if is_second else call.first_field) or call.field
    return name if call.is_single else f"{name}[{index}]"


class TextJobs:
    """Divides the texts of a call among tokenizers."""

    def __init__(self, tokenizers: TokenizerClient) -> None:
        self._tokenizers = tokenizers

    async def tokenize(
        self, call: PoolingCall, card: ModelCard, take: Callable[[TokenizedInputs], None], may_divide: bool
    ) -> None:
        """Gives the ids of all inputs to `take`, at once or in parts: each as soon as it is known.

        may_divide: as the module says. Raises RequestError, with the name of the input that is wrong, and what `take`
        raises.
        """
        pooling = pooling_card(card)
        most, truncates = _limits(call, pooling)
        plain: list[int] = []
        pairs: list[int] = []
        given: dict[int, bytes | list[int]] = {}  # as token ids, by place
        for i, one in enumerate(call.inputs):
            if isinstance(one, str):
                plain.append(i)
            elif isinstance(one, TextPair):
                pairs.append(i)
            else:
                given[i] = one
        ids = _given_ids(call, given, card, most, truncates)
        _check_texts(call, pooling)
        template = TokenizeTexts(
            "", card.names[0], [], [], most, truncates, call.truncation_side == "left",
            call.max_first_tokens or 0, call.max_second_tokens or 0, call.add_special_tokens, _prompt(call, pooling),
            tenant=call.tenant, instruction=call.instruction,
        )  # fmt: skip
        of_texts = msgspec.structs.replace(template, counts_prompt=not pooling.include_prompt)
        divides = may_divide and not pooling.has_kv and _num_chars(call) > MANY_BYTES
        first_bytes = FIRST_BYTES if divides else QUICK_BYTES
        jobs = [
            *self._jobs(call, of_texts, plain, pooling, first_bytes),
            *self._jobs(call, template, pairs, pooling, first_bytes),
        ]
        parts: list[TokenizedInputs] = []
        each = take if divides else parts.append
        if given:
            each(TokenizedInputs(list(given), ids))
        await _together([self._run(call, places, job, pooling.has_types, each) for places, job in jobs])
        if not divides:
            take(_joined(parts, len(call.inputs)))

    def _jobs(
        self, call: PoolingCall, template: TokenizeTexts, places: Sequence[int], pooling: PoolingCard, most: int
    ) -> Iterator[tuple[list[int], TokenizeTexts]]:
        """Yields frames of texts, each small enough to be quick, and the places of their texts in the call.

        most: bytes of the first one.
        """
        part: list[int] = []
        size = 0
        for place in places:
            length = sum(map(len, _texts(call.inputs[place])))
            if part and size + length > most:
                yield part, _job(call, template, part, pooling)
                part, size, most = [], 0, min(2 * most, QUICK_BYTES)
            part.append(place)
            size += length
        if part:
            yield part, _job(call, template, part, pooling)

    async def _run(
        self,
        call: PoolingCall,
        places: list[int],
        job: TokenizeTexts,
        has_types: bool,
        take: Callable[[TokenizedInputs], None],
    ) -> None:
        """Runs one job. If it breaks the limits of a job, each half runs alone: so the text to blame is found."""
        try:
            answer = await self._tokenizers.submit(job)
        except RequestError as e:
            if e.status in TRY_AGAIN or len(places) == 1:
                raise RequestError(
                    str(e), field_of(call, places[0]), e.status, e.code, e.retry_after_s, e.too_long
                ) from e
            half = len(places) // 2
            halves = [(places[:half], slice(half)), (places[half:], slice(half, None))]
            await _together([self._run(call, part, _part(job, which), has_types, take) for part, which in halves])
            return
        assert isinstance(answer, TextsTokenized)
        take(_tokenized(call, places, answer, has_types))


async def _together(runs: list[Coroutine[Any, Any, None]]) -> None:
    """Awaits all; after the first error the others are cancelled, which drops their jobs."""
    if len(runs) == 1:
        await runs[0]  # no task of its own, which would begin and end in later iterations of the loop
        return
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _tokenized(call: PoolingCall, places: list[int], answer: TextsTokenized, has_types: bool) -> TokenizedInputs:
    if answer.errors:
        error = answer.errors[0]
        raise _text_error(error, field_of(call, places[error.index], error.is_second))
    end, prompts = 0, []
    for place, length in zip(places, array("I", answer.lengths), strict=True):
        first, end = end, end + ID_BYTES * length
        if not length:
            raise RequestError("the text has no tokens", field_of(call, place))
        prompts.append(answer.token_ids[first:end])
    seconds = array("I", answer.second_starts) if has_types and answer.second_starts else None
    return TokenizedInputs(places, prompts, seconds, answer.skip)


def _joined(parts: list[TokenizedInputs], num_inputs: int) -> TokenizedInputs:
    """All inputs of a call, in order."""
    if len(parts) == 1:
        return parts[0]
    prompts = [b""] * num_inputs
    seconds = array("I", [0]) * num_inputs if any(part.second_starts is not None for part in parts) else None
    for part in parts:
        for i, (place, ids) in enumerate(zip(part.places, part.prompts, strict=True)):
            prompts[place] = ids
            if seconds is not None:
                seconds[place] = num_ids(ids) if part.second_starts is None else part.second_starts[i]
    return TokenizedInputs(range(num_inputs), prompts, seconds, max(part.skip for part in parts))


def _text_error(error: TextError, name: str) -> RequestError:
    too_long = TooLong(error.num_tokens, error.max_tokens) if error.max_tokens else None
    return RequestError(error.message, name, code=error.code or None, too_long=too_long)


def _num_chars(call: PoolingCall) -> int:
    return sum(len(text) for one in call.inputs for text in _texts(one))


def _texts(one: PoolingInput) -> tuple[str, ...]:
    return (one,) if isinstance(one, str) else one if isinstance(one, TextPair) else ()


def _job(call: PoolingCall, template: TokenizeTexts, places: list[int], pooling: PoolingCard) -> TokenizeTexts:
    inputs = [one for place in places if isinstance(one := call.inputs[place], (str, TextPair))]
    texts = [one if isinstance(one, str) else one.first for one in inputs]
    seconds = [one.second for one in inputs if isinstance(one, TextPair)]
    if pooling.is_lower_case:
        texts, seconds = [text.lower() for text in texts], [text.lower() for text in seconds]
    name = f"{call.request_id}-{'p' if seconds else 't'}{places[0]}"
    return msgspec.structs.replace(template, request_id=name, texts=texts, seconds=seconds)


def _part(job: TokenizeTexts, which: slice) -> TokenizeTexts:
    name = f"{job.request_id}.{0 if which.start is None else 1}"
    return msgspec.structs.replace(
        job, request_id=name, texts=job.texts[which], seconds=job.seconds[which], quick=False
    )


def _limits(call: PoolingCall, pooling: PoolingCard) -> tuple[int, bool]:
    """The most tokens of an input, and whether longer ones are cut."""
    if call.truncation_side is not None and call.truncation_side not in SIDES:
        raise RequestError(f"`truncation_side` {call.truncation_side!r} is not left or right", "truncation_side")
    asked = call.truncate_prompt_tokens
    if asked is None:
        return pooling.max_len, False
    if asked == WHOLE_LENGTH:
        return pooling.max_len, True
    if not 1 <= asked <= pooling.max_len:
        raise RequestError(
            f"`truncate_prompt_tokens` {asked} is not between 1 and the model's {pooling.max_len}, or -1 for these",
            "truncate_prompt_tokens",
        )
    return asked, True


def _prompt(call: PoolingCall, pooling: PoolingCard) -> str:
    """The text that goes before each text."""
    name = pooling.default_prompt_name if call.prompt_name is None else call.prompt_name
    if not name:
        return ""
    texts = {prompt.name: prompt.text for prompt in pooling.prompts}
    if name not in texts:
        raise RequestError(
            f"`prompt_name` {name!r} is not one of the model's prompts: {', '.join(texts) or 'it has none'}",
            "prompt_name",
        )
    return texts[name]


def _check_texts(call: PoolingCall, pooling: PoolingCard) -> None:
    """Checks plain texts at once, and each by itself where that fails or there are pairs: so the bad one is named."""
    plain = [one for one in call.inputs if isinstance(one, str)]
    if all(plain) and _is_unicode("".join(plain)) and not any(isinstance(one, TextPair) for one in call.inputs):
        return
    for i, one in enumerate(call.inputs):
        if isinstance(one, (str, TextPair)):
            _check_text(call, i, one, pooling)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_text(call: PoolingCall, index: int, one: str | TextPair, pooling: PoolingCard) -> None:
    if isinstance(one, TextPair) and not pooling.takes_pairs:
        raise RequestError(f"a model of the task {pooling.task} reads one text, not pairs", field_of(call, index))
    for text, is_second in zip(_texts(one), (False, True), strict=False):
        name = field_of(call, index, is_second)
        if not text:
            raise RequestError("the text is empty", name)
        if not _is_unicode(text):
            raise RequestError("the text has half a surrogate pair in it", name)


def _given_ids(
    call: PoolingCall, given: Mapping[int, bytes | list[int]], card: ModelCard, most: int, truncates: bool
) -> list[bytes]:
    """Checks prompts of ids at once, and each by itself where that fails or one is to be cut."""
    with contextlib.suppress(OverflowError, TypeError):
        packed = [one if isinstance(one, bytes) else pack(one) for one in given.values()]
        fits = all(0 < size <= ID_BYTES * most and not size % ID_BYTES for size in set(map(len, packed)))
        if fits and first_outside(b"".join(packed), card.vocab_size) is None:
            return packed
    return [_cut_ids(call, i, ids, card, most, truncates) for i, ids in given.items()]


def _cut_ids(
    call: PoolingCall, index: int, ids: bytes | list[int], card: ModelCard, most: int, truncates: bool
) -> bytes:
    """Checks a prompt of ids, and cuts it if it is to be: special tokens like others, none is added, as in vLLM."""
    name = field_of(call, index)
    try:
        data = ids if isinstance(ids, bytes) else pack(ids)
        length = num_ids(data)
    except (OverflowError, TypeError, ValueError) as e:
        raise RequestError(f"token ids are whole numbers from 0 to {card.vocab_size - 1}", name) from e
    if not length:
        raise RequestError("the list of token ids is empty", name)
    if (outside := first_outside(data, card.vocab_size)) is not None:
        raise RequestError(f"token id {outside} is outside the vocabulary of {card.vocab_size}", name)
    if length <= most:
        return data
    if truncates:
        return data[-ID_BYTES * most :] if call.truncation_side == "left" else data[: ID_BYTES * most]
    message = (
        f"This model's maximum context length is {most} tokens. However, the input has {length}. "
        "`truncate_prompt_tokens`, for /v2/embed `truncate`, cuts it."
    )
    raise RequestError(message, name, code="context_length_exceeded", too_long=TooLong(length, most))
