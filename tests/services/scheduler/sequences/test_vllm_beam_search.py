"""`BeamStop.VLLM` against the rules of vLLM's beam search, written down again on a model of a few tokens."""

import math
import random
from array import array

import pytest

from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Hypothesis
from blockyard.shared.messages import Beam, BeamStop, Sampling, TokenLogprobs

VOCAB, EOS = 9, 0
Logprobs = dict[int, float]


def next_logprobs(seed: int, outputs: tuple[int, ...]) -> Logprobs:
    rng = random.Random(f"{seed} {outputs}")
    weights = [rng.random() ** 2 + 1e-3 for _ in range(VOCAB)]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def top(logprobs: Logprobs, num: int) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda item: -item[1])[:num]


def reference(seed: int, width: int, max_tokens: int, num_prompt: int, penalty: float) -> list[tuple[int, ...]]:
    """Every step: the top 2 * width tokens of each beam; those that end are complete, the best others go on."""

    def score(beam: tuple[tuple[int, ...], float]) -> float:
        length = num_prompt + len(beam[0]) - (beam[0][-1] == EOS)
        return beam[1] / length**penalty

    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    complete: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        found = [
            ((*outputs, token), total + logprob)
            for outputs, total in beams
            for token, logprob in top(next_logprobs(seed, outputs), 2 * width)
        ]
        complete += [beam for beam in found if beam[0][-1] == EOS]
        beams = sorted((beam for beam in found if beam[0][-1] != EOS), key=score, reverse=True)[:width]
    return [outputs for outputs, _ in sorted([*complete, *beams], key=score, reverse=True)[:width]]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("num_prompt", [1, 30])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_same_sequences_in_the_same_order(width: int, num_prompt: int, penalty: float) -> None:
    for seed in range(40):
        beam = Beam(width, penalty, BeamStop.VLLM)
        search = BeamSearch(beam, Sampling(max_tokens=7), num_prompt)
        num = search.num_candidates([EOS])
        live = [Hypothesis(array("I"))]
        while live:
            for one in live:
                likeliest = top(next_logprobs(seed, tuple(one.outputs)), num)
                ids, logprobs = [token for token, _ in likeliest], [logprob for _, logprob in likeliest]
                one.top = TokenLogprobs(ids[0], logprobs[0], 1, ids, logprobs)
            live = [hypothesis for _, hypothesis in search.step(live, [EOS])]
        found = [tuple(one.hypothesis.outputs) for one in search.finished]
        assert found == reference(seed, width, 7, num_prompt, penalty), seed
