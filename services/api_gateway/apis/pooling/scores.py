"""Answers of scores, ranks and labels: /score, /rerank and /classify, under all of their paths."""

import math

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
from blockyard.services.api_gateway.apis.pooling.vectors import list_answer, numbers_of
from blockyard.services.api_gateway.requests.pooling.pooling_request import PoolingRequest
from blockyard.services.api_gateway.requests.pooling.schemas import ClassificationRequest, RerankRequest, ScoreRequest
from blockyard.services.api_gateway.requests.pooling.validate import (
    parse_classification,
    parse_cohere_rerank,
    parse_rerank,
    parse_score,
)
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PooledText
from blockyard.shared.ring_client.pooling.pair_scores import only_number

DOCUMENTS_A_UNIT = 100  # that Cohere counts as one search


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class Classified(msgspec.Struct, frozen=True):
    index: int
    label: str | None  # of the likeliest class
    probs: list[float]
    num_classes: int


class RankedText(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int  # among the documents of the request
    relevance_score: float
    document: RankedText | None = None  # None: not shown


class RerankAnswer(msgspec.Struct, frozen=True):
    """Jina's answer and Cohere's in one: `usage` is Jina's, `meta` Cohere's."""

    id: str
    object: str
    created: int
    model: str
    results: list[Ranked]
    usage: PoolingUsage
    meta: CohereMeta


def _scores(request: PoolingRequest, pooled: PooledAnswer) -> bytes:
    return list_answer(request, [Score(i, only_number(one)) for i, one in enumerate(pooled.items)], pooled)


def _ranks(request: PoolingRequest, pooled: PooledAnswer) -> bytes:
    assert request.pairs is not None
    options, documents = request.options, request.pairs.seconds
    scores = [only_number(one) for one in pooled.items]
    # equal scores stay in the order of the request
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: options.top_n]
    results = [Ranked(i, scores[i], RankedText(documents[i]) if options.shows_documents else None) for i in order]
    units = math.ceil(len(documents) / DOCUMENTS_A_UNIT)
    meta = CohereMeta(ApiVersion("2"), BilledUnits(search_units=units), CohereTokens(pooled.num_tokens))
    usage = usage_of(request, pooled)
    return encode(RerankAnswer(options.answer_id, "list", options.created, options.model, results, usage, meta))


def _classes(request: PoolingRequest, pooled: PooledAnswer) -> bytes:
    assert pooled.card.pooling is not None
    labels = pooled.card.pooling.labels
    return list_answer(request, [_classified(i, one, labels) for i, one in enumerate(pooled.items)], pooled)


def _classified(index: int, item: PooledText, labels: list[str]) -> Classified:
    probs: list[float] = numbers_of(item, "float")
    best = probs.index(max(probs))
    return Classified(index, labels[best] if best < len(labels) else None, probs, len(probs))


SCORE = PoolingApi(name="score", paths=("/score", "/v1/score"), schema=ScoreRequest, parse=parse_score, answer=_scores)
RERANK = PoolingApi(
    name="rerank", paths=("/rerank", "/v1/rerank"), schema=RerankRequest, parse=parse_rerank, answer=_ranks
)
COHERE_RERANK = PoolingApi(
    name="cohere_rerank", paths=("/v2/rerank",), schema=RerankRequest, parse=parse_cohere_rerank, answer=_ranks
)
CLASSIFY = PoolingApi(
    name="classify", paths=("/classify",), schema=ClassificationRequest, parse=parse_classification, answer=_classes
)
