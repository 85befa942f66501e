"""Outputs of pooling models, with vLLM's names.

The garbage collector does not visit them: a call may have many thousands, and none is part of a cycle.
"""

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from blockyard.shared.ring_client.pooling.calls import PooledText
from blockyard.shared.ring_client.pooling.pair_scores import only_number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


class PooledNumbers(msgspec.Struct, gc=False, eq=False):
    """A result in the shape that the model's pooling makes: numbers, or a row of them for each of several tokens."""

    data: "npt.NDArray[np.float32]"


PoolingOutput = PooledNumbers  # vLLM's name


class EmbeddingOutput(msgspec.Struct, gc=False, eq=False):
    """The vector of a text."""

    data: "npt.NDArray[np.float32]"

    @property
    def embedding(self) -> list[float]:
        """A new list: of many texts, lists would take eight times the memory of `data`."""
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def hidden_size(self) -> int:
        return len(self.data)


class ClassificationOutput(msgspec.Struct, gc=False):
    """The probability of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, gc=False):
    """The score of a pair of texts."""

    score: float


class PoolingRequestOutput(msgspec.Struct, Generic[T], gc=False):
    """The output of one prompt or pair."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], gc=False):
    """Of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], gc=False):
    """Of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], gc=False):
    """Of `LLM.score`."""


AnyOutput = PoolingRequestOutput[Any]


def pooled(request_id: str, item: PooledText, ids: list[int]) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput(request_id, PoolingOutput(item.data), ids, num_cached_tokens=item.cached_tokens)


def embedded(request_id: str, item: PooledText, ids: list[int]) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(request_id, EmbeddingOutput(item.data), ids, num_cached_tokens=item.cached_tokens)


def classified(request_id: str, item: PooledText, ids: list[int]) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(
        request_id, ClassificationOutput(item.data.tolist()), ids, num_cached_tokens=item.cached_tokens
    )


def scored(request_id: str, item: PooledText, ids: list[int]) -> ScoringRequestOutput:
    return ScoringRequestOutput(request_id, ScoringOutput(only_number(item)), ids, num_cached_tokens=item.cached_tokens)
