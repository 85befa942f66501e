"""Forks and beam searches with the batch on the device and steps launched ahead of the host.

Without a GPU the torch references replace the Triton kernels.
"""

from pathlib import Path

import pytest
from core_loop import WORKER, CoreLoop
from equality import noisy, requests
from reference_ops import run_ahead
from ties import Score, Ties
from tiny_models import BY_NAME, greedy_score, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Beam, Sampling

Runners = tuple[Runner, Runner, Score]  # in lockstep, and ahead


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    folder: Path = tmp_path_factory.mktemp("tiny")
    score = greedy_score(BY_NAME["llama"].save(folder))
    plain, ahead = (start(folder, max_model_len=128, num_gpu_blocks_override=60) for _ in range(2))
    run_ahead(ahead, capacity=10)
    return plain, ahead, score


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_that_share_a_prompt(runners: Runners, prefix_caching: bool) -> None:
    plain, ahead, score = runners
    asked = [request for request in requests(6, max_tokens=14) if request.n > 1]
    loop = CoreLoop(ahead, depth=2, prefix_caching=prefix_caching)
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.run()
    assert loop.most_launched > 1
    ties = Ties()
    for request in asked:
        for choice in range(request.n):
            alone = CoreLoop(plain, depth=0, prefix_caching=False)
            alone.add("alone", request.prompt, request.sampling, [choice])
            alone.run()
            expected, got = alone.outputs["alone", choice], loop.outputs[request.name, choice]
            ties.compare("", request.prompt, expected, got, noisy(score, request.sampling, choice))
    ties.check()


@pytest.mark.parametrize("preempts", [False, True])
def test_choices_whose_prompt_reports_log_probabilities(runners: Runners, preempts: bool) -> None:
    """The first choice has those of the prompt, which is cut over steps in flight, and preempted between two chunks."""
    plain, ahead, _ = runners
    asked = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True, num_prompt_logprobs=2)
    found = []
    for runner, depth in ((plain, 0), (ahead, 3)):
        loop = CoreLoop(runner, depth=depth, chunk=8)
        loop.add("beside", [5, 6, 7], Sampling(max_tokens=30, temperature=0.0, ignore_eos=True))
        prompts = {name: [(31 * i + seed) % 190 + 5 for i in range(60)] for name, seed in (("a", 1), ("b", 2))}
        for name, prompt in prompts.items():
            loop.add(name, prompt, asked, 3)
        loop.turn()
        loop.step()
        group = loop.core.groups[WORKER]
        if preempts and runner is ahead:
            (partial,) = [one for one in group.running if one.sequence.request.id == "a"]
            assert 0 < partial.num_computed_tokens < 60
            loop.core.lifecycle.preempt(group, partial)
        assert loop.run().preemptions_total == (preempts and runner is ahead)
        assert {place: len(entries) for place, entries in loop.prompt_logprobs.items()} == {("a", 0): 59, ("b", 0): 59}
        for (name, _), entries in loop.prompt_logprobs.items():
            assert [entry.token_id for entry in entries] == prompts[name][1:]
        found.append(loop)
    assert found[1].outputs == found[0].outputs and found[1].most_launched > 1
    for place, entries in found[0].prompt_logprobs.items():
        for want, got in zip(entries, found[1].prompt_logprobs[place], strict=True):
            assert (got.rank, got.top_ids) == (want.rank, want.top_ids)
            values = [want.logprob, *want.top_logprobs]
            assert [got.logprob, *got.top_logprobs] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("depth", [0, 2])
def test_beam_searches(runners: Runners, depth: int) -> None:
    """Beside a stream that runs ahead: hypotheses continue in their slots with tokens other than the sampled ones."""
    plain, ahead, _ = runners
    found = []
    for runner, ahead_by in ((plain, 0), (ahead, depth)):
        loop = CoreLoop(runner, depth=ahead_by, max_num_seqs=9)
        for request in requests(2, max_tokens=14, first=4):
            sampling = Sampling(max_tokens=14, temperature=0.0, stop_token_ids=[9, 10, 11], num_logprobs=0)
            loop.add(request.name, request.prompt, sampling, 3, beam=Beam(4))
        loop.add("beside", [5, 6, 7], Sampling(max_tokens=30, temperature=0.0, ignore_eos=True))
        loop.run()
        found.append((loop.outputs, {place: sum(p.logprob for p in ps) for place, ps in loop.logprobs.items()}))
    assert found[1][0] == found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-3)
