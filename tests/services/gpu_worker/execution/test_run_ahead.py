"""The scheduler three plans ahead of a real runner: the end of one choice does not change the others."""

from collections.abc import Callable
from pathlib import Path

import pytest
from core_loop import DETOKENIZER, GATEWAY, WORKER, CoreLoop
from equality import noisy, requests
from ties import Ties
from tiny_models import BY_NAME, greedy_score, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Cancel, FinishReason, Sampling, Stop, StreamRef

DEPTH = 3
Tiny = tuple[Runner, Ties, Callable[..., None]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp("tiny")
    score, ties = greedy_score(BY_NAME["llama"].save(folder)), Ties()

    def compare(prompt: list[int], sampling: Sampling, choice: int, expected: list[int], got: list[int]) -> None:
        ties.compare("", prompt, expected[: len(got)], got, noisy(score, sampling, choice))

    return start(folder, num_gpu_blocks_override=60, max_model_len=128), ties, compare


def alone(runner: Runner, prompt: list[int], sampling: Sampling, choice: int = 0) -> list[int]:
    loop = CoreLoop(runner, depth=0, prefix_caching=False)
    loop.add("alone", prompt, sampling, [choice])
    loop.run()
    return loop.outputs["alone", choice]


def test_finish_reasons(tiny: Tiny) -> None:
    """A stop id, max_tokens and the context length, reached at different steps of one batch."""
    runner, _, compare = tiny
    loop = CoreLoop(runner, depth=DEPTH)
    asked = {}
    for i, request in enumerate(requests(6, max_tokens=30)):
        expected = alone(runner, request.prompt, request.sampling)
        stop = [expected[3 + 4 * i]] if i % 2 else []
        num = 30 if i else 128 - len(request.prompt)
        sampling = Sampling(num, request.sampling.temperature, seed=i, ignore_eos=True, stop_token_ids=stop)
        asked[request.name] = (request.prompt, sampling, expected, stop)
        loop.add(request.name, request.prompt, sampling)
    loop.run()
    for i, (name, (prompt, sampling, expected, stop)) in enumerate(asked.items()):
        got, (finish, stop_token) = loop.outputs[name, 0], loop.finishes[name, 0]
        if stop:
            end = expected.index(stop[0]) + 1
            assert (got, finish, stop_token) == (expected[:end], FinishReason.STOP, stop[0])
        else:
            assert (len(got), finish, stop_token) == (sampling.max_tokens, FinishReason.LENGTH, None)
            compare(prompt, sampling, 0, expected[:30], got[:30])
        assert i or len(prompt) + len(got) == 128, "the first one fills the context"


@pytest.mark.parametrize("how", ["stop string", "abort"])
@pytest.mark.parametrize("when", [1, 7])
def test_a_request_that_ends_with_plans_in_flight_does_not_change_the_others(tiny: Tiny, how: str, when: int) -> None:
    """Plans in flight still compute its tokens, which are dropped; its blocks are reused only after these plans."""
    runner, ties, compare = tiny
    asked = requests(5, max_tokens=20)
    loop = CoreLoop(runner, depth=DEPTH)
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.turn()
    for _ in range(when):
        loop.step()
    gone = asked[2]  # it has three choices
    if how == "abort":
        loop.core.on_message(GATEWAY, Cancel(gone.name, 0), 0.0)
    else:
        refs = [StreamRef(gone.name, 0, choice) for choice in range(gone.n)]
        loop.core.on_message(DETOKENIZER, Stop(refs), 0.0)
    known = {place: len(ids) for place, ids in loop.outputs.items()}
    for request in requests(2, max_tokens=20, first=100):  # these reuse its slots and blocks
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.run()
    for place, ids in loop.outputs.items():
        if place[0] == gone.name:
            assert len(ids) == known[place], "tokens of a slot that ended"
    for request in [*asked, *requests(2, max_tokens=20, first=100)]:
        for choice in range(request.n if request is not gone else 0):
            expected = alone(runner, request.prompt, request.sampling, choice)
            got = loop.outputs[request.name, choice]
            assert len(got) == 20
            compare(request.prompt, request.sampling, choice, expected, got)
    ties.check()


def test_preempted_while_three_plans_are_in_flight(tiny: Tiny) -> None:
    """Their results for the sequence count, and it is scheduled again only after them."""
    runner, ties, compare = tiny
    asked = requests(5, max_tokens=24, first=20)
    loop = CoreLoop(runner, depth=DEPTH)
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.turn()
    group = loop.core.groups[WORKER]
    for number in range(60):
        if not loop.plans:
            break
        if number % 5 == 4 and group.running:
            loop.core.lifecycle.preempt(group, group.running[number % len(group.running)])
        loop.step()
    assert loop.run().preemptions_total > 3
    for request in asked:
        for choice in range(request.n):
            expected = alone(runner, request.prompt, request.sampling, choice)
            compare(request.prompt, request.sampling, choice, expected, loop.outputs[request.name, choice])
            assert len(loop.outputs[request.name, choice]) == 24
    ties.check()
