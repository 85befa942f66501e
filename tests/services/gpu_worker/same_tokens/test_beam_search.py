"""Beam search in the scheduler on a real model finds the same sequences and scores as transformers."""

from pathlib import Path

import pytest
import torch
from core_loop import CoreLoop
from slot_plans import prompt_of
from tiny_models import BY_NAME, VOCAB, start
from transformers import PreTrainedModel

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Beam, BeamStop, Sampling

WORDS: dict[BeamStop, bool | str] = {BeamStop.LIKELY: False, BeamStop.FIRST: True, BeamStop.NEVER: "never"}
ROUNDING = 2e-4  # of a score, in float32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, PreTrainedModel]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    theirs = BY_NAME["llama"].save(folder)
    return start(folder, max_model_len=128), theirs


def theirs_find(
    model: PreTrainedModel, prompt: list[int], beam: Beam, n: int, max_tokens: int, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Output tokens and score of each."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=beam.width,
        num_return_sequences=n,
        max_new_tokens=max_tokens,
        length_penalty=beam.length_penalty,
        early_stopping=WORDS[beam.stop],
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    out = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        out.append((row[:end], score))
    return out


@pytest.mark.parametrize(
    ("stop", "width", "n", "penalty"),
    [
        (BeamStop.LIKELY, 2, 2, 1.0),
        (BeamStop.LIKELY, 4, 3, 0.0),
        (BeamStop.FIRST, 5, 5, 2.0),
        (BeamStop.FIRST, 3, 1, -0.5),
        (BeamStop.NEVER, 4, 4, 1.0),
        (BeamStop.NEVER, 3, 3, -0.5),
    ],
)
def test_the_same_sequences_and_scores(
    tiny: tuple[Runner, PreTrainedModel], width: int, n: int, penalty: float, stop: BeamStop
) -> None:
    runner, model = tiny
    beam = Beam(width, penalty, stop)
    loop = CoreLoop(runner, depth=1, max_num_seqs=8)
    prompts = [prompt_of(length, length) for length in (1, 16, 33)]
    stops = list(range(40, 60))  # a tenth of the vocabulary, so that hypotheses end before the last step
    sampling = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=stops, num_logprobs=0)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, sampling, n, beam=beam)
    loop.run()
    lengths = set()
    for i, prompt in enumerate(prompts):
        expected = theirs_find(model, prompt, beam, n, 12, [1, *stops])
        for choice, (ids, score) in enumerate(expected):
            got, entries = loop.outputs[str(i), choice], loop.logprobs[str(i), choice]
            assert [entry.token_id for entry in entries] == got
            total = sum(entry.logprob for entry in entries)
            assert total / len(got) ** penalty == pytest.approx(score, abs=ROUNDING)
            assert got == ids, f"prompt {i}, choice {choice}"
            lengths.add(len(got))
    assert len(lengths) > 1 or penalty > 0


@pytest.mark.parametrize("depth", [0, 3])
def test_the_result_is_the_same_when_preempted_and_beside_other_requests(
    tiny: tuple[Runner, PreTrainedModel], depth: int
) -> None:
    """Too few slots and blocks do not change the result."""
    runner, model = tiny
    beam = Beam(4, 1.0)
    loop = CoreLoop(runner, depth=depth, max_num_seqs=5, chunk=8)
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True, num_logprobs=0)
    for i in range(3):
        loop.add(f"beam {i}", prompt_of(20 + i, i), sampling, 4, beam=beam)
        loop.add(f"plain {i}", prompt_of(20 + i, i), sampling)
    loop.run()
    for i in range(3):
        expected = theirs_find(model, prompt_of(20 + i, i), beam, 4, 20, [VOCAB])
        assert [loop.outputs[f"beam {i}", k] for k in range(4)] == [ids for ids, _ in expected]
