"""Reads the fields of a request to a pooling model by the model's card. HTTP and offline requests share it."""

from collections.abc import Sequence

import msgspec

from blockyard.shared.config.pooling.modes import PoolingMode
from blockyard.shared.config.pooling.pooling_choice import dimensions_problem
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard, PoolingParams, PoolingTask
from blockyard.shared.ring_client.pooling.calls import WHOLE_LENGTH
from blockyard.shared.ring_client.pooling.params_check import pooling_card, serves
from blockyard.shared.ring_client.request_fields import limits

# names of tasks in requests -> the model's task; newer vLLM tells tokens' results by the name
TASK_NAMES = {
    "embed": PoolingTask.EMBED,
    "embedding": PoolingTask.EMBED,
    "token_embed": PoolingTask.EMBED,
    "classify": PoolingTask.CLASSIFY,
    "token_classify": PoolingTask.CLASSIFY,
    "score": PoolingTask.SCORE,
    "reward": PoolingTask.REWARD,
    "encode": PoolingTask.ENCODE,
}


def read_task(name: str | None, card: ModelCard, field: str = "task", pooling_type: str | None = None) -> str | None:
    """Returns the pooling type of a request: its own one, or ALL where the task's name means vectors of tokens.

    Raises RequestError if `name` is no task, not the model's, or contradicts `pooling_type`.
    """
    if name is None:
        return pooling_type
    task = TASK_NAMES.get(name)
    if task is None:
        raise RequestError(f"{field} is one of {', '.join(TASK_NAMES)}, got {name[:40]!r}", field)
    found = pooling_card(card)
    of_tokens = name.startswith("token_")
    if of_tokens and not found.of_tokens and found.task is not PoolingTask.EMBED:
        text = f"{field} {name}: the model's pooling makes one result of a text, not one of each token"
        raise RequestError(text, field, code="unsupported_task")
    is_of_tokens = of_tokens and found.of_tokens
    if task not in (PoolingTask.ENCODE, found.task) and not (task is PoolingTask.CLASSIFY and is_of_tokens):
        raise RequestError(serves(card), field, code="unsupported_task")
    if not of_tokens or is_of_tokens:
        return pooling_type
    if pooling_type is not None and pooling_type.upper() != PoolingMode.ALL.name:
        text = f"{field} {name} has the pooling type ALL, and pooling_type says {pooling_type[:40]!r}"
        raise RequestError(text, "pooling_type")
    return PoolingMode.ALL.name


def read_dimensions(dimensions: int | None, card: ModelCard) -> int | None:
    """Raises RequestError if the model's vectors cannot be cut to so many numbers."""
    pooling = pooling_card(card)
    if dimensions is None:
        return None
    if pooling.task is not PoolingTask.EMBED:
        raise RequestError(f"dimensions are of vectors; {serves(card)}", "dimensions")
    trained = {"is_matryoshka": pooling.is_matryoshka, "matryoshka_dimensions": pooling.dimensions or None}
    problem = dimensions_problem(dimensions, pooling.width, trained)
    if problem is not None:
        raise RequestError(problem, "dimensions")
    return dimensions


def read_truncation(tokens: int | None, card: ModelCard, field: str = "truncate_prompt_tokens") -> int | None:
    """The most tokens of a text, which is cut to them; None: a longer text is an error. Raises RequestError."""
    if tokens != WHOLE_LENGTH:
        limits.integer(field, tokens, 1, 1, pooling_card(card).max_len)
    return tokens


def read_part_limit(field: str, tokens: int | None) -> int | None:
    """The most tokens of one text of a pair, without special ones. Raises RequestError."""
    return None if tokens is None else limits.integer(field, tokens, 1, 1, limits.MOST_TOKENS - 1)


def read_prompt_name(field: str, name: str | None, card: ModelCard) -> str | None:
    """The name of the prompt that goes before each text; "": none goes. Raises RequestError."""
    known = [prompt.name for prompt in pooling_card(card).prompts]
    if name and name not in known:
        listed = ", ".join(known) if known else "it has none"
        raise RequestError(f"{field} {name[:100]!r} is not the name of a prompt of this model: {listed}", field)
    return name


def read_instruction(instruction: str | None, card: ModelCard) -> str | None:
    """For a model with a template for pairs. Raises RequestError for any other."""
    if instruction is not None and not pooling_card(card).has_pair_template:
        raise RequestError(
            "instruction is for a model with a template of pairs (--chat-template, or a reranker's own); this one has "
            "none",
            "instruction",
        )
    return instruction


def same(**values: bool | None) -> bool | None:
    """The value of a field with several names. Raises RequestError if two of them differ."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        raise RequestError(f"{' and '.join(given)} are names of one field, and differ", list(given)[-1])
    return next(iter(given.values()), None)


def vector_params(
    task: PoolingTask, dimensions: int | None, normalize: bool | None, use_activation: bool | None
) -> PoolingParams:
    """Parameters of vectors. `use_activation` is another name of `normalize` there."""
    return PoolingParams(
        task=task, dimensions=dimensions, normalize=same(normalize=normalize, use_activation=use_activation)
    )


def score_params(
    task: PoolingTask, use_activation: bool | None, activation: bool | None = None, softmax: bool | None = None
) -> PoolingParams:
    """Parameters of scores, classes and rewards. The three are names of one field."""
    value = same(use_activation=use_activation, activation=activation, softmax=softmax)
    return PoolingParams(task=task, use_activation=value)


def with_pooling(
    params: PoolingParams, pooling_type: str | None, step_tag_id: int | None, returned_token_ids: Sequence[int] | None
) -> PoolingParams:
    """Parameters of a request that pools in a way of its own. Raises RequestError for a list that is too long."""
    returned = None if returned_token_ids is None else list(returned_token_ids)
    limits.short("returned_token_ids", returned or (), limits.MAX_LISTED)
    return msgspec.structs.replace(
        params, pooling_type=pooling_type, step_tag_id=step_tag_id, returned_token_ids=returned
    )
