"""Answers that consist of vectors: /v1/embeddings, /pooling, and /v2/embed of Cohere's API.

No Python loop runs over numbers: a memory view makes the lists, and the JSON encoder reads them.
"""

from binascii import b2a_base64
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.pooling.interface import (
    ApiVersion,
    BilledUnits,
    CohereMeta,
    CohereTokens,
    PoolingApi,
    PoolingUsage,
    encode,
    usage_of,
)
from blockyard.services.api_gateway.requests.pooling.pooling_request import PoolingRequest
from blockyard.services.api_gateway.requests.pooling.schemas import (
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequestFields,
)
from blockyard.services.api_gateway.requests.pooling.validate import (
    parse_cohere_embed,
    parse_embedding,
    parse_pooling,
)
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PooledText

BASE64 = "base64"


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: Any  # numbers, or JSON text of base64
    object: str = "embedding"


class Pooled(msgspec.Struct, frozen=True):
    index: int
    data: Any
    object: str = "pooling"


class ListAnswer(msgspec.Struct, frozen=True):
    """The form of OpenAI's lists."""

    id: str
    object: str
    created: int
    model: str
    data: list[Any]
    usage: PoolingUsage


class CohereEmbeddings(msgspec.Struct, frozen=True, omit_defaults=True):
    float: list[Any] | None = None
    base64: list[Any] | None = None


class CohereEmbedAnswer(msgspec.Struct, frozen=True):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


def numbers_of(item: PooledText, form: str) -> Any:
    """The numbers as nested lists in the result's shape, or as base64 of little-endian float32."""
    if form == BASE64:
        return msgspec.Raw(b'"%b"' % b2a_base64(item.raw, newline=False))
    if not item.raw:  # no token is kept: a view of no bytes has no shape
        return []
    return memoryview(item.raw).cast("f", list(item.shape)).tolist()


def list_answer(request: PoolingRequest, data: list[Any], pooled: PooledAnswer) -> bytes:
    options = request.options
    return encode(
        ListAnswer(options.answer_id, "list", options.created, options.model, data, usage_of(request, pooled))
    )


def _embeddings(request: PoolingRequest, pooled: PooledAnswer) -> bytes:
    form = request.options.formats[0]
    return list_answer(request, [Embedding(i, numbers_of(one, form)) for i, one in enumerate(pooled.items)], pooled)


def _pooled(request: PoolingRequest, pooled: PooledAnswer) -> bytes:
    form = request.options.formats[0]
    return list_answer(request, [Pooled(i, numbers_of(one, form)) for i, one in enumerate(pooled.items)], pooled)


def _cohere_embeddings(request: PoolingRequest, pooled: PooledAnswer) -> bytes:
    by_format = {form: [numbers_of(one, form) for one in pooled.items] for form in request.options.formats}
    tokens = pooled.num_tokens
    return encode(
        CohereEmbedAnswer(
            id=request.options.answer_id,
            embeddings=CohereEmbeddings(**by_format),
            texts=[text for text in request.texts if isinstance(text, str)],
            meta=CohereMeta(ApiVersion("2"), BilledUnits(input_tokens=tokens), CohereTokens(tokens)),
        )
    )


EMBEDDINGS = PoolingApi(
    name="embeddings", paths=("/v1/embeddings",), schema=EmbeddingRequest, parse=parse_embedding, answer=_embeddings
)
COHERE_EMBED = PoolingApi(
    name="cohere_embed",
    paths=("/v2/embed",),
    schema=CohereEmbedRequest,
    parse=parse_cohere_embed,
    answer=_cohere_embeddings,
)
POOLING = PoolingApi(
    name="pooling", paths=("/pooling",), schema=PoolingRequestFields, parse=parse_pooling, answer=_pooled
)
