"""What an endpoint of pooling models is to the rest of the gateway, and the fields that their answers share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.openai_fields import PromptTokensDetails, error_body
from blockyard.services.api_gateway.requests.pooling.pooling_request import PoolingRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard
from blockyard.shared.ring_client.pooling.calls import PooledAnswer

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingApi:
    """An endpoint, under all of its paths. Nothing of it is streamed."""

    name: str  # towards the process that parses large bodies
    paths: tuple[str, ...]  # of POST requests
    schema: type[Any]  # the Struct of its body; it has the field `model`
    parse: Callable[[Any, ModelCard, str], PoolingRequest]  # the text is the unique part of the answer's id
    answer: Callable[[PoolingRequest, PooledAnswer], bytes]
    error_body: Callable[[RequestError], bytes] = error_body
    error_statuses: Mapping[int, int] = field(default_factory=dict)  # as in `Api`


class PoolingUsage(msgspec.Struct, frozen=True):
    """Tokens of all texts, in OpenAI's form. Nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(request: PoolingRequest, pooled: PooledAnswer) -> PoolingUsage:
    num_tokens = pooled.num_tokens
    details = PromptTokensDetails(pooled.cached_tokens) if request.options.prompt_tokens_details else None
    return PoolingUsage(num_tokens, num_tokens, prompt_tokens_details=details)


class ApiVersion(msgspec.Struct, frozen=True):
    version: str


class BilledUnits(msgspec.Struct, frozen=True, omit_defaults=True):
    input_tokens: int | None = None
    search_units: int | None = None


class CohereTokens(msgspec.Struct, frozen=True):
    input_tokens: int


class CohereMeta(msgspec.Struct, frozen=True):
    """What Cohere's answers say about the work."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens
