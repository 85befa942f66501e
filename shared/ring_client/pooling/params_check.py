"""Checks what a request asks of a pooling model against the model's card. Raises RequestError, a 400."""

from typing import NoReturn

from blockyard.shared.config.pooling.modes import PoolingMode, read_vllm_name
from blockyard.shared.config.pooling.pooling_choice import dimensions_problem
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import ModelCard, PoolingCard, PoolingParams, PoolingTask

SCORES = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
# the endpoints of each task, besides /pooling
ENDPOINTS: dict[PoolingTask, tuple[str, ...]] = {
    PoolingTask.EMBED: ("/v1/embeddings", "/v2/embed", *SCORES),
    PoolingTask.CLASSIFY: ("/classify",),
    PoolingTask.SCORE: SCORES,
    PoolingTask.REWARD: (),
}
GENERATION = "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages"
_OF_VECTORS = ("dimensions", "normalize")
_OF_OUTPUTS = ("use_activation", "softmax", "returned_token_ids")


def serves(card: ModelCard) -> str:
    """Says what a model serves, for errors of calls for anything else."""
    if card.pooling is None:
        return f"the model `{card.names[0]}` generates text; it serves {GENERATION}. --task embed makes vectors"
    task, of_tokens = card.pooling.task, card.pooling.of_tokens
    paths = ", ".join((*(() if of_tokens else ENDPOINTS[task]), "/pooling"))
    results = f" and results of each token ({card.pooling.pooling})" if of_tokens else ""
    return f"the model `{card.names[0]}` has the task {task.value}{results}; it serves {paths}"


def refuse_task(card: ModelCard) -> NoReturn:
    """Raises the error of a call for a task that the model does not have."""
    raise RequestError(serves(card), "model", code="unsupported_task")


def check_generates(card: ModelCard) -> None:
    """Raises RequestError if the model generates no text."""
    if card.pooling is not None:
        refuse_task(card)


def pooling_card(card: ModelCard, *tasks: PoolingTask) -> PoolingCard:
    """The card of a pooling model with one of these tasks; with any, if none is named. Raises RequestError."""
    if card.pooling is None or (tasks and card.pooling.task not in tasks):
        refuse_task(card)
    return card.pooling


def text_card(card: ModelCard, *tasks: PoolingTask) -> PoolingCard:
    """The same of a model that makes one result of a text. Raises RequestError."""
    pooling = pooling_card(card, *tasks)
    if pooling.of_tokens:
        refuse_task(card)
    return pooling


def check_params(params: PoolingParams, card: ModelCard) -> None:
    """Raises RequestError if the model cannot make such results."""
    pooling = pooling_card(card)
    if params.task not in (PoolingTask.ENCODE, pooling.task):
        refuse_task(card)
    makes_vectors = pooling.task is PoolingTask.EMBED
    for name in _OF_OUTPUTS if makes_vectors else _OF_VECTORS:
        if getattr(params, name) is not None:
            kind = "vectors have none" if makes_vectors else "it is for vectors"
            raise RequestError(f"`{name}` has no meaning for the task {pooling.task}: {kind}", name)
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, pooling)
    mode = None
    if params.pooling_type is not None:
        try:
            mode = read_vllm_name(params.pooling_type, "`pooling_type`")
        except ConfigError as e:
            raise RequestError(str(e), "pooling_type") from e
        if pooling.joins_dense and not mode.is_of_tokens:
            text = f"`pooling_type` {mode.name}: the dense layer of this model reads vectors of several modes, joined"
            raise RequestError(text, "pooling_type")
    is_step = PoolingMode.STEP.name in (mode.name if mode is not None else pooling.pooling,)
    if params.step_tag_id is not None and not is_step:
        raise RequestError("`step_tag_id` has an effect only with `pooling_type` STEP", "step_tag_id")
    if params.step_tag_id is not None and not 0 <= params.step_tag_id < card.vocab_size:
        text = f"`step_tag_id` {params.step_tag_id} is outside the vocabulary of {card.vocab_size}"
        raise RequestError(text, "step_tag_id")
    returned = params.returned_token_ids
    if returned is not None and not (returned and all(0 <= one < pooling.width for one in returned)):
        raise RequestError(
            f"`returned_token_ids` are outputs of the model, below {pooling.width}, and at least one",
            "returned_token_ids",
        )


def _check_dimensions(dimensions: int, pooling: PoolingCard) -> None:
    trained = {"matryoshka_dimensions": pooling.dimensions} if pooling.dimensions else {}
    problem = dimensions_problem(dimensions, pooling.width, trained | {"is_matryoshka": pooling.is_matryoshka})
    if problem is not None:
        raise RequestError(problem, "dimensions")
