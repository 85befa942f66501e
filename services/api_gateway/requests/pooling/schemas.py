"""The JSON fields of the endpoints of pooling models, under vLLM's names, and of /v2/embed under Cohere's.

How unknown fields, wrong types and fields in `NOT_BUILT` are answered: `decode` in `requests/schemas`.
"""

from typing import Any, Literal

import msgspec

from blockyard.services.api_gateway.requests.schemas import TruncationSide
from blockyard.shared.ring_client.request_fields.chat_messages import NULL, Message

# one text, its ids, or a list of either
TextField = str | list[str | int | list[int]]
Truncate = Literal["NONE", "START", "END"]  # Cohere's: the side of a text that is cut


class TextFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of /v1/embeddings, /classify and /pooling: texts, one for each result."""

    model: str | None = None
    input: TextField | None = None
    messages: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None  # another name of prompt_name
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    # refused by name
    mm_processor_kwargs: msgspec.Raw = NULL


class EmbeddingRequest(TextFields):
    """A vector for each text."""

    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    # refused by name
    embed_dtype: msgspec.Raw = NULL
    endianness: msgspec.Raw = NULL


class ClassificationRequest(TextFields):
    """The label and the probabilities of each text."""

    activation: bool | None = None  # older name of use_activation
    softmax: bool | None = None  # the same


class PoolingRequestFields(TextFields):
    """What the model's pooling makes of each text, in any shape."""

    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    # in place of those of --override-pooler-config
    pooling_type: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    # refused by name
    embed_dtype: msgspec.Raw = NULL
    endianness: msgspec.Raw = NULL
    data: msgspec.Raw = NULL


class PairFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of scores and of rerank: pairs of a query and a document."""

    model: str | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    # refused by name
    mm_processor_kwargs: msgspec.Raw = NULL


class DocumentText(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class ScoreRequest(PairFields):
    """A score for each pair of texts: one with each of many, or the first with the first, and so on."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    # newer names
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None


class RerankRequest(PairFields):
    """The documents by how well they answer the query, the best first."""

    query: str | None = None
    documents: list[str | DocumentText] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    # refused by name
    rank_fields: msgspec.Raw = NULL


class CohereContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str | None = None
    image_url: msgspec.Raw = NULL


class CohereInput(msgspec.Struct, forbid_unknown_fields=True):
    content: list[CohereContentPart]


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A vector for each text, in the form of Cohere's API."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: Truncate | None = None
    priority: int | None = None
    # refused by name
    images: msgspec.Raw = NULL
