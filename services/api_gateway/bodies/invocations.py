"""Picks the endpoint that a body sent to /invocations is for: by its fields, and by the task of its model.

SageMaker sends every request to this path. The order of the fields is vLLM's.
"""

import codecs

import msgspec

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.completions import COMPLETIONS
from blockyard.services.api_gateway.apis.pooling.scores import CLASSIFY, RERANK, SCORE
from blockyard.services.api_gateway.apis.pooling.vectors import EMBEDDINGS, POOLING
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, PoolingTask
from blockyard.shared.ring_client.pooling.params_check import refuse_task, serves
from blockyard.shared.ring_client.request_fields.chat_messages import NULL
from blockyard.shared.ring_client.schedulers import Served

PAIR_FIELDS = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")  # of /score
INVOKED = (CHAT, COMPLETIONS, EMBEDDINGS, CLASSIFY, RERANK, SCORE, POOLING)  # what a body may be for


class Invocation(msgspec.Struct):
    """The fields that tell endpoints apart."""

    model: str | None = None
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    input: msgspec.Raw = NULL
    query: msgspec.Raw = NULL
    text_1: msgspec.Raw = NULL
    text_2: msgspec.Raw = NULL
    data_1: msgspec.Raw = NULL
    data_2: msgspec.Raw = NULL
    queries: msgspec.Raw = NULL
    documents: msgspec.Raw = NULL
    items: msgspec.Raw = NULL

    def has(self, *names: str) -> bool:
        """Whether one of these fields is there, and not null."""
        return any(bytes(getattr(self, name)) != bytes(NULL) for name in names)


def invoked_endpoint(body: bytes, served: Served) -> str:
    """Returns the name of an API of either registry. Raises RequestError if the body is for none.

    A body that is not valid JSON is left to the completions parser, whose error says what is wrong with it.
    """
    try:
        asked = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8), type=Invocation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return COMPLETIONS.name
    card = served.card(asked.model)
    return _pooled(asked, card) if card.pooling is not None else _generated(asked, card)


def _generated(asked: Invocation, card: ModelCard) -> str:
    if asked.has("messages"):
        return CHAT.name
    if asked.has("prompt"):
        return COMPLETIONS.name
    if asked.has("input", "query", *PAIR_FIELDS):
        refuse_task(card)
    raise RequestError(f"neither messages nor prompt: {serves(card)}", "messages")


def _pooled(asked: Invocation, card: ModelCard) -> str:
    assert card.pooling is not None
    if asked.has("input", "messages"):
        of_texts = {PoolingTask.EMBED: EMBEDDINGS, PoolingTask.CLASSIFY: CLASSIFY}
        return of_texts.get(card.pooling.task, POOLING).name
    if asked.has("query"):
        return RERANK.name
    if asked.has(*PAIR_FIELDS):
        return SCORE.name
    if asked.has("prompt"):
        refuse_task(card)
    raise RequestError(f"neither input, messages, query nor text_1: {serves(card)}", "input")
