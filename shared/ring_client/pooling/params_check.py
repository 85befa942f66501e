"""Checks what a request asks of a pooling model against the model's card. Raises RequestError, a 400."""

from blockyard.shared.config.pooling.modes import PoolingMode, read_vllm_name
from blockyard.shared.config.pooling.pooling_choice import dimensions_problem
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import ModelCard, PoolingCard, PoolingParams, PoolingTask

ENDPOINTS = {
    PoolingTask.EMBED: "/v1/embeddings, /v2/embed, /score, /rerank and /pooling",
    PoolingTask.CLASSIFY: "/classify and /pooling",
    PoolingTask.SCORE: "/score, /rerank and /pooling",
    PoolingTask.REWARD: "/pooling",
}
_OF_VECTORS = ("dimensions", "normalize")
_OF_OUTPUTS = ("use_activation", "softmax", "returned_token_ids")


def serves(card: ModelCard) -> str:
    """Says what a model is for, in errors about another use of it."""
    if card.pooling is None:
        return f"the model `{card.names[0]}` generates text"
    task = card.pooling.task
    return f"the model `{card.names[0]}` serves the task {task}: {ENDPOINTS[task]}"


def pooling_card(card: ModelCard) -> PoolingCard:
    """Returns the card of a pooling model. Raises RequestError for a model that generates text."""
    if card.pooling is None:
        raise RequestError(f"{serves(card)}, and makes no vectors; --task of the server chooses", "model")
    return card.pooling


def check_generates(card: ModelCard) -> None:
    """Raises RequestError for a pooling model."""
    if card.pooling is not None:
        raise RequestError(f"{serves(card)}; it generates no text", "model")


def check_params(params: PoolingParams, card: ModelCard) -> None:
    """Raises RequestError if the model cannot make such results."""
    pooling = pooling_card(card)
    if params.task not in (PoolingTask.ENCODE, pooling.task):
        raise RequestError(f"{serves(card)}, and not {params.task}", "model")
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
    is_step = PoolingMode.STEP.name in (mode.name if mode is not None else pooling.pooling,)
    if params.step_tag_id is not None and not is_step:
        raise RequestError("`step_tag_id` has an effect only with `pooling_type` STEP", "step_tag_id")
    if any(one < 0 or one >= pooling.width for one in params.returned_token_ids or ()):
        raise RequestError(
            f"`returned_token_ids` are outputs of the model, below {pooling.width}", "returned_token_ids"
        )


def _check_dimensions(dimensions: int, pooling: PoolingCard) -> None:
    trained = {"matryoshka_dimensions": pooling.dimensions} if pooling.dimensions else {}
    problem = dimensions_problem(dimensions, pooling.width, trained | {"is_matryoshka": pooling.is_matryoshka})
    if problem is not None:
        raise RequestError(problem, "dimensions")
