"""From decoded fields to a `PoolingRequest`: the texts, ranges, and whether the model can compute it."""

import time
from collections.abc import Sequence

import msgspec

from blockyard.services.api_gateway.requests.generate_request import MAX_ID_CHARS
from blockyard.services.api_gateway.requests.pooling.pooling_request import (
    PoolingAnswerOptions,
    PoolingRequest,
    TokenIds,
)
from blockyard.services.api_gateway.requests.pooling.schemas import (
    ClassificationRequest,
    CohereEmbedRequest,
    DocumentText,
    EmbeddingRequest,
    PairFields,
    PoolingRequestFields,
    RerankRequest,
    ScoreRequest,
    TextFields,
)
from blockyard.services.api_gateway.requests.pooling.text_inputs import (
    check_count,
    check_text,
    read_messages,
    read_pairs,
    read_texts,
)
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, PoolingParams, PoolingTask
from blockyard.shared.ring_client.pooling import params_check, request_checks
from blockyard.shared.ring_client.pooling.calls import WHOLE_LENGTH
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.sampling_fields import read_salt

FORMATS = ("float", "base64")
BINARY_FORMATS = ("bytes", "bytes_only")  # vLLM's, refused by name
COHERE_FORMATS = ("int8", "uint8", "binary", "ubinary")  # refused by name
COHERE_DOCUMENT_TOKENS = 4096  # the default of max_tokens_per_doc
# Cohere's names of input types -> names of prompts that mean the same
INPUT_TYPES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


def parse_embedding(request: EmbeddingRequest, card: ModelCard, name: str) -> PoolingRequest:
    """`name` is the unique part of the answer's id, where the request has none. Raises RequestError."""
    params_check.text_card(card, PoolingTask.EMBED)
    dimensions = request_checks.read_dimensions(request.dimensions, card)
    params = request_checks.vector_params(PoolingTask.EMBED, dimensions, request.normalize, request.use_activation)
    return _text_request(request, card, "embd-", name, params, _format(request.encoding_format))


def parse_classification(request: ClassificationRequest, card: ModelCard, name: str) -> PoolingRequest:
    """Raises RequestError."""
    params_check.text_card(card, PoolingTask.CLASSIFY)
    params = request_checks.score_params(
        PoolingTask.CLASSIFY, request.use_activation, request.activation, request.softmax
    )
    return _text_request(request, card, "classify-", name, params, "float")


def parse_pooling(request: PoolingRequestFields, card: ModelCard, name: str) -> PoolingRequest:
    """Raises RequestError."""
    pooling = params_check.pooling_card(card)
    pooling_type = request_checks.read_task(request.task, card, pooling_type=request.pooling_type)
    if pooling.task is PoolingTask.EMBED:
        dimensions = request_checks.read_dimensions(request.dimensions, card)
        params = request_checks.vector_params(PoolingTask.ENCODE, dimensions, request.normalize, request.use_activation)
    else:
        request_checks.read_dimensions(request.dimensions, card)
        if request.normalize is not None:
            raise RequestError(f"normalize is of vectors; {params_check.serves(card)}", "normalize")
        params = request_checks.score_params(
            PoolingTask.ENCODE, request.use_activation, request.activation, request.softmax
        )
    params = request_checks.with_pooling(params, pooling_type, request.step_tag_id, request.returned_token_ids)
    params_check.check_params(params, card)
    return _text_request(request, card, "pool-", name, params, _format(request.encoding_format))


def parse_score(request: ScoreRequest, card: ModelCard, name: str) -> PoolingRequest:
    """Raises RequestError."""
    compares = _compares(card)
    firsts = {name: getattr(request, name) for name in ("text_1", "data_1", "queries")}
    seconds = {name: getattr(request, name) for name in ("text_2", "data_2", "documents", "items")}
    pairs = read_pairs(firsts, seconds, compares)
    return msgspec.structs.replace(_pair_request(request, card, "score-", name, compares), pairs=pairs)


def parse_rerank(request: RerankRequest, card: ModelCard, name: str) -> PoolingRequest:
    """Raises RequestError."""
    compares = _compares(card)
    if request.documents is None:
        raise RequestError("`documents` is missing", "documents")
    documents = [document.text if isinstance(document, DocumentText) else document for document in request.documents]
    top_n = None if request.top_n is None else limits.integer("top_n", request.top_n, 1, 1)
    pairs = read_pairs({"query": request.query}, {"documents": documents}, compares)
    asked = _pair_request(request, card, "rerank-", name, compares)
    shows = request.return_documents is not False
    options = msgspec.structs.replace(asked.options, top_n=top_n, shows_documents=shows)
    return msgspec.structs.replace(asked, pairs=pairs, options=options)


def parse_cohere_rerank(request: RerankRequest, card: ModelCard, name: str) -> PoolingRequest:
    """Raises RequestError. Long documents are cut, as Cohere documents it, and pairs that are longer than the model's
    length."""
    asked = parse_rerank(request, card, name)
    if asked.truncate_prompt_tokens is None:
        asked = msgspec.structs.replace(asked, truncate_prompt_tokens=WHOLE_LENGTH)
    if asked.max_second_tokens is None and params_check.pooling_card(card).max_len > COHERE_DOCUMENT_TOKENS:
        asked = msgspec.structs.replace(asked, max_second_tokens=COHERE_DOCUMENT_TOKENS)
    return asked


def parse_cohere_embed(request: CohereEmbedRequest, card: ModelCard, name: str) -> PoolingRequest:
    """Raises RequestError. Texts that are too long are cut, as Cohere documents it, unless `truncate` is NONE."""
    pooling = params_check.text_card(card, PoolingTask.EMBED)
    field, texts = _cohere_texts(request)
    formats = tuple(dict.fromkeys(request.embedding_types or ("float",)))
    for i, one in enumerate(formats):
        _check_format(one, f"embedding_types[{i}]", COHERE_FORMATS)
    dimensions = request.output_dimension
    try:
        request_checks.read_dimensions(dimensions, card)
    except RequestError as e:
        raise RequestError(str(e).replace("dimensions", "output_dimension", 1), "output_dimension") from e
    most = limits.integer("max_tokens", request.max_tokens, pooling.max_len, 1)
    cut = request.truncate != "NONE"
    return PoolingRequest(
        card=card,
        options=_options(card, "", name, None, formats),
        params=PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions),
        texts=list(texts),
        field=field,
        truncate_prompt_tokens=min(most, pooling.max_len) if cut else None,
        truncation_side="left" if request.truncate == "START" else "right",
        prompt_name=_cohere_prompt(request.input_type, card),
        priority=_priority(request.priority),
    )


def _text_request(
    request: TextFields, card: ModelCard, prefix: str, name: str, params: PoolingParams, form: str
) -> PoolingRequest:
    messages, single = read_messages(request, card), False
    texts: list[str | TokenIds] = []
    if request.input is not None:
        texts, single = read_texts(request.input, "input", card)
    for field in ("prompt_name", "input_type") if messages is not None else ():
        if getattr(request, field) is not None:
            raise RequestError(f"messages are written by the chat template: {field} is for input", field)
    named = "" if messages is not None else request.prompt_name
    prompt_name = request_checks.read_prompt_name("prompt_name", named, card)
    input_type = request_checks.read_prompt_name("input_type", request.input_type, card)
    if None not in (prompt_name, input_type) and prompt_name != input_type:
        raise RequestError("prompt_name and input_type are names of one field, and differ", "input_type")
    return PoolingRequest(
        card=card,
        options=_options(card, prefix, name, request.request_id, (form,)),
        params=params,
        texts=texts,
        field="input" if messages is None else "messages",
        is_single=single or messages is not None,
        messages=messages,
        truncate_prompt_tokens=request_checks.read_truncation(request.truncate_prompt_tokens, card),
        truncation_side=request.truncation_side,
        add_special_tokens=request.add_special_tokens,
        prompt_name=input_type if prompt_name is None else prompt_name,
        priority=_priority(request.priority),
        user=limits.name("user", request.user, limits.MAX_USER_CHARS),
        cache_salt=read_salt(request.cache_salt),
    )


def _pair_request(request: PairFields, card: ModelCard, prefix: str, name: str, compares: bool) -> PoolingRequest:
    """Everything but the pairs."""
    task = PoolingTask.EMBED if compares else PoolingTask.SCORE
    params = request_checks.score_params(task, request.use_activation, request.activation, request.softmax)
    if compares:  # a similarity has no activation
        params = PoolingParams(task=task)
    return PoolingRequest(
        card=card,
        options=_options(card, prefix, name, request.request_id, ("float",)),
        params=params,
        truncate_prompt_tokens=request_checks.read_truncation(request.truncate_prompt_tokens, card),
        truncation_side=request.truncation_side,
        max_first_tokens=request_checks.read_part_limit("max_tokens_per_query", request.max_tokens_per_query),
        max_second_tokens=request_checks.read_part_limit("max_tokens_per_doc", request.max_tokens_per_doc),
        add_special_tokens=request.add_special_tokens,
        instruction=request_checks.read_instruction(request.instruction, card),
        priority=_priority(request.priority),
        user=limits.name("user", request.user, limits.MAX_USER_CHARS),
        cache_salt=read_salt(request.cache_salt),
    )


def _compares(card: ModelCard) -> bool:
    """Whether the model's scores are similarities of vectors. Raises RequestError if it has no scores."""
    return params_check.text_card(card, PoolingTask.SCORE, PoolingTask.EMBED).task is PoolingTask.EMBED


def _options(
    card: ModelCard, prefix: str, name: str, request_id: str | None, formats: tuple[str, ...]
) -> PoolingAnswerOptions:
    own = limits.name("request_id", request_id, MAX_ID_CHARS)
    return PoolingAnswerOptions(
        answer_id=prefix + (own or name), created=int(time.time()), model=card.names[0], formats=formats
    )


def _priority(priority: int | None) -> int:
    return limits.integer("priority", priority, 0, -(2**31), 2**31 - 1)


def _format(name: str | None) -> str:
    name = "float" if name is None else name
    _check_format(name, "encoding_format", BINARY_FORMATS)
    return name


def _check_format(name: str, field: str, refused: Sequence[str]) -> None:
    if name in refused:
        text = f"{field} {name} is not built yet; {' and '.join(FORMATS)} are"
        raise RequestError(text, field, code="unsupported_parameter")
    if name not in FORMATS:
        raise RequestError(f"{field} is {' or '.join(FORMATS)}, got {name[:40]!r}", field)


def _cohere_texts(request: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The field and its texts. Raises RequestError."""
    if request.texts is not None and request.inputs is not None:
        raise RequestError("texts and inputs cannot both be given", "inputs")
    if request.inputs is None:
        texts = request.texts
        if texts is None:
            raise RequestError("`texts` is missing", "texts")
        check_count(texts, "texts")
        for i, text in enumerate(texts):
            check_text(text, f"texts[{i}]")
        return "texts", texts
    check_count(request.inputs, "inputs")
    found = []
    for i, one in enumerate(request.inputs):
        for k, part in enumerate(one.content):
            if part.type != "text" or part.text is None:
                where = f"inputs[{i}].content[{k}]"
                raise RequestError("this model takes parts of type text alone", where, code="unsupported_content")
        found.append("".join(part.text or "" for part in one.content))
        check_text(found[-1], f"inputs[{i}]")
    return "inputs", found


def _cohere_prompt(input_type: str | None, card: ModelCard) -> str | None:
    """The prompt of an input type. Raises RequestError.

    Cohere's own types mean none where the model has no prompts; so do documents where it has prompts of queries alone,
    as for `encode_document` of sentence-transformers.
    """
    known = {prompt.name for prompt in params_check.pooling_card(card).prompts}
    if input_type in INPUT_TYPES:
        found = next((name for name in INPUT_TYPES[input_type] if name in known), None)
        if found is not None or not known or input_type == "search_document":
            return found
    return request_checks.read_prompt_name("input_type", input_type, card)
