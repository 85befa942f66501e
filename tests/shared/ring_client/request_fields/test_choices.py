"""The choices that are computed, and the choices that are returned."""

from dataclasses import dataclass

import pytest

from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Beam, BeamStop, Sampling
from blockyard.shared.ring_client.request_fields.choices import MAX_BEST_OF, best, read_choices


@dataclass
class Token:
    logprob: float


def test_the_likeliest_a_token_come_back_in_that_order() -> None:
    tokens = [[Token(-2.0)] * 3, [Token(-0.5)] * 8, [], [Token(-1.0)]]
    assert best(["a", "b", "c", "d"], tokens, 2) == ["b", "d"]
    assert best(["a", "b", "c", "d"], tokens, 4) == ["a", "b", "c", "d"], "all of them keep their places"


def test_best_of_needs_log_probabilities_and_all_need_to_end() -> None:
    params = SamplingParams(n=2, best_of=5)
    choices = read_choices(params)
    assert (choices.returned, choices.computed, choices.beam) == (2, 5, None)
    assert choices.sampling(Sampling(4)).num_logprobs == 0
    assert read_choices(SamplingParams(n=2)).sampling(Sampling(4)).num_logprobs is None
    with pytest.raises(RequestError) as caught:
        read_choices(params, streams=True)
    assert caught.value.field == "best_of"
    assert read_choices(SamplingParams(n=3, best_of=3), streams=True).computed == 3


def test_the_bound_of_best_of_is_for_more_choices_than_are_returned() -> None:
    assert read_choices(SamplingParams(n=MAX_BEST_OF + 1, best_of=MAX_BEST_OF + 1)).computed == MAX_BEST_OF + 1
    with pytest.raises(RequestError) as caught:
        read_choices(SamplingParams(n=1, best_of=MAX_BEST_OF + 1))
    assert caught.value.field == "best_of"


def test_a_beam_search_is_as_wide_as_best_of_or_n() -> None:
    params = SamplingParams(n=2, best_of=5, use_beam_search=True, length_penalty=0.5, early_stopping=True)
    choices = read_choices(params)
    assert (choices.returned, choices.computed) == (2, 2)
    assert choices.beam == Beam(5, 0.5, BeamStop.FIRST)
    model_default = Sampling(4, temperature=0.6, top_p=0.9, top_k=20)
    assert choices.sampling(model_default) == Sampling(4, temperature=0.0)
    with pytest.raises(RequestError) as caught:
        read_choices(params, streams=True)
    assert caught.value.field == "use_beam_search"
