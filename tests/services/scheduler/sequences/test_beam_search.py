"""The log-probability entries that hypotheses keep. `lifecycle/test_beam_sequences.py` tests the search itself."""

from array import array

import pytest

from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Hypothesis
from blockyard.shared.messages import Beam, Sampling, TokenLogprobs

TOP = TokenLogprobs(5, -0.1, 1, [5, 8, 3], [-0.1, -2.5, -4.0])
EOS = [1]


def first_entries(num_logprobs: int | None) -> list[list[TokenLogprobs]]:
    """Returns the entries of the two hypotheses after one step."""
    search = BeamSearch(Beam(2), Sampling(max_tokens=4, num_logprobs=num_logprobs))
    return [hypothesis.entries for _, hypothesis in search.step([Hypothesis(array("I"), top=TOP)], EOS)]


@pytest.mark.parametrize("num", [0, 1, 2])
def test_an_entry_has_its_token_and_the_requested_number_of_candidates(num: int) -> None:
    ids, logprobs = TOP.top_ids[:num], TOP.top_logprobs[:num]
    assert first_entries(num) == [
        [TokenLogprobs(5, -0.1, 1, ids, logprobs)],
        [TokenLogprobs(8, -2.5, 2, ids, logprobs)],
    ]


def test_without_requested_logprobs_no_entry_is_kept() -> None:
    assert first_entries(None) == [[], []]
