"""Requests that `LLM.beam_search` sends to the ring."""

import pytest

from blockyard import BeamSearchParams
from blockyard.services.offline.sampling_params import read
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Beam, BeamStop


def test_the_search_has_the_given_width_and_ends_when_no_hypothesis_can_improve() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=9, length_penalty=0.5, ignore_eos=True)
    asked = read(params.sampling(), 1000)
    assert (asked.choices.returned, asked.choices.beam) == (3, Beam(3, 0.5, BeamStop.VLLM))
    assert (asked.max_tokens, asked.sampling.ignore_eos, asked.sampling.num_logprobs) == (9, True, 0)
    with pytest.raises(RequestError, match="beam_width must be at least 1, got 0"):
        BeamSearchParams(beam_width=0, max_tokens=1).sampling()
