"""Outputs of pooling models, with vLLM's names."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from blockyard.shared.ring_client.pooling.calls import PooledText
from blockyard.shared.ring_client.pooling.pair_scores import only_number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PooledNumbers:
    """A result in the shape that the model's pooling makes: numbers, or a row of them for each of several tokens."""

    data: "npt.NDArray[np.float32]"


PoolingOutput = PooledNumbers  # vLLM's name


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """The output of one prompt or pair."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `LLM.score`."""


AnyOutput = PoolingRequestOutput[Any]


def pooled(request_id: str, item: PooledText, ids: list[int]) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput(request_id, PoolingOutput(item.data), ids, num_cached_tokens=item.cached_tokens)


def embedded(request_id: str, item: PooledText, ids: list[int]) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(
        request_id, EmbeddingOutput(item.data.tolist()), ids, num_cached_tokens=item.cached_tokens
    )


def classified(request_id: str, item: PooledText, ids: list[int]) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(
        request_id, ClassificationOutput(item.data.tolist()), ids, num_cached_tokens=item.cached_tokens
    )


def scored(request_id: str, item: PooledText, ids: list[int]) -> ScoringRequestOutput:
    return ScoringRequestOutput(request_id, ScoringOutput(only_number(item)), ids, num_cached_tokens=item.cached_tokens)
