"""Reads the texts of a request: a text, token ids, a list of either, messages, or pairs of texts."""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from blockyard.services.api_gateway.requests.pooling.pooling_request import PairTexts, TokenIds
from blockyard.services.api_gateway.requests.pooling.schemas import TextField, TextFields
from blockyard.services.api_gateway.requests.prompt_fields import chat_prompt
from blockyard.services.api_gateway.requests.schemas import TokenizeRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, Tokenize
from blockyard.shared.ring_client.pooling.params_check import pooling_card
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.token_ids import first_outside, pack

MAX_TEXTS = limits.MAX_PROMPTS


def read_texts(given: TextField, field: str, card: ModelCard) -> tuple[list[str | TokenIds], bool]:
    """The texts, or ids as in frames, and whether there is one that is not in a list. Raises RequestError."""
    if isinstance(given, str):
        check_text(given, field)
        return [given], True
    check_count(given, field)
    if isinstance(given[0], int):
        return [TokenIds(_ids(cast(list[int], given), field, card))], True
    return [_one(text, f"{field}[{i}]", card) for i, text in enumerate(given)], False


def read_messages(request: TextFields, card: ModelCard) -> Tokenize | None:
    """The frame of the messages; None: the request has texts. Raises RequestError."""
    if request.messages is None:
        if request.input is None:
            raise RequestError("`input` is missing, and so is `messages`", "input")
        return None
    if request.input is not None:
        raise RequestError("input and messages cannot both be given", "messages")
    asked = TokenizeRequest(
        messages=request.messages,
        add_special_tokens=request.add_special_tokens,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    prompt = chat_prompt(asked, card, None)
    most = pooling_card(card).max_len if request.truncate_prompt_tokens is None else 0
    return msgspec.structs.replace(prompt, max_tokens=most)


def read_pairs(
    firsts: Mapping[str, str | list[str] | None], seconds: Mapping[str, str | list[str] | None], compares: bool
) -> PairTexts:
    """The pairs of two fields, each given under one of its names. Raises RequestError."""
    first_field, first = _only(firsts)
    second_field, second = _only(seconds)
    many_first, many_second = _listed(first, first_field), _listed(second, second_field)
    if len(many_first) not in (1, len(many_second)):
        raise RequestError(
            f"{first_field} has {len(many_first)} texts and {second_field} {len(many_second)}: one goes with many, or "
            "each with one",
            second_field,
        )
    return PairTexts(
        firsts=many_first,
        seconds=many_second,
        first_field=first_field,
        second_field=second_field,
        first_is_single=isinstance(first, str),
        second_is_single=isinstance(second, str),
        compares=compares,
    )


def check_count(texts: Sequence[object], field: str) -> None:
    """Raises RequestError for an empty list and for too many texts."""
    if not texts:
        raise RequestError(f"`{field}` is empty", field)
    if not isinstance(texts[0], int) and len(texts) > MAX_TEXTS:
        raise RequestError(f"at most {MAX_TEXTS} texts a request, got {len(texts)}", field)


def check_text(text: str, field: str) -> None:
    """Raises RequestError for an empty text."""
    if not text:
        raise RequestError(f"`{field}` is empty", field)


def _only(named: Mapping[str, str | list[str] | None]) -> tuple[str, str | list[str]]:
    given = {name: value for name, value in named.items() if value is not None}
    names = list(named)
    if not given:
        raise RequestError(f"`{names[0]}` is missing", names[0])
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are names of one field", list(given)[-1])
    [(name, value)] = given.items()
    return name, value


def _listed(texts: str | list[str], field: str) -> list[str]:
    if isinstance(texts, str):
        check_text(texts, field)
        return [texts]
    check_count(texts, field)
    for i, text in enumerate(texts):
        if not text:
            check_text(text, f"{field}[{i}]")
    return texts


def _one(given: str | int | list[int], field: str, card: ModelCard) -> str | TokenIds:
    if isinstance(given, str):
        if not given:
            check_text(given, field)
        return given
    if isinstance(given, int):
        raise RequestError(f"`{field}` is an id among texts or lists", field)
    return TokenIds(_ids(given, field, card))


def _ids(ids: list[int], field: str, card: ModelCard) -> bytes:
    """Checks every id against the vocabulary, without a Python loop."""
    if not ids:
        raise RequestError(f"`{field}` is empty", field)
    try:
        data = pack(ids)
    except (OverflowError, TypeError):
        if (place := next((i for i, one in enumerate(ids) if not isinstance(one, int)), None)) is not None:
            raise RequestError(f"`{field}` mixes ids with texts or lists", f"{field}[{place}]") from None
        limits.token_ids(field, ids, card.vocab_size)  # raises with the id
        raise
    if first_outside(data, card.vocab_size) is not None:
        limits.token_ids(field, ids, card.vocab_size)
    return data
