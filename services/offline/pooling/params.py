"""`PoolingParams` with vLLM's fields, and their check against the model."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from blockyard.services.offline.sampling_params import RequestOutputKind, plain
from blockyard.shared import messages
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import ModelCard, PoolingTask
from blockyard.shared.ring_client.pooling import params_check, request_checks


class PoolingSettings(msgspec.Struct, kw_only=True):
    """How results are made. None: as the model's settings say.

    Numbers and lists may be numpy's. The call that uses them checks them against the model.
    """

    truncate_prompt_tokens: int | None = None  # longer texts are cut to so many tokens; -1: the model's length
    truncation_side: str | None = None  # that is cut: "right", the default, or "left"
    dimensions: int | None = None
    normalize: bool | None = None  # of vectors
    use_activation: bool | None = None  # False: logits in place of scores; of vectors another name of `normalize`
    activation: bool | None = None  # older name of use_activation
    softmax: bool | None = None  # the same
    pooling_type: str | None = None  # CLS, LAST, MEAN, ALL or STEP, in any case
    step_tag_id: int | None = None  # with the pooling STEP: the token that ends a step
    returned_token_ids: list[int] | None = None  # the outputs of the model that are kept
    task: str | None = None  # the model's own, for vLLM's scripts that name it
    instruction: str | None = None  # of `score`, for a model with a template of pairs
    skip_reading_prefix_cache: bool | None = None  # no effect on results
    requires_token_ids: bool = False  # outputs have them always
    extra_kwargs: Any = None  # refused by name
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY  # no other has an effect

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(PoolingSettings):
            value = plain(getattr(self, field.name))
            if isinstance(value, RequestOutputKind):
                continue
            try:
                setattr(self, field.name, msgspec.convert(value, field.type))
            except msgspec.ValidationError as e:
                raise RequestError(f"{field.name}: {e}", field.name) from e
        if self.truncation_side not in (None, "left", "right"):
            raise RequestError(f"truncation_side is left or right, got {self.truncation_side!r}", "truncation_side")

    def clone(self) -> "PoolingSettings":
        return copy.deepcopy(self)


PoolingParams = PoolingSettings  # vLLM's name

Params = PoolingSettings | Sequence[PoolingSettings] | None


class CheckedPooling(NamedTuple):
    """Parameters that the model can have."""

    params: messages.PoolingParams
    truncate: int | None
    truncation_side: str | None
    instruction: str | None


def read(given: PoolingSettings, card: ModelCard, task: PoolingTask, truncate: int | None) -> CheckedPooling:
    """Checks the parameters of a call. truncate: of the call, where `given` has none. Raises RequestError."""
    pooling = params_check.pooling_card(card)
    pooling_type = request_checks.read_task(given.task, card, pooling_type=given.pooling_type)
    if given.extra_kwargs:
        raise not_built("extra_kwargs")
    makes_vectors = pooling.task is PoolingTask.EMBED
    if makes_vectors:
        dimensions = request_checks.read_dimensions(given.dimensions, card)
        params = request_checks.vector_params(task, dimensions, given.normalize, given.use_activation)
    else:
        request_checks.read_dimensions(given.dimensions, card)
        if given.normalize is not None:
            raise RequestError(f"normalize is of vectors; {params_check.serves(card)}", "normalize")
        params = request_checks.score_params(task, given.use_activation, given.activation, given.softmax)
    params = request_checks.with_pooling(params, pooling_type, given.step_tag_id, given.returned_token_ids)
    asked = truncate if given.truncate_prompt_tokens is None else given.truncate_prompt_tokens
    return CheckedPooling(
        params,
        request_checks.read_truncation(asked, card),
        given.truncation_side,
        request_checks.read_instruction(given.instruction, card),
    )


def with_defaults(given: Any, **values: str | None) -> Any:
    """The parameters with values of a call, where they have none. What is no parameters stays, for the error of it."""
    if all(value is None for value in values.values()):
        return given
    if isinstance(given, list | tuple):
        return [with_defaults(one, **values) for one in given]
    if given is None:
        given = PoolingSettings()
    if not isinstance(given, PoolingSettings):
        return given
    unset = {name: value for name, value in values.items() if getattr(given, name) is None}
    return msgspec.structs.replace(given, **unset)


def read_all(given: Params, num: int, card: ModelCard, task: PoolingTask, truncate: int | None) -> list[CheckedPooling]:
    """The parameters of each of `num` inputs. Raises RequestError."""
    if given is None:
        given = PoolingSettings()
    if isinstance(given, PoolingSettings):
        return [read(given, card, task, truncate)] * num
    if not isinstance(given, Sequence) or not all(isinstance(one, PoolingSettings) for one in given):
        raise RequestError("pooling_params must be PoolingParams or a list of them", "pooling_params")
    if len(given) != num:
        raise RequestError(f"{len(given)} pooling_params for {num} prompts", "pooling_params")
    return [read(one, card, task, truncate) for one in given]


def truncation_of(tokens: int | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """The most tokens of texts, of vLLM's two arguments for it. Raises RequestError."""
    left = dict(kwargs or {})
    other = left.pop("truncate_prompt_tokens", None)
    if left:
        raise not_built(f"tokenization_kwargs.{next(iter(left))}")
    return tokens if other is None else other
