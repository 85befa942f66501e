"""The number of choices that a request computes and returns: `n`, `best_of` and beam search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import DEFAULT_SAMPLING, Beam, BeamStop, Sampling
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.sampling_fields import SamplingRequest

MAX_BEST_OF = 20
MAX_WIDTH = 64  # of a beam search

STOPS: dict[bool | str, BeamStop] = {False: BeamStop.LIKELY, True: BeamStop.FIRST, "never": BeamStop.NEVER}
STOPS["vllm"] = BeamStop.VLLM

# fields that would change the likeliest token -> their neutral values
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **{name: (None, getattr(DEFAULT_SAMPLING, name)) for name in limits.RANGES},
    "temperature": (None, 0, 1),
    "top_k": (None, 0, -1),
    "stop": (None, [], ""),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "logit_bias": (None, {}),
}


class ChoicesRequest(SamplingRequest, Protocol):
    @property
    def use_beam_search(self) -> bool | None: ...
    @property
    def length_penalty(self) -> float | None: ...
    @property
    def early_stopping(self) -> bool | str | None: ...


@dataclass(frozen=True, slots=True)
class Choices:
    returned: int
    computed: int  # if more than `returned`, the best are returned
    beam: Beam | None = None

    def sampling(self, sampling: Sampling) -> Sampling:
        """Returns the sampling to send, with the log-probabilities that ranking the choices needs."""
        if self.beam is not None:
            plain = {name: getattr(DEFAULT_SAMPLING, name) for name in limits.RANGES}  # not the model's defaults
            return msgspec.structs.replace(sampling, **plain | {"temperature": 0.0})
        if self.computed > self.returned and sampling.num_logprobs is None:
            return msgspec.structs.replace(sampling, num_logprobs=0)
        return sampling


def read_choices(request: ChoicesRequest, streams: bool = False) -> Choices:
    """Raises RequestError naming the field."""
    n = limits.integer("n", request.n, 1, 1, limits.MAX_CHOICES)
    best_of = request.best_of
    if best_of is not None and best_of != n:
        limits.integer("best_of", best_of, n, n, MAX_BEST_OF)
    if request.use_beam_search:
        return _read_beam(request, n, best_of or n, streams)
    for field, neutral in (("length_penalty", (None, 1)), ("early_stopping", (None, False))):
        if getattr(request, field) not in neutral:
            raise RequestError(f"{field} is for beam search: it needs use_beam_search to be true", field)
    if streams and best_of not in (None, n):
        raise RequestError(f"best_of {best_of} with n {n} cannot be streamed: the best are known at the end", "best_of")
    return Choices(n, best_of or n)


def _read_beam(request: ChoicesRequest, n: int, width: int, streams: bool) -> Choices:
    if streams:
        raise RequestError("use_beam_search cannot be streamed: its sequences are known at the end", "use_beam_search")
    if width > MAX_WIDTH:
        raise RequestError(f"a beam search has at most {MAX_WIDTH} beams, got {width}", "n")
    for field, neutral in _NEUTRAL.items():
        value = getattr(request, field)
        if value not in neutral:
            raise RequestError(f"a beam search follows the model's own log-probabilities: leave {field} out", field)
    penalty = limits.number("length_penalty", request.length_penalty, 1.0, -10.0, 10.0)
    stop = STOPS.get(request.early_stopping if request.early_stopping is not None else False)
    if stop is None:
        raise RequestError(
            f'early_stopping must be true, false, "never" or "vllm", got {request.early_stopping!r}', "early_stopping"
        )
    return Choices(n, n, Beam(width, penalty, stop))


class HasLogprob(Protocol):
    @property
    def logprob(self) -> float: ...


T = TypeVar("T")


def best(choices: Sequence[T], logprobs: Sequence[Sequence[HasLogprob]], count: int) -> list[T]:
    """Returns the `count` choices with the highest mean log-probability, best first; unsorted if none is dropped."""
    if len(choices) <= count:
        return list(choices)
    means = [sum(p.logprob for p in entries) / len(entries) if entries else -math.inf for entries in logprobs]
    order = sorted(range(len(choices)), key=lambda i: -means[i])
    return [choices[i] for i in order[:count]]
